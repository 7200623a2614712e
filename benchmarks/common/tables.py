"""The harness of all benchmarks: which systems, on what machine, and how figures are printed."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Protocol, TypeVar

__all__ = ["add_only", "chosen", "machine", "markdown", "ratios", "size", "spread"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def add_only(parser: argparse.ArgumentParser) -> None:
    """Add `--only TEXT ...`, which `chosen` reads."""
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="what has one of these in its name"
    )


def chosen(parser: argparse.ArgumentParser, systems: Sequence[_T], only: Sequence[str]) -> list[_T]:
    """Return the systems with one of the texts in their name; all without, an error if none."""
    found = [s for s in systems if not only or any(text in s.name for text in only)]
    if not found:
        names = "; ".join(system.name for system in systems)
        parser.error(f"no system has {' or '.join(only)} in its name; there are: {names}")
    return found


def size(text: str) -> tuple[int, int]:
    """Parse `PPxM`: the ranks of a pipeline and its micro-batches."""
    try:
        pp, num_microbatches = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4x16") from None
    return pp, num_microbatches


def machine() -> str:
    """Return the versions, the cores and the present load, which belong beside every figure."""
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    return (
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}"
    )


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Return one list of times over another, draw by draw."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median and, in brackets, the lowest and the highest value."""
    median, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} .. {high})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """Return a table in Markdown; columns but the first are aligned as `align` says."""
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
