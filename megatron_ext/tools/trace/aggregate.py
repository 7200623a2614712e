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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from megatron_ext.errors import DataError
from megatron_ext.files import cannot_write, replacing, scratch_folder
from megatron_ext.tools.trace.clocks import Alignment, align
from megatron_ext.tools.trace.measured_costs import load_schedule
from megatron_ext.tools.trace.reader import Iteration, TraceFile, open_run
from megatron_ext.tools.trace.survey import RankSurvey, message_key, survey
from megatron_ext.tracing.records import Header, labels

__all__ = ["Run", "aggregated_name", "read_run", "write_chrome_trace"]

_TIME = re.compile(r'"ts":([0-9.]+)')
_T = TypeVar("_T")


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
    full = 0 if table is None else table.num_microbatches
    for file, found in zip(files, _for_each(partial(_survey, full), files), strict=True):
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
    try:
        with replacing(output) as merged, scratch_folder(output) as parts:
            ranks = frozenset(file.header.rank for file in run.files)
            task = partial(_write_part, parts, run.alignment, run.begin_ns, ranks)
            with merged.open("wb") as file:
                return _merge(_for_each(task, run.files), file)
    except OSError as error:
        remedy = "make room, or give another file with -o"
        raise DataError(cannot_write(output, error, remedy)) from error


def _merge(parts: Iterator[Path], merged: IO[bytes]) -> int:
    """Write one list of the events of all ranks; return its number of bytes."""
    size = merged.write(b"[\n")
    for index, part in enumerate(parts):
        size += merged.write(b",\n" if index else b"") + part.stat().st_size
        with part.open("rb") as content:
            shutil.copyfileobj(content, merged, 1 << 20)
        part.unlink()
    return size + merged.write(b"\n]\n")


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


def _survey(full: int, file: TraceFile) -> RankSurvey | str:
    try:
        return survey(file, full)
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
