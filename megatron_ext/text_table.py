"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns: the first left-aligned, the others right-aligned.

    Raises:
        ValueError: The rows have different numbers of cells.
    """
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column))
    lines = []
    for row in rows:
        padded_cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            padded_cells.append(cell.rjust(width))
        lines.append("  ".join(padded_cells))
    return "\n".join(lines)
