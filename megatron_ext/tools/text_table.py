"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns: the first left-aligned, the others right-aligned.

    Raises:
        ValueError: The rows have different numbers of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells))
    return "\n".join(lines)
