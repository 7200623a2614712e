"""Finds the traces of a run and its table, and reads the file of a rank, one iteration at a time.

A file may still grow, or end where its rank died: what cannot be read is skipped and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.files import read_text
from megatron_ext.schedules import commands
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.tracing.records import FILE_NAME, FORMAT, SCHEDULE_FILE, Header

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

_MAX_HEADER_BYTES = 1 << 20
_MAX_TABLE_BYTES = 64 << 20
_MAX_STAGES = 10_000
DAMAGED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors of reading what no rank of ours wrote."""


class Span(NamedTuple):
    """Something that took time within one iteration of one rank; see `tracing.records`."""

    name: str
    begin_ns: int
    """Since the begin of the iteration."""
    end_ns: int
    attributes: Mapping[str, Any]
    message: int = 0
    """Number of the message that was sent or received; 0: of none."""


class Iteration(NamedTuple):
    """One iteration of one rank."""

    number: int
    begin_ns: int
    """On the clock of the rank, shifted by `TraceFile.shift_ns`."""
    duration_ns: int
    spans: list[Span]
    """In the order in which they began."""
    figures: Mapping[str, Any]
    text: str
    """Its events as they are in the file, with a comma between two."""


@dataclass
class TraceFile:
    """The file of one rank."""

    path: Path
    header: Header
    head: str = ""
    """Events of the first line, as they are in the file."""
    shift_ns: int = 0
    """Added to its times, those of all ranks agree."""
    damaged: int = 0
    """Lines that were skipped, counted while iterations are read."""

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield all iterations in the order of the file, or only that of a number.

        Raises:
            DataError: The file can no longer be read.
        """
        self.damaged = 0
        try:
            # A rank that died may have left half of a character.
            with self.path.open(encoding="utf-8", errors="replace") as file:
                file.readline()  # the header, which `open_run` has read
                for line in file:
                    text = line.strip(",] \r\n")
                    # Looked for as text: lines of other iterations need no decoding.
                    if not text or (only is not None and f'"iteration":{only},' not in text):
                        continue
                    try:
                        yield self._iteration(text)
                    except DAMAGED:
                        self.damaged += 1
        except OSError as error:
            raise DataError(f"{self.path.name} cannot be read: {error.strerror}") from error

    def _iteration(self, text: str) -> Iteration:
        *events, last = json.loads(f"[{text}]")
        figures = last["args"]
        begin_ns, spans = round(1e3 * last["ts"]), []
        for event in events:
            # Of a large time since the boot of a host, the last nanoseconds are rounded.
            start = max(0, round(1e3 * event["ts"]) - begin_ns)
            length, about = round(1e3 * event["dur"]), dict(event["args"])
            if length < 0:
                raise ValueError(f"a span of {length} ns")
            spans.append(Span(event["cat"], start, start + length, about, event.get("bind_id", 0)))
        spans.sort(key=lambda span: span.begin_ns)
        duration_ns, begin_ns = round(1e3 * last["dur"]), begin_ns + self.shift_ns
        return Iteration(int(figures["iteration"]), begin_ns, duration_ns, spans, figures, text)


def open_run(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return the files of a run in the order of their global ranks, and what is wrong in words.

    Raises:
        DataError: The directory does not exist or contains no trace.
    """
    by_rank: dict[int, TraceFile] = {}
    notes: list[str] = []
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise DataError(f"{directory} cannot be listed: {error.strerror}") from error
    for path in paths:
        # Of files only: opening a pipe would wait for ever.
        if not (fnmatch(path.name, FILE_NAME.format(*"***")) and path.is_file()):
            continue
        try:
            found = _open(path)
        except DataError as error:
            notes.append(f"{path.name}: {error}")
            continue
        rank = found.header.rank
        if (other := by_rank.setdefault(rank, found)) is not found:
            notes.append(
                f"{path.name} is left out: it names rank {rank}, as {other.path.name} does"
            )
    if not by_rank:
        why = f": {notes[0]}" if notes else ""
        raise DataError(
            f"{directory} holds no trace of a rank{why}; give the folder of a run, such as "
            f"benchmark/data-1-pipeline-4-tensor-1-pp, that was trained with --trace"
        )
    headers = [file.header for file in by_rank.values()]
    # By the largest sizes: files of an older, smaller run may lie in the same folder.
    ranks = math.prod(max(header.sizes for header in headers))
    count = ranks - len({(h.data, h.pipeline, h.tensor) for h in headers})
    if count > 0:
        notes.append(f"{count} of {ranks} ranks left no trace")
    return [by_rank[rank] for rank in sorted(by_rank)], notes


def load_schedule(directory: Path) -> Schedule | None:
    """Return the table of a run, or None if the run wrote none.

    Raises:
        DataError: The file is damaged or of impossible size.
    """
    path = directory / SCHEDULE_FILE
    try:
        schedule = table_files.from_json(read_text(path, _MAX_TABLE_BYTES))
        placement = schedule.placement
        if not (0 < placement.num_ranks <= _MAX_STAGES and placement.num_stages <= _MAX_STAGES):
            raise ScheduleError(f"it has {placement.num_stages} stages")
        commands.evaluate(schedule, Costs())  # a table whose order is impossible fails here
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ScheduleError, *DAMAGED) as error:
        raise DataError(f"{path} is damaged: {error}; delete it, or trace the run again") from error
    return schedule


def _open(path: Path) -> TraceFile:
    """Read the first line of a file."""
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER_BYTES)
        head = line.decode().strip("[], \r\n")
        fields = json.loads(f"[{head}]")[0]["args"]
        number = fields.pop("format")
        if number != FORMAT:  # before the rest, which may have other fields
            raise DataError(
                f"it has format {number}, this version reads {FORMAT}; read it with the version "
                "that recorded it"
            )
        header = Header(**fields)
        places = header.rank, header.data, header.pipeline, header.tensor, *header.sizes
        if len(places) != 7 or not all(isinstance(place, int) for place in places):
            raise ValueError("no places")
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}") from error
    except DAMAGED as error:
        raise DataError("it is not a trace, or its first line is damaged") from error
    return TraceFile(path, header, head)
