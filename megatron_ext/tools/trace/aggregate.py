"""Merges all traces of a run: finds slow ranks and links, and writes a single Chrome trace.

The Chrome trace, for ui.perfetto.dev or chrome://tracing, has one row per rank and arrows from
sends to receives.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.files import read_text, replacing
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.tools.trace.clocks import use_one_clock
from megatron_ext.tools.trace.reader import DAMAGED, TraceFile, open_run
from megatron_ext.tools.trace.survey import (
    ActionKey,
    Link,
    RankSurvey,
    Step,
    survey,
)
from megatron_ext.tracing.records import SCHEDULE_FILE

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

SLOW_RANK = 1.2
SLOW_LINK = 2.0
"""A rank or a link is slow if its time is at least this multiple of the median."""
_MAX_TABLE_BYTES = 64 << 20
_MAX_STAGES = 10_000
_NameAndSlice = tuple[str, int]
"""An action's name and slice, on any stage."""
_TIME = re.compile(r'"ts":([0-9.]+)')


@dataclass
class Run:
    """The traces of a run, with all times on one clock."""

    directory: Path
    surveys: list[RankSurvey]
    """Sorted by global rank."""
    notes: list[str]
    """Notes about missing or damaged traces and about the clocks."""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The run's table, or None if the run did not write one.

        Raises:
            DataError: The table's file is damaged, or the table's size is impossible.
        """
        path = self.directory / SCHEDULE_FILE
        try:
            schedule = table_files.from_json(read_text(path, _MAX_TABLE_BYTES))
            # Check the sizes first, because a damaged number could keep
            # `evaluate` from finishing.
            has_possible_size = (
                0 < schedule.pp <= _MAX_STAGES and schedule.num_stages <= _MAX_STAGES
            )
            if not has_possible_size:
                raise ScheduleError(f"it has {schedule.num_stages} stages")
            # Raises if the table's order is impossible.
            evaluate(schedule, Costs())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except (ScheduleError, *DAMAGED) as error:
            remedy = "delete it, or trace the run again"
            raise DataError(f"{path} is damaged: {error}; {remedy}") from error
        return schedule

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run's settings, as recorded by the first rank."""
        return self.surveys[0].header.settings

    @cached_property
    def shared_cpus(self) -> dict[str, str]:
        """Host whose ranks share CPUs -> a description, starting with the most ranks per CPU.

        Traces cannot distinguish between waiting for a CPU, computing, and waiting for a message.
        """
        cpus_of_ranks: dict[str, list[set[str]]] = defaultdict(list)
        for rank in self.surveys:
            header = rank.header
            is_on_cpus = header.settings.get("device") == "cpu"
            cpu_list = header.settings.get("cpus")
            if is_on_cpus and cpu_list:
                cpus_of_ranks[header.host].append(set(cpu_list.split(",")))
        ranks_per_cpu: dict[str, float] = {}
        words: dict[str, str] = {}
        for host, cpus in cpus_of_ranks.items():
            # With fewer CPUs than ranks, some ranks have to wait for a CPU.
            cpus_of_host = set[str]().union(*cpus)
            num_cpus = len(cpus_of_host)
            if len(cpus) > num_cpus:
                ranks_per_cpu[host] = len(cpus) / num_cpus
                words[host] = f"{len(cpus)} ranks shared {num_cpus} CPUs"
        worst_first = sorted(words, key=lambda host: -ranks_per_cpu[host])
        return {host: words[host] for host in worst_first}

    @property
    def links(self) -> list[Link]:
        """All links between ranks that exchanged messages, longest waiting time first."""
        links: list[Link] = []
        for rank in self.surveys:
            links += rank.links.values()
        return sorted(links, key=lambda link: -link.waited_ns)

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """Step number -> all ranks' complete steps, using the last attempt at each step."""
        steps: dict[int, list[Step]] = defaultdict(list)
        for rank in self.surveys:
            # All attempts at a step have the same number, so the last
            # one replaces the others.
            last_by_number = {step.number: step for step in rank.complete_steps}
            for number, step in last_by_number.items():
                steps[number].append(step)
        return steps


