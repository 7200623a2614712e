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
from megatron_ext.tools.trace.reader import Attributes, Iteration, TraceFile
from megatron_ext.tools.trace.run_folder import open_run
from megatron_ext.tools.trace.survey import RankSurvey, message_key, survey
from megatron_ext.tracing.records import ACTION_NAMES, Header, Span

__all__ = ["Run", "aggregated_name", "read_run", "write_chrome_trace"]

_COLOURS = {
    ACTION_NAMES["F"]: "good",
    ACTION_NAMES["B"]: "rail_load",
    ACTION_NAMES["I"]: "rail_response",
    ACTION_NAMES["W"]: "rail_animation",
    "wait": "grey",
    "send": "olive",
    "receive": "yellow",
    "reduce": "thread_state_iowait",
    "optimizer": "thread_state_runnable",
}
"""Reserved colour names of Chrome's viewer."""

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
            notes.append(f"{found.path.name}: {found.damaged} damaged records were skipped")
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
    templates = _Templates(header, ranks)
    with path.open("w", encoding="utf-8") as out:
        out.write(_encode(_names(header))[1:-1])
        for iteration in file.iterations():
            out.write("".join(templates.events(iteration, shift_ns)))
    return path


def _names(header: Header) -> list[dict[str, Any]]:
    pid, tid = header.row
    data, pipeline = f"data {header.data}", f"pipeline {header.pipeline}"
    host = f" on {header.host}" if header.host else ""
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{data} {pipeline}"}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid,
         "args": {"name": f"rank {header.rank}{host}"}},
    ]  # fmt: skip


class _Templates:
    """Writes the events of one rank.

    Two spans of the same action in two iterations differ only in their times, so the other text is
    formatted once.
    """

    def __init__(self, header: Header, ranks: frozenset[int]) -> None:
        self._rank = header.rank
        self._ranks = ranks
        self._row = '"pid":{},"tid":{}'.format(*header.row)
        self._made: dict[tuple[str, str], tuple[str, str]] = {}

    def events(self, iteration: Iteration, shift_ns: int) -> Iterator[str]:
        """Yield the events of an iteration, each with a comma before it."""
        begin_ns = iteration.begin_ns + shift_ns
        yield (
            f',\n{{"name":"iteration {iteration.number}","ph":"X",{self._row},'
            f'"ts":{begin_ns / 1e3:.3f},"dur":{iteration.duration_ns / 1e3:.3f},'
            f'"args":{_encode(iteration.end)}}}'
        )
        made = self._made
        for name, start, end, attributes in iteration.spans:
            assert isinstance(attributes, Attributes)
            template = made.get((name, attributes.text))
            if template is None:
                if name == "wire":
                    continue  # about a pair of ranks, not about a time
                span = Span(name, start, end, attributes)
                template = made[name, attributes.text] = self._bar(span), self._arrow(span)
            bar, arrow = template
            at_us, length_us = (begin_ns + start) / 1e3, (end - start) / 1e3
            yield bar % (at_us, length_us)
            if arrow:
                # The end of an arrow belongs to the span that it lies in.
                until_us = at_us if name == "send" else max(at_us, at_us + length_us - 0.001)
                yield arrow % (iteration.number, until_us)

    def _bar(self, span: Span) -> str:
        """Return the text of a span, with placeholders for its begin and length."""
        colour = _COLOURS.get(span.name)
        painted = f',"cname":"{colour}"' if colour else ""
        assert isinstance(span.attributes, Attributes)
        text = (
            f',\n{{"name":{_encode(_title(span))},"ph":"X",{self._row}{painted},'
            f'"args":{{{span.attributes.text}}}'
        )
        return text.replace("%", "%%") + ',"ts":%.3f,"dur":%.3f}'

    def _arrow(self, span: Span) -> str:
        """Return the text of one end of an arrow, with placeholders for iteration and time.

        Empty if the other end is missing.
        """
        key = message_key(self._rank, 0, span) if span.name in ("send", "receive") else None
        if key is None or not self._ranks.issuperset((key.source, key.target)):
            return ""
        phase = '"ph":"s"' if span.name == "send" else '"ph":"f","bp":"e"'
        part = _encode(str(span.attributes.get("part", 0)))[1:-1].replace("%", "%%")
        about = f"{key.source}.{key.target}.{key.kind}{key.stage}.{key.microbatch}.{part}"
        fixed = f',\n{{"name":"message","cat":"message",{phase},{self._row},"id":"{about}'
        return fixed + '.%d","ts":%.3f}'


def _title(span: Span) -> str:
    """Return the label of a bar: `forward 3`, `wait for rank 2`."""
    name, about = span.name, span.attributes
    if name == "wait":
        return f"wait for rank {about['on']}" if "on" in about else f"wait: {about.get('cause')}"
    if name in _ACTIONS and "microbatch" in about:
        return f"{name} {about['microbatch']}"
    return name


_ACTIONS = frozenset(ACTION_NAMES.values())
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
