"""Merges the traces of all ranks into one Chrome trace, for ui.perfetto.dev or chrome://tracing.

It has a row for each rank and arrows from sends to receives. Each file is read twice, one iteration
after the other: first for clocks and figures, then for the output. Several processes share the
files and concatenate their outputs at the end, so memory does not grow with the run.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_ext.errors import DataError
from megatron_ext.files import cannot_write, replacing, scratch_folder
from megatron_ext.tools.trace.reader import Iteration, TraceFile, load_schedule, open_run
from megatron_ext.tools.trace.survey import RankSurvey, message_key, survey
from megatron_ext.tracing.records import Header, labels

__all__ = ["Run", "aggregated_name", "read_run", "write_chrome_trace"]

_TIME = re.compile(r'"ts":([0-9.]+)')
_T = TypeVar("_T")


@dataclass(frozen=True)
class Alignment:
    """Offset to add to the times of each clock, in nanoseconds, with its uncertainty."""

    offset_ns: Mapping[str, int]
    error_ns: Mapping[str, int | None]
    """Half of the distance between the two bounds; None: by the time since 1970."""

    def of(self, header: Header) -> int:
        """Return what to add to the times of a rank."""
        return self.offset_ns[clock_of(header)]

    def notes(self) -> list[str]:
        """Describe the alignment of each clock; empty if there is only one."""
        if len(self.offset_ns) == 1:
            return []
        lines = []
        for clock, error in self.error_ns.items():
            how = "by the time of day" if error is None else f"+- {error / 1e3:.0f} us by messages"
            offset_ms = self.offset_ns[clock] / 1e6
            lines.append(f"clock {clock or 'unnamed'}: {offset_ms:+.3f} ms, {how}")
        return lines


def clock_of(header: Header) -> str:
    """Return the clock of a rank; one that names none has its own."""
    return header.clock or f"rank {header.rank}"


def align(surveys: Iterable[RankSurvey]) -> Alignment:
    """Return what to add to each clock so that all agree with that of the lowest rank.

    Ranks of one host share a clock. Messages relate two: if one was sent at `s` on the sender's
    clock and arrived at `r` on the receiver's, the receiver's is ahead by at most `r - s`. The
    smallest such difference in each direction bounds the offset from both sides; the midpoint is
    the estimate, as in NTP. Hosts that exchange no messages are related through others that do, or
    else through the time since 1970 that each rank recorded at its start.
    """
    ranks = {each.header.rank: each for each in surveys}
    clocks = {rank: clock_of(each.header) for rank, each in ranks.items()}
    sent = {
        key: begin
        for rank, each in ranks.items()
        for key, (begin, _) in each.stamps.items()
        if key.source == rank
    }
    # By (sender's clock, receiver's clock): the smallest time between send and receive.
    bounds: dict[tuple[str, str], int] = defaultdict(lambda: 1 << 62)
    for rank, each in ranks.items():
        for key, (_, end) in each.stamps.items():
            if key.target == rank and key in sent and clocks[key.source] != clocks[rank]:
                pair = clocks[key.source], clocks[rank]
                bounds[pair] = min(bounds[pair], end - sent[key])
    headers = {clocks[rank]: ranks[rank].header for rank in sorted(ranks, reverse=True)}
    reference = clocks[min(ranks)]
    offsets, errors = {reference: 0}, {reference: 0 if len(headers) > 1 else None}
    waiting = [reference]
    while waiting:
        known = waiting.pop(0)
        for (ahead, clock), bound in sorted(bounds.items()):
            back = bounds.get((clock, ahead))
            if ahead != known or clock in offsets or back is None:
                continue
            # clock - known is at most `bound`, and at least `-back`.
            offsets[clock] = offsets[known] - (bound - back) // 2
            errors[clock] = (errors[known] or 0) + max(0, bound + back) // 2
            waiting.append(clock)
    here = headers[reference]
    for clock, header in headers.items():
        if clock not in offsets:
            shift = (header.wall_ns - header.clock_ns) - (here.wall_ns - here.clock_ns)
            offsets[clock] = shift if header.wall_ns and here.wall_ns else 0
            errors[clock] = None
    return Alignment(offsets, errors)


@dataclass(frozen=True)
class Run:
    """The traces of a run: their files, the survey of each, and their clocks."""

    directory: Path
    files: Sequence[TraceFile]
    surveys: Sequence[RankSurvey]
    alignment: Alignment
    notes: Sequence[str]
    """Notes about missing or damaged traces."""

    @property
    def begin_ns(self) -> int:
        """When the first iteration began, on the aligned clock."""
        return min(
            (
                step.begin_ns + self.alignment.of(survey.header)
                for survey in self.surveys
                for step in survey.steps[:1]
            ),
            default=0,
        )


def read_run(directory: Path | str) -> Run:
    """Read the traces of a run once.

    Raises:
        DataError: The directory contains no trace.
    """
    directory = Path(directory)
    files, notes = open_run(directory)
    surveys: list[RankSurvey] = []
    readable: list[TraceFile] = []
    try:
        table = load_schedule(directory)
    except DataError:  # whoever needs the table loads it, and says what is wrong
        table = None
    full, slices = (0, (1.0,)) if table is None else (table.num_microbatches, table.slices)
    read = partial(_survey, full, tuple(slices))
    for file, found in zip(files, _for_each(read, files), strict=True):
        if isinstance(found, str):
            notes.append(found)
        else:
            readable.append(file)
            surveys.append(found)
    if not any(survey.iterations for survey in surveys):
        raise DataError(f"{directory}: no iteration was recorded yet; {'; '.join(notes)}")
    for found in surveys:
        if found.damaged:
            notes.append(f"{found.path.name}: {found.damaged} damaged lines were skipped")
    counts = sorted({found.iterations for found in surveys})
    if len(counts) > 1:
        notes.append(f"ranks recorded between {counts[0]} and {counts[-1]} iterations")
    others = Counter(
        step.microbatches for step in surveys[0].steps if not surveys[0].is_full(step.microbatches)
    )
    if others:
        sizes = ", ".join(f"{count} of {size}" for size, count in sorted(others.items()))
        notes.append(
            f"steps of other sizes than the table's {full} micro-batches do not count: {sizes}"
        )
    alignment = align(surveys)
    notes += alignment.notes()
    return Run(directory, readable, surveys, alignment, notes)


def aggregated_name(directory: Path) -> Path:
    """Return the path of a run's Chrome trace, `NAME/NAME-aggregated.json`."""
    return directory / f"{directory.resolve().name}-aggregated.json"


