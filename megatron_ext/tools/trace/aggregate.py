"""All traces of a run: their clocks, what is slow, and one Chrome trace of them.

The Chrome trace, for ui.perfetto.dev or chrome://tracing, has a row for each rank and arrows from
sends to receives.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_ext.errors import DataError
from megatron_ext.files import cannot_write, replacing, scratch_folder
from megatron_ext.tools.trace.reader import TraceFile, load_schedule, open_run
from megatron_ext.tools.trace.survey import Link, RankSurvey, message_key, survey
from megatron_ext.tracing.records import labels

SLOW_RANK, SLOW_LINK = 1.2, 2.0
"""Times the median from which a rank, or a link, is slow."""
_TIME = re.compile(r'"ts":([0-9.]+)')
_T = TypeVar("_T")


def align(surveys: Iterable[RankSurvey]) -> dict[str, int | None]:
    """Set the shift of each rank's times so that all agree with the clock of the lowest rank.

    Messages relate two clocks, as in NTP; hosts that exchange none are related through others that
    do, or else through the time since 1970 that each rank recorded at its start.

    Returns:
        The uncertainty of each clock in nanoseconds, half of the distance between the two bounds;
        None: by the time since 1970.
    """
    ranks = {each.header.rank: each for each in surveys}
    clocks = {rank: each.header.clock for rank, each in ranks.items()}
    sent = {key: begin for each in ranks.values() for key, begin in each.sends.items()}
    # By (sender's clock, receiver's clock): the smallest time between send and receive. What was
    # sent at s on one clock and arrived at r on the other proves the other ahead by r - s at most;
    # the smallest difference in each direction bounds the offset from both sides.
    bounds: dict[tuple[str, str], int] = {}
    for rank, each in ranks.items():
        for key, (end, _) in each.receives.items():
            if key in sent and clocks[key.source] != clocks[rank]:
                pair, took = (clocks[key.source], clocks[rank]), end - sent[key]
                bounds[pair] = min(bounds.get(pair, took), took)
    headers = {clocks[rank]: ranks[rank].header for rank in sorted(ranks, reverse=True)}
    # Breadth first from the reference, so that each clock is as few steps from it as can be.
    reference = clocks[min(ranks)]
    shifts, errors = {reference: 0}, dict[str, int | None]({reference: 0})
    waiting = [reference]
    while waiting:
        known = waiting.pop(0)
        for (ahead, clock), bound in sorted(bounds.items()):
            back = bounds.get((clock, ahead))
            if ahead != known or clock in shifts or back is None:
                continue
            # clock - known is at most `bound`, and at least `-back`.
            shifts[clock] = shifts[known] - (bound - back) // 2
            errors[clock] = (errors[known] or 0) + max(0, bound + back) // 2
            waiting.append(clock)
    here = headers[reference]
    for clock, header in headers.items():
        if clock not in shifts:
            shifts[clock] = (header.wall_ns - header.clock_ns) - (here.wall_ns - here.clock_ns)
            errors[clock] = None
    for each in ranks.values():
        each.file.shift_ns = shifts[each.header.clock]
    return errors


@dataclass(frozen=True)
class Run:
    """The traces of a run, on one clock."""

    directory: Path
    surveys: Sequence[RankSurvey]
    notes: Sequence[str]
    """Notes about missing or damaged traces."""

    @property
    def links(self) -> list[Link]:
        """Every pair of ranks that exchanged messages, the longest waited for first."""
        found = [link for each in self.surveys for link in each.links.values()]
        return sorted(found, key=lambda link: -link.waited_ns)


def read_run(directory: Path | str) -> Run:
    """Read the traces of a run once.

    Raises:
        DataError: The directory contains no trace.
    """
    directory = Path(directory)
    files, notes = open_run(directory)
    surveys: list[RankSurvey] = []
    try:
        table = load_schedule(directory)
    except DataError:  # whoever needs the table loads it, and says what is wrong
        table = None
    full, slices = (0, (1.0,)) if table is None else (table.num_microbatches, table.slices)
    read = partial(_survey, full, tuple(slices))
    for found in _for_each(read, files):
        if isinstance(found, str):
            notes.append(found)
            continue
        surveys.append(found)
        if damaged := found.file.damaged:
            notes.append(f"{found.file.path.name}: {damaged} damaged lines were skipped")
    counts = sorted({found.iterations for found in surveys})
    if not any(counts):
        raise DataError(f"{directory}: no iteration was recorded yet; {'; '.join(notes)}")
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
    errors = align(surveys)
    shifts = {each.header.clock: each.file.shift_ns for each in surveys}
    for clock, error in errors.items() if len(errors) > 1 else ():
        how = "by the time of day" if error is None else f"+- {error / 1e3:.0f} us by messages"
        notes.append(f"clock {clock}: {shifts[clock] / 1e6:+.3f} ms, {how}")
    sent = {key: at + s.file.shift_ns for s in surveys for key, at in s.sends.items()}
    for each in surveys:
        delays: dict[int, list[int]] = defaultdict(list)
        for key, (end, has_waited) in each.receives.items():
            if has_waited and key in sent:
                delays[key.source].append(end + each.file.shift_ns - sent[key])
        for source, times in delays.items():
            if source in each.links:
                # Clocks agree to within an error: a fast message may seem to arrive early.
                each.links[source].delay_ns = max(0, statistics.median_low(times))
    return Run(directory, surveys, notes)


def _for_each(task: Callable[[TraceFile], _T], files: Sequence[TraceFile]) -> Iterator[_T]:
    """Run a task on every file, with a process for each core; results keep the order of files."""
    # Below 16 MiB the start of a process costs more than it saves.
    size = sum(file.path.stat().st_size for file in files)
    workers = min(len(files), len(os.sched_getaffinity(0)), 16)
    if workers < 2 or size < 16 << 20:
        yield from map(task, files)
        return
    # Records form no cycles, and the cycle collector would take a third of the time.
    context = multiprocessing.get_context("fork")  # a fresh interpreter would import all of this
    with ProcessPoolExecutor(workers, context, initializer=gc.disable) as pool:
        yield from pool.map(task, files)


def _survey(full: int, slices: tuple[float, ...], file: TraceFile) -> RankSurvey | str:
    try:
        return survey(file, full, slices)
    except DataError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:  # no rank of ours wrote it like that
        return f"{file.path.name} is damaged and left out: {error}"


def slow(run: Run) -> list[tuple[str, float]]:
    """Return slow ranks and links in words, with their factor over the median, worst first.

    A rank is slow if its actions take longer than the same actions on most others, a link if its
    messages take longer than those of most links.
    """
    by_stage: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    by_name: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in run.surveys:
        for (name, stage), sample in each.actions.items():
            by_stage[name, stage][each.header.rank] = statistics.median(sample)
            by_name[name][each.header.rank].append(statistics.median(sample))
    factors: dict[int, list[float]] = defaultdict(list)
    for (name, _), peers in by_stage.items():
        means = {rank: statistics.fmean(found) for rank, found in by_name[name].items()}
        # Stages differ, so a rank is compared with those of its own; but two of a stage do not tell
        # which is the slow one.
        times = means if len(peers) < 3 else peers
        middle = statistics.median_low(times.values())
        for rank in peers if middle else ():
            factors[rank].append(times[rank] / middle)
    found = [(f"rank {rank}", statistics.fmean(values)) for rank, values in sorted(factors.items())]
    found = [(what, factor) for what, factor in found if factor >= SLOW_RANK]
    delays = [
        (f"link from rank {link.source} to rank {link.target}", link.delay_ns)
        for link in run.links
        if link.delay_ns is not None
    ]
    middle = statistics.median_low([delay for _, delay in delays]) if delays else 0
    found += [(what, delay / middle) for what, delay in delays if 0 < SLOW_LINK * middle <= delay]
    return sorted(found, key=lambda item: -item[1])


def aggregated_name(directory: Path) -> Path:
    """Return the path of a run's Chrome trace, `NAME/NAME-aggregated.json`."""
    return directory / f"{directory.resolve().name}-aggregated.json"


