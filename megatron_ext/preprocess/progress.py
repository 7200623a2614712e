"""Reports the progress of preprocessing: a bar on a terminal, else a line every few seconds."""

# ruff: noqa: T201 - a command reports on stderr

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ProgressReporter"]

_LINE_INTERVAL_S = 10.0


class ProgressReporter:
    """Context manager that reports progress on stderr.

    Args:
        total_bytes: Size of the whole input, as stored.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._last_line_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.documents = 0
        self.tokens = 0

    def __enter__(self) -> ProgressReporter:
        if sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            if exc_type is None:
                self._read_bytes = self._total_bytes
                self._update_bar()
            self._bar.stop()

    def read(self, num_bytes: int) -> None:
        """Counts bytes of input."""
        self._read_bytes += num_bytes

    def encoded(self, documents: int, tokens: int) -> None:
        """Counts finished documents and tokens, and reports."""
        self.documents += documents
        self.tokens += tokens
        if self._bar is not None:
            self._update_bar()
        elif time.monotonic() - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            percent = 100 * self._read_bytes / max(self._total_bytes, 1)
            counts = f"{self.documents} documents, {self.tokens} tokens"
            print(f"preprocess: {percent:.0f} % read, {counts}", file=sys.stderr, flush=True)

    def _start_bar(self) -> None:
        from rich import console, progress

        self._bar = progress.Progress(
            progress.TextColumn("preprocess"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TextColumn("{task.fields[documents]} documents, {task.fields[tokens]} tokens"),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=self._total_bytes, documents=0, tokens=0)
        self._bar.start()

    def _update_bar(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(
            self._task, completed=self._read_bytes, documents=self.documents, tokens=self.tokens
        )