def read_run(directory: Path | str) -> Run:
    """Read a run's traces and put their times on one clock.

    Raises:
        DataError: The directory contains no trace or no complete iteration.
    """
    directory = Path(directory)
    files, notes = open_run(directory)
    surveys: list[RankSurvey] = []
    # The surveys need the run's table, so create the run before filling the list.
    run = Run(directory, surveys, notes)
    table = None
    # If the table is damaged, the code that needs it will report the error.
    with suppress(DataError):
        table = run.schedule
    full_microbatches = 0
    slices: tuple[float, ...] = (1.0,)
    if table is not None:
        full_microbatches = table.num_microbatches
        slices = table.slices

    for result in _survey_files(files, full_microbatches, slices):
        if isinstance(result, str):
            notes.append(result)
            continue
        surveys.append(result)
        if damaged := result.file.damaged:
            notes.append(
                f"{result.file.path.name}: {len(damaged)} damaged lines were skipped"
            )
    if not any(rank.num_iterations for rank in surveys):
        raise DataError(
            f"{directory}: no iteration was recorded yet; {'; '.join(notes)}"
        )
    notes += _notes_on_iterations(surveys, full_microbatches)
    # Aligning clocks needs all ranks' surveys, because messages relate
    # the clocks to each other.
    notes += use_one_clock(surveys)
    return run


def _notes_on_iterations(
    surveys: Sequence[RankSurvey], full_microbatches: int
) -> list[str]:
    """Return notes about iterations that some ranks are missing or that are ignored."""
    notes: list[str] = []
    counts = sorted({rank.num_iterations for rank in surveys})
    if len(counts) > 1:
        notes.append(f"ranks recorded between {counts[0]} and {counts[-1]} iterations")
    num_steps = max(len(rank.steps) for rank in surveys)
    # A survey keeps a limited number of steps (`survey._MAX_STEPS`).
    if num_steps < counts[-1]:
        notes.append(f"only the first {num_steps} of {counts[-1]} iterations count")
    steps_by_size = Counter(
        step.microbatches for step in surveys[0].steps if not step.is_full
    )
    if steps_by_size:
        counts_of_sizes = []
        for size, count in sorted(steps_by_size.items()):
            counts_of_sizes.append(f"{count} of {size}")
        notes.append(
            f"steps whose size differs from the table's {full_microbatches} micro-batches do not "
            f"count: {', '.join(counts_of_sizes)}"
        )
    failed: set[int] = set()
    for rank in surveys:
        failed |= {step.number for step in rank.steps if step.failed}
    if failed:
        first_failed = sorted(failed)[:8]
        numbers = ", ".join(str(number) for number in first_failed)
        notes.append(f"steps that failed or were discarded do not count: {numbers}")
    return notes


def _survey_files(
    files: Sequence[TraceFile],
    full_microbatches: int,
    slices: Sequence[float],
) -> Iterator[RankSurvey | str]:
    """Survey all files with one process per core and yield the results in order."""
    survey_file = partial(_survey_file, full_microbatches, slices)
    # Below 16 MiB, starting processes takes more time than it saves.
    num_bytes = sum(file.path.stat().st_size for file in files)
    num_cores = len(os.sched_getaffinity(0))
    workers = min(len(files), num_cores, 16)
    if workers < 2 or num_bytes < 16 << 20:
        yield from map(survey_file, files)
        return
    # Fork, because a new interpreter would have to import all modules again. Disable
    # the cycle collector, which would take up a third of the time even though
    # surveys contain no cycles.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=gc.disable) as pool:
        yield from pool.map(survey_file, files)


def _survey_file(
    full_microbatches: int, slices: Sequence[float], file: TraceFile
) -> RankSurvey | str:
    """Return a file's survey, or the reason why it cannot be surveyed."""
    try:
        return survey(file, full_microbatches, slices)
    except DataError as error:
        return str(error)
    except DAMAGED as error:
        # No rank wrote this content.
        return f"{file.path.name} is damaged and left out: {error}"


class Slow(NamedTuple):
    """A rank or link that is slower than most others."""

    name: str
    factor: float
    """The rank's or link's time, divided by the median."""


def slow(run: Run) -> list[Slow]:
    """Return slow ranks and links, slowest first.

    A rank is slow if its actions take longer than the same actions on most other ranks. A link is
    slow if its messages take longer than those on most other links. Links to or from hosts where
    ranks share CPUs are skipped, because messages there wait until the receiving process gets a
    CPU.
    """
    items = _slow_ranks(run) + _slow_links(run)
    return sorted(items, key=lambda item: -item.factor)


