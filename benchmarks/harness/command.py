"""Options that all benchmarks share, and functions that print and write figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.files import cannot_write, write_text

if TYPE_CHECKING:
    from .systems import System


def options(
    about: str | None, quick: str = "", *, only: bool = False, figures: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share.

    Args:
        about: The benchmark's docstring. Its first line is shown.
        quick: What `--quick` runs, or empty for no such option.
        only: Whether to add `--only TEXT ...`, which chooses systems, see `chosen`.
        figures: Whether to add `--json FILE`, which writes the figures, see `write_json`.
    """
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    if figures:  # fail before measuring if the file cannot be written
        parser.add_argument(
            "--json", type=_writable, help="also write the figures to this file"
        )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if only:
        parser.add_argument(
            "--only",
            nargs="+",
            default=[],
            metavar="TEXT",
            help="only systems with one of these texts in their name",
        )
    return parser


def _writable(text: str) -> Path:
    path = Path(text)
    existing = path if path.exists() else path.parent
    if path.is_dir() or not existing.exists() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written; choose another file"
        )
    return path


def write_json(path: Path | None, content: Any) -> None:
    """Replace a file with these figures, unless `path` is None.

    Raises:
        SystemExit: The file cannot be written. The message says why, and the old file remains.
    """
    if path is None:
        return
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SystemExit(
            cannot_write(path, error, "free some space, or choose another --json file")
        ) from error


def chosen(
    parser: argparse.ArgumentParser, systems: Sequence[System], only: Sequence[str]
) -> list[System]:
    """Return the systems with one of the texts in their name, or all if there are no texts."""
    selected = []
    for system in systems:
        if not only or any(text in system.name for text in only):
            selected.append(system)
    if not selected:
        names = "; ".join(system.name for system in systems)
        parser.error(
            f"no system has {' or '.join(only)} in its name; the systems are: {names}"
        )
    return selected


def size(text: str) -> tuple[int, int]:
    """Parse `PPxM`: the number of pipeline ranks and of micro-batches."""
    try:
        pp, num_microbatches = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as 4x16"
        ) from None
    return pp, num_microbatches


def machine() -> str:
    """Return the versions, cores and current load, to print next to the figures."""
    packages = ", ".join(
        f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core")
    )
    return (
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}"
    )


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Return the ratios of two lists of times, draw by draw."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median and, in brackets, the lowest and the highest value."""
    median = f"{statistics.median(values):.{digits}f}"
    low = f"{min(values):.{digits}f}"
    high = f"{max(values):.{digits}f}"
    return f"{median} ({low}..{high})"


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    """Return a figure as a table cell, which is empty if the figure is None."""
    return "" if value is None else format(scale * value, form)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)