def write_chrome_trace(run: Run, output: Path) -> int:
    """Write the Chrome trace of a run, which begins with its first iteration; return its bytes.

    Raises:
        DataError: It cannot be written.
    """
    ranks = frozenset(each.header.rank for each in run.surveys)
    begins = [s.steps[0].begin_ns + s.file.shift_ns for s in run.surveys if s.steps]
    try:
        with (
            replacing(output) as merged,
            scratch_folder(output) as parts,
            merged.open("wb") as file,
        ):
            task = partial(_write_part, parts, min(begins, default=0), ranks)
            size = file.write(b"[\n")
            # Files are read again, an iteration at a time: memory does not grow with the run.
            for index, part in enumerate(_for_each(task, [each.file for each in run.surveys])):
                size += file.write(b",\n" if index else b"") + part.stat().st_size
                with part.open("rb") as content:
                    shutil.copyfileobj(content, file, 1 << 20)
                part.unlink()  # the parts and the whole would need twice the room
            return size + file.write(b"\n]\n")
    except OSError as error:
        remedy = "make room, or give another file with -o"
        raise DataError(cannot_write(output, error, remedy)) from error


def _write_part(directory: Path, begin_ns: int, ranks: frozenset[int], file: TraceFile) -> Path:
    """Write the events of one rank, without the brackets of the list."""
    header, path = file.header, directory / str(file.header.rank)
    row = {"name": "message", "cat": "message", "pid": header.row[0], "tid": header.row[1]}

    def shifted(time: re.Match[str]) -> str:
        return f'"ts":{float(time[1]) + (file.shift_ns - begin_ns) / 1e3:.3f}'

    with path.open("w", encoding="utf-8") as out:
        out.write(_encode(labels(header))[1:-1])  # the list's brackets are those of the whole file
        for iteration in file.iterations():
            # Replaced in the text, so that everything else stays as it was written.
            out.write(f",\n{_TIME.sub(shifted, iteration.text)}")
            for span in iteration.spans:
                key = message_key(header.rank, iteration.number, span)
                if span.name == "wait" or key is None or not ranks.issuperset(key[1:3]):
                    continue  # no message, or the other end is missing
                # A tree of tensors sends a header besides: the same message in another part.
                part = span.attributes.get("part", 0)
                arrow = {**row, "id": ".".join(map(str, (*key[1:], part, iteration.number)))}
                begin_us, end_us = (
                    (iteration.begin_ns - begin_ns + time_ns) / 1e3 for time_ns in span[1:3]
                )
                if span.name == "send":
                    arrow |= {"ph": "s", "ts": begin_us}
                else:  # the end of an arrow belongs to the span that it lies in
                    arrow |= {"ph": "f", "bp": "e", "ts": max(begin_us, end_us - 0.001)}
                out.write(f",{_encode(arrow)}")
    return path


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