def _slow_ranks(run: Run) -> list[Slow]:
    # Action -> rank -> the median on that rank.
    medians: dict[ActionKey, dict[int, float]] = defaultdict(dict)
    for survey_of_rank in run.surveys:
        rank = survey_of_rank.header.rank
        for action, sample in survey_of_rank.actions.items():
            medians[action][rank] = statistics.median(sample)
    means = _means_over_stages(medians)

    factors: dict[int, list[float]] = defaultdict(list)
    for (name, _, slice_index), peers in medians.items():
        # Stages differ, so compare a rank with the other ranks on its stage. If a
        # stage has only two ranks, either one may be slow, so compare with the
        # ranks on all stages and require that the rank is also slower than the
        # other rank on its stage.
        times = peers
        if len(peers) <= 2:
            times = means[name, slice_index]
        median = statistics.median_low(times.values())
        fastest = min(peers.values())
        if not median or not fastest:
            continue
        for rank, time in peers.items():
            factor = times[rank] / median
            if len(peers) == 2:
                factor = min(factor, time / fastest)
            factors[rank].append(factor)

    slow_ranks = []
    for rank, of_actions in sorted(factors.items()):
        factor = statistics.fmean(of_actions)
        if factor >= SLOW_RANK:
            slow_ranks.append(Slow(f"rank {rank}", factor))
    return slow_ranks


def _means_over_stages(
    medians: Mapping[ActionKey, Mapping[int, float]],
) -> dict[_NameAndSlice, dict[int, float]]:
    """Return (name, slice) of an action -> rank -> the mean over the rank's stages."""
    times: dict[_NameAndSlice, dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for (name, _, slice_index), by_rank in medians.items():
        for rank, time in by_rank.items():
            times[name, slice_index][rank].append(time)
    means: dict[_NameAndSlice, dict[int, float]] = {}
    for action, times_by_rank in times.items():
        means[action] = {}
        for rank, times_of_stages in times_by_rank.items():
            means[action][rank] = statistics.fmean(times_of_stages)
    return means


def _slow_links(run: Run) -> list[Slow]:
    # On shared CPUs, a healthy link appeared to be 37x slower than the median.
    sharing_ranks = set()
    for rank in run.surveys:
        if rank.header.host in run.shared_cpus:
            sharing_ranks.add(rank.header.rank)
    delays_ns: dict[str, int] = {}
    for link in run.links:
        is_judged = not sharing_ranks & {link.source, link.target}
        if link.delay_ns is not None and is_judged:
            name = f"link from rank {link.source} to rank {link.target}"
            delays_ns[name] = link.delay_ns
    if not delays_ns:
        return []
    # With two links, the low median is the fast link, so the slow
    # one is compared with it.
    median_ns = statistics.median_low(delays_ns.values())
    slow_links = []
    for name, delay_ns in delays_ns.items():
        # The clock error may exceed the delays, which makes
        # messages appear to take no time.
        if 0 < SLOW_LINK * median_ns <= delay_ns:
            slow_links.append(Slow(name, delay_ns / median_ns))
    return slow_links


def aggregated_name(directory: Path) -> Path:
    """Return the path of a run's Chrome trace, `NAME/NAME-aggregated.json`."""
    return directory / f"{directory.resolve().name}-aggregated.json"


def write_chrome_trace(run: Run, output: Path) -> int:
    """Write a run's Chrome trace on the first rank's clock and return the file size in bytes."""
    num_bytes = 0
    with replacing(output) as scratch, scratch.open("w", encoding="utf-8") as out:
        for rank in run.surveys:
            file = rank.file
            shift_us = file.shift_ns / 1e3
            for number, text in file.lines():
                if number >= file.num_lines:
                    # The file has grown since the survey, so its
                    # last line may be incomplete.
                    break
                if number not in file.damaged:
                    separator = ",\n" if num_bytes else "[\n"
                    num_bytes += out.write(separator + _shifted(text, shift_us))
        return num_bytes + out.write("\n]\n")


def _shifted(text: str, shift_us: float) -> str:
    # Ranks on the first rank's host need no shift.
    if not shift_us:
        return text
    # Replace only the times, and leave everything else as the rank wrote it.
    return _TIME.sub(lambda time: f'"ts":{float(time[1]) + shift_us:.3f}', text)
