"""Reports the progress of preprocessing: a bar on a terminal, else a line every few seconds."""

# ruff: noqa: T201 - a command reports on stderr

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import console, progress

__all__ = ["ProgressReporter", "reporting"]

_LINE_INTERVAL_S = 10.0


class ProgressReporter:
    """Counts what was done, and reports it on stderr.

    Args:
        bar: Disabled where stderr is no terminal.
        total_bytes: Size of the whole input, as stored.
    """

    def __init__(self, bar: progress.Progress, total_bytes: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total_bytes, documents=0, tokens=0)
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._last_line_s = time.monotonic()
        self.documents = 0
        self.tokens = 0

    def read(self, num_bytes: int) -> None:
        """Counts bytes of input."""
        self._read_bytes += num_bytes

    def encoded(self, documents: int, tokens: int) -> None:
        """Counts finished documents and tokens, and reports."""
        self.documents += documents
        self.tokens += tokens
        self._bar.update(
            self._task, completed=self._read_bytes, documents=self.documents, tokens=self.tokens
        )
        if self._bar.disable and time.monotonic() - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            percent = 100 * self._read_bytes / max(self._total_bytes, 1)
            counts = f"{self.documents} documents, {self.tokens} tokens"
            print(f"preprocess: {percent:.0f} % read, {counts}", file=sys.stderr, flush=True)


@contextmanager
def reporting(total_bytes: int) -> Iterator[ProgressReporter]:
    """Report what the block does; the bar is full if it ends well."""
    with progress.Progress(
        progress.TextColumn("preprocess"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TextColumn("{task.fields[documents]} documents, {task.fields[tokens]} tokens"),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        reporter = ProgressReporter(bar, total_bytes)
        yield reporter
        reporter.read(total_bytes - reporter._read_bytes)
        reporter.encoded(0, 0)
