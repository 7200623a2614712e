"""Finds the traces of a run and its table, and reads the file of a rank, one iteration at a time.

A file may still grow, or end where its rank died: what cannot be read is skipped and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules import commands
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.text_file import read_text
from megatron_ext.tracing.records import FILE_NAME, FORMAT, SCHEDULE_FILE, Header, Span

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

_MAX_HEADER_BYTES = 1 << 20
_MAX_TABLE_BYTES = 64 << 20
_MAX_STAGES = 10_000


@dataclass
class Iteration:
    """One iteration of one rank."""

    number: int
    begin_ns: int
    """On the clock of the rank, shifted by `TraceFile.shift_ns`."""
    duration_ns: int
    spans: list[Span] = field(default_factory=list)
    end: dict[str, int] = field(default_factory=dict)
    """Figures of the whole iteration."""
    text: str = field(default="", compare=False)
    """Events as they are in the file, with a comma between two."""


@dataclass
class TraceFile:
    """The file of one rank."""

    path: Path
    header: Header
    shift_ns: int = 0
    """To be added to its times so that those of all ranks agree."""
    damaged: int = 0
    """Lines that were skipped, counted while iterations are read."""

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield the iterations in the order of the file, and reset the count `damaged`.

        Args:
            only: The number of the iteration to read; others are not decoded.

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
                    if not text or (only is not None and f'"iteration":{only}' not in text):
                        continue
                    found = self._iteration(text)
                    self.damaged += found is None
                    if found is not None and only in (None, found.number):
                        yield found
        except OSError as error:
            raise DataError(f"{self.path.name} cannot be read: {error.strerror}") from error

    def _iteration(self, text: str) -> Iteration | None:
        """Return the iteration of some events; None if no recorder wrote them."""
        try:
            *spans, last = _decode(f"[{text}]")
            end = {key: value for key, value in last["args"].items() if type(value) is int}
            begin_ns, duration_ns = round(1e3 * last["ts"]), round(1e3 * last["dur"])
            shifted_ns = begin_ns + self.shift_ns
            found = Iteration(end["iteration"], shifted_ns, duration_ns, [], end, text)
            for event in spans:
                # Of a large time since the boot of a host, the last nanoseconds are rounded.
                start = max(0, round(1e3 * event["ts"]) - begin_ns)
                length = round(1e3 * event["dur"])
                if length < 0 or not isinstance(event["args"], dict):
                    return None
                found.spans.append(Span(str(event["cat"]), start, start + length, event["args"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return None
        return found


def open_run(directory: Path) -> tuple[list[TraceFile], list[str]]:
    """Return the files of a run by global rank, and what is wrong with it in words.

    Raises:
        DataError: The directory does not exist or contains no trace.
    """
    by_rank: dict[int, TraceFile] = {}
    notes: list[str] = []
    try:
        there = sorted(path for path in directory.iterdir() if FILE_NAME.fullmatch(path.name))
        paths = [path for path in there if path.is_file()]  # opening a pipe would wait for ever
    except OSError as error:
        raise DataError(f"{directory} cannot be listed: {error.strerror}") from error
    for path in paths:
        header = _header(path)
        if not isinstance(header, Header):
            notes.append(f"{path.name}: {header}")
            continue
        other = by_rank.setdefault(header.rank, TraceFile(path, header))
        if other.path != path:
            same = f"names rank {header.rank}, as does {other.path.name}"
            notes.append(f"{path.name} {same}; it is left out")
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
    except (ScheduleError, ValueError, RecursionError, TypeError, IndexError) as error:
        raise DataError(f"{path} is damaged: {error}; delete it, or trace the run again") from error
    return schedule


def _header(path: Path) -> Header | str:
    """Read the first line, or return what is wrong with it."""
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER_BYTES)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    # The list is still open behind the first line.
    match _decode(line.decode("utf-8", "replace").rstrip("], \r\n") + "]"):
        # First the number: a file of another format may lack everything else.
        case [{"name": "run", "args": {"format": int(number)}}, *_] if number != FORMAT:
            versions = f"it has format {number}, this version reads {FORMAT}"
            return f"{versions}; read it with the version that recorded it"
        case [{"name": "run", "args": {
            "format": int(), "rank": int(rank), "data": int(data), "pipeline": int(pipeline),
            "tensor": int(tensor), "sizes": [int(a), int(b), int(c)], **rest
        }}, *_]:  # fmt: skip
            try:
                known: dict[str, Any] = {str(key): value for key, value in rest.items()}
                return Header(rank, data, pipeline, tensor, (a, b, c), **known)
            except TypeError:  # a field that no header has
                pass
        case [{"name": "run"}, *_]:
            pass
        case _:
            return "it is not a trace, or its first line is damaged"
    return "its first line is damaged"


def _decode(text: str) -> Any:
    """Decode a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
