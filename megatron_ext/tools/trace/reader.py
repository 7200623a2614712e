"""Finds the traces of a run, and reads the file of a rank, one iteration at a time.

A file may still grow, or end where its rank died: unreadable lines are skipped and counted.
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
"""Characters between the events of two lines, and after the last one."""
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
    """Reject NaN and infinities, which are not JSON: browsers read the pages made from a trace.

    Raises:
        ValueError: Always.
    """
    raise ValueError(name)


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


class Span(NamedTuple):
    """Something that took time within one iteration of one rank; see `tracing.records`."""

    name: str
    begin_ns: int
    """Nanoseconds since the start of the iteration."""
    end_ns: int
    attributes: Mapping[str, Any]
    message: int = 0
    """Number of the message that was sent or received; 0 if the span belongs to no message."""


class Iteration(NamedTuple):
    """One iteration of one rank."""

    number: int
    begin_ns: int
    """On the clock of the rank, plus `TraceFile.shift_ns`."""
    duration_ns: int
    spans: list[Span]
    """Sorted by their start."""
    figures: Mapping[str, Any]


@dataclass
class TraceFile:
    """The file of one rank."""

    path: Path
    header: Header
    shift_ns: int = 0
    """Amount to add to the times of this file so that those of all ranks agree."""
    damaged: set[int] = field(default_factory=set)
    """Numbers of the lines that were skipped when iterations were read."""
    num_lines: int = 1
    """Number of lines that were read; a file may still grow."""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the number and the events (separated by commas) of every line.

        Raises:
            DataError: The file can no longer be read.
        """
        try:
            # A rank that died may have left an incomplete character.
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file):
                    if text := line.removeprefix("[").strip(_SEPARATORS):
                        yield number, text
        except OSError as error:
            raise DataError(
                f"{self.path.name} cannot be read: {error.strerror}"
            ) from error

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield all iterations in the order of the file, or only the one numbered `only`.

        See `lines`.
        """
        for number, text in self.lines():
            self.num_lines = max(self.num_lines, number + 1)
            # Search the text first, because lines of other iterations need no decoding.
            # Line 0 is the header.
            if not number or (only is not None and f'"iteration":{only},' not in text):
                continue
            try:
                yield self._iteration(text)
            except DAMAGED:
                self.damaged.add(number)

    def _iteration(self, text: str) -> Iteration:
        # The event of the iteration itself comes last, because it is written when the iteration
        # ends.
        *events, last = _decode(f"[{text}]")
        figures = last["args"]
        check_figures(figures)
        begin_ns = _nanoseconds(last["ts"])
        duration_ns = _nanoseconds(last["dur"])
        spans = []
        for event in events:
            # Since the time since boot is a large float, its last nanoseconds are rounded.
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
        # A span is written when it ends, so nested spans are out of order in the file.
        spans.sort(key=lambda span: span.begin_ns)
        return Iteration(
            figures["iteration"], begin_ns + self.shift_ns, duration_ns, spans, figures
        )


def _nanoseconds(time_us: float) -> int:
    """Return a time from a file in whole nanoseconds.

    Raises:
        OverflowError: It is infinite.
        ValueError: It is not a possible time or duration.
    """
    time_ns = round(1e3 * time_us)
    if not 0 <= time_ns < MAX_NUMBER:
        raise ValueError(f"a time of {time_ns} ns")
    return time_ns


def open_run(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return the files of a run, ordered by global rank, and notes on problems.

    Raises:
        DataError: The directory does not exist or contains no trace.
    """
    files, notes = _readable_files(directory)
    if not files:
        reason = f": {notes[0]}" if notes else ""
        raise DataError(
            f"{directory} holds no trace of a rank{reason}; give the folder of a run, such as "
            f"benchmark/data-1-pipeline-4-tensor-1-pp, that was trained with --trace"
        )
    # A run overwrites the files of an earlier run in its folder, but not those of ranks that it
    # lacks.
    files.sort(key=lambda file: file.header.wall_ns)
    newest = files[-1].header
    # Files are sorted by time, so the newest file of each rank wins.
    by_rank = {
        file.header.rank: file for file in files if _is_of_run(file.header, newest)
    }
    num_left_out = len(files) - len(by_rank)
    if num_left_out:
        notes.append(
            f"{num_left_out} files are left out: copies, or of an earlier run or attempt"
        )
    num_missing = newest.num_ranks - len(by_rank)
    if num_missing > 0:
        notes.append(f"{num_missing} of {newest.num_ranks} ranks left no trace")
    return [by_rank[rank] for rank in sorted(by_rank)], notes


def _readable_files(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return all traces in a directory, and why others cannot be read.

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
        # Open only regular files: opening a pipe would wait forever.
        if not fnmatch(path.name, pattern) or not path.is_file():
            continue
        try:
            files.append(_open(path))
        except DataError as error:
            notes.append(f"{path.name}: {error}")
    return files, notes


def _is_of_run(header: Header, newest: Header) -> bool:
    """Return whether a file is of the same run as the newest one."""
    # Without torchrun, runs have no id that distinguishes them.
    has_names = header.run and newest.run
    return header.sizes == newest.sizes and (header.run == newest.run or not has_names)


def _open(path: Path) -> TraceFile:
    """Read the first line of a file.

    Raises:
        DataError: It cannot be read, or is not a trace in this version's format.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER_BYTES)
        events = line.decode().removeprefix("[").strip(_SEPARATORS)
        fields = _decode(f"[{events}]")[0]["args"]
        number = fields.pop("format")
        if (
            number != FORMAT
        ):  # before the other fields, which may differ between formats
            raise DataError(
                f"it has format {number}, this version reads {FORMAT}; read it with the version "
                "that recorded it"
            )
        header = Header(**fields)
        check_header(header)
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}") from error
    except DAMAGED as error:
        raise DataError("it is not a trace, or its first line is damaged") from error
    return TraceFile(path, header)
