"""Finds a run's traces and reads a rank's file one iteration at a time.

A file may still be growing, or may end where its rank died. Unreadable lines are skipped and
counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.tools.trace.file_checks import (
    MAX_NUMBER,
    check_figures,
    check_header,
    check_span,
)
from megatron_ext.tracing.records import FILE_NAME, FORMAT, Header

_MAX_HEADER_BYTES = 1 << 20
_SEPARATORS = ",] \r\n"
"""Characters between events on different lines and after the last event."""
DAMAGED = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors from reading content that none of our ranks wrote."""


def _refuse_constant(name: str) -> None:
    """Reject NaN and infinity, which are not valid JSON, because browsers parse the data as JSON.

    Raises:
        ValueError: Always.
    """
    raise ValueError(name)


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


class Span(NamedTuple):
    """An activity and its duration, in one iteration on one rank (`tracing.records`)."""

    name: str
    begin_ns: int
    """Nanoseconds since the start of the iteration."""
    end_ns: int
    attributes: Mapping[str, Any]
    message: int = 0
    """Number of the message sent or received, or 0 if the span does not belong to a message."""


class Iteration(NamedTuple):
    """One iteration on one rank."""

    number: int
    begin_ns: int
    """Start time on the rank's clock, plus `TraceFile.shift_ns`."""
    duration_ns: int
    spans: list[Span]
    """The spans, sorted by start time."""
    figures: Mapping[str, Any]


@dataclass
class TraceFile:
    """One rank's trace file."""

    path: Path
    header: Header
    shift_ns: int = 0
    """Amount to add to this file's times to make times agree across all ranks."""
    damaged: set[int] = field(default_factory=set)
    """Numbers of the lines skipped while reading iterations."""
    num_lines: int = 1
    """Number of lines read so far, because the file may still grow."""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield every line's number and its comma-separated events.

        Raises:
            DataError: The file can no longer be read.
        """
        try:
            # If the rank died, the file may end in the middle of a character.
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file):
                    if text := line.removeprefix("[").strip(_SEPARATORS):
                        yield number, text
        except OSError as error:
            raise DataError(
                f"{self.path.name} cannot be read: {error.strerror}"
            ) from error

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield all iterations in file order, or just the iteration numbered `only`.

        Raises:
            DataError: The file can no longer be read.
        """
        for number, text in self.lines():
            self.num_lines = max(self.num_lines, number + 1)
            if number == 0:  # the header
                continue
            # Search the text first, to avoid decoding the lines of other iterations.
            # Ranks write JSON without spaces, and the number is always followed by
            # other figures.
            if only is not None and f'"iteration":{only},' not in text:
                continue
            try:
                yield self._iteration(text)
            except DAMAGED:
                self.damaged.add(number)

    def _iteration(self, text: str) -> Iteration:
        # The iteration's own event comes last, because the rank writes it at the end.
        *events, last = _decode(f"[{text}]")
        figures = last["args"]
        check_figures(figures)
        begin_ns = _nanoseconds(last["ts"])
        duration_ns = _nanoseconds(last["dur"])
        spans = []
        for event in events:
            # The time since boot is a float in microseconds and too large to resolve
            # single nanoseconds, so a span may appear to start before its iteration.
            start_ns = max(0, round(1e3 * event["ts"]) - begin_ns)
            end_ns = start_ns + round(1e3 * event["dur"])
            if not start_ns <= end_ns < MAX_NUMBER:
                raise ValueError(f"a span from {start_ns} to {end_ns} ns")
            category = event["cat"]
            attributes = event["args"]
            check_span(category, attributes)
            message = event.get("bind_id", 0)
            if not isinstance(message, int):
                raise TypeError(f"a message has the number {message!r}")
            spans.append(Span(category, start_ns, end_ns, attributes, message))
        # A rank writes a span when it ends, so nested spans are
        # out of order in the file.
        spans.sort(key=lambda span: span.begin_ns)
        return Iteration(
            figures["iteration"],
            begin_ns + self.shift_ns,
            duration_ns,
            spans,
            figures,
        )


def _nanoseconds(time_us: float) -> int:
    """Convert a time from a file to whole nanoseconds.

    Raises:
        OverflowError: The value is infinite.
        ValueError: The value is not a possible time or duration.
    """
    time_ns = round(1e3 * time_us)
    if not 0 <= time_ns < MAX_NUMBER:
        raise ValueError(f"a time of {time_ns} ns")
    return time_ns


def open_run(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return a run's trace files, ordered by global rank, and notes about problems.

    Raises:
        DataError: The directory does not exist or contains no trace.
    """
    files, notes = _readable_files(directory)
    if not files:
        reason = f": {notes[0]}" if notes else ""
        raise DataError(
            f"{directory} contains no trace of a rank{reason}; give the folder of a run that was "
            "trained with --trace, such as benchmark/data-1-pipeline-4-tensor-1-pp"
        )
    # A run overwrites the files of an earlier run in the same folder. If the earlier
    # run had more ranks, some of its files remain.
    files.sort(key=lambda file: file.header.wall_ns)
    newest = files[-1].header
    # Files are sorted by time, so this keeps each rank's newest file.
    by_rank: dict[int, TraceFile] = {}
    for file in files:
        if _is_of_run(file.header, newest):
            by_rank[file.header.rank] = file
    num_left_out = len(files) - len(by_rank)
    if num_left_out:
        notes.append(
            f"{num_left_out} files are left out: copies, or files from an earlier run or attempt"
        )
    num_missing = newest.num_ranks - len(by_rank)
    if num_missing > 0:
        notes.append(f"{num_missing} of {newest.num_ranks} ranks have no trace")
    files_by_rank = [by_rank[rank] for rank in sorted(by_rank)]
    return files_by_rank, notes


def _readable_files(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return a directory's readable traces, and notes about unreadable ones.

    Raises:
        DataError: The directory cannot be listed.
    """
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise DataError(
            f"{directory} cannot be listed: {error.strerror}; give the folder of a run that was "
            "trained with --trace, such as benchmark/data-1-pipeline-4-tensor-1-pp"
        ) from error
    pattern = FILE_NAME.format("*", "*", "*")
    files: list[TraceFile] = []
    notes: list[str] = []
    for path in paths:
        # Open regular files only: opening a pipe would block.
        if not fnmatch(path.name, pattern) or not path.is_file():
            continue
        try:
            files.append(_open(path))
        except DataError as error:
            notes.append(f"{path.name}: {error}")
    return files, notes


def _is_of_run(header: Header, newest: Header) -> bool:
    """Return whether a file belongs to the same run as the newest file."""
    if header.sizes != newest.sizes:
        return False
    # Runs started without torchrun have no run id.
    have_ids = header.run and newest.run
    return header.run == newest.run or not have_ids


def _open(path: Path) -> TraceFile:
    """Read the first line of a file.

    Raises:
        DataError: The file cannot be read or is not a trace in this version's format.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER_BYTES)
        events = line.decode().removeprefix("[").strip(_SEPARATORS)
        fields = _decode(f"[{events}]")[0]["args"]
        number = fields.pop("format")
        # Check the format first, because other fields may differ between formats.
        if number != FORMAT:
            raise DataError(
                f"it has format {number}, but this version reads format {FORMAT}; use the version "
                "that recorded it"
            )
        header = Header(**fields)
        check_header(header)
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}") from error
    except DAMAGED as error:
        raise DataError("it is not a trace, or its first line is damaged") from error
    return TraceFile(path, header)