def write_chrome_trace(run: Run, output: Path) -> int:
    """Write the Chrome trace of a run; return its number of bytes.

    Raises:
        DataError: It cannot be written.
    """
    ranks = frozenset(file.header.rank for file in run.files)
    try:
        with (
            replacing(output) as merged,
            scratch_folder(output) as parts,
            merged.open("wb") as file,
        ):
            task = partial(_write_part, parts, run.alignment, run.begin_ns, ranks)
            size = file.write(b"[\n")
            for index, part in enumerate(_for_each(task, run.files)):
                size += file.write(b",\n" if index else b"") + part.stat().st_size
                with part.open("rb") as content:
                    shutil.copyfileobj(content, file, 1 << 20)
                part.unlink()
            return size + file.write(b"\n]\n")
    except OSError as error:
        remedy = "make room, or give another file with -o"
        raise DataError(cannot_write(output, error, remedy)) from error


def _for_each(task: Callable[[TraceFile], _T], files: Sequence[TraceFile]) -> Iterator[_T]:
    """Run a task on every file, with a process for each core; results keep the order of files."""
    size = sum(file.path.stat().st_size for file in files)
    workers = min(len(files), len(os.sched_getaffinity(0)), 16)
    if workers < 2 or size < 16 << 20:
        yield from map(task, files)
        return
    # Records form no cycles, and the cycle collector would take a third of the time.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=gc.disable) as pool:
        yield from pool.map(task, files)


def _survey(full: int, slices: tuple[float, ...], file: TraceFile) -> RankSurvey | str:
    try:
        return survey(file, full, slices)
    except DataError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:  # no rank of ours wrote it like that
        return f"{file.path.name} is damaged and left out: {error}"


def _write_part(
    directory: Path, alignment: Alignment, begin_ns: int, ranks: frozenset[int], file: TraceFile
) -> Path:
    """Write the events of one rank, without the brackets of the list."""
    header = file.header
    shift_ns = alignment.of(header) - begin_ns
    path = directory / str(header.rank)

    def shifted(time: re.Match[str]) -> str:
        return f'"ts":{float(time[1]) + shift_ns / 1e3:.3f}'

    with path.open("w", encoding="utf-8") as out:
        out.write(_encode(labels(header))[1:-1])
        for iteration in file.iterations():
            out.write(",\n")
            out.write(_TIME.sub(shifted, iteration.text))
            arrows = _arrows(header, iteration, iteration.begin_ns + shift_ns, ranks)
            out.writelines(f",{_encode(arrow)}" for arrow in arrows)
    return path


def _arrows(
    header: Header, iteration: Iteration, begin_ns: int, ranks: frozenset[int]
) -> Iterator[dict[str, Any]]:
    """Yield the ends of the arrows from sends to receives that lie in an iteration of a rank."""
    row = {"name": "message", "cat": "message", "pid": header.row[0], "tid": header.row[1]}
    for span in iteration.spans:
        if span.name not in ("send", "receive"):
            continue
        key = message_key(header.rank, iteration.number, span)
        if key is None or not ranks.issuperset((key.source, key.target)):
            continue  # the other end is missing
        part = span.attributes.get("part", 0)
        arrow = {**row, "id": ".".join(map(str, (*key[1:], part, iteration.number)))}
        begin_us, end_us = (begin_ns + span.begin_ns) / 1e3, (begin_ns + span.end_ns) / 1e3
        if span.name == "send":
            yield {**arrow, "ph": "s", "ts": begin_us}
        else:  # the end of an arrow belongs to the span that it lies in
            yield {**arrow, "ph": "f", "bp": "e", "ts": max(begin_us, end_us - 0.001)}


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
