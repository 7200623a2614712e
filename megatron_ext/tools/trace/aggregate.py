"""All traces of a run: their clocks, what is slow, and one Chrome trace of them.

The Chrome trace, for ui.perfetto.dev or chrome://tracing, has a row for each rank and arrows from
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
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.files import read_text, replacing
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.tools.trace.reader import DAMAGED, TraceFile, open_run
from megatron_ext.tools.trace.survey import Link, RankSurvey, Step, survey
from megatron_ext.tracing.records import SCHEDULE_FILE

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tracing.records import Header

SLOW_RANK, SLOW_LINK = 1.2, 2.0
"""Times the median from which a rank, or a link, is slow."""
_MAX_TABLE_BYTES = 64 << 20
_MAX_STAGES = 10_000
_TIME = re.compile(r'"ts":([0-9.]+)')


@dataclass
class Run:
    """The traces of a run, on one clock."""

    directory: Path
    surveys: list[RankSurvey]
    """By global rank."""
    notes: list[str]
    """Notes about missing or damaged traces."""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The table of the run, or None if the run wrote none.

        Raises:
            DataError: Its file is damaged or of impossible size.
        """
        path = self.directory / SCHEDULE_FILE
        try:
            schedule = table_files.from_json(read_text(path, _MAX_TABLE_BYTES))
            ranks, stages = schedule.pp, schedule.num_stages
            if not (0 < ranks <= _MAX_STAGES and stages <= _MAX_STAGES):
                raise ScheduleError(f"it has {stages} stages")
            evaluate(schedule, Costs())  # a table whose order is impossible fails here
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
        """Settings of the run, as its first rank has them."""
        return self.surveys[0].header.settings

    @cached_property
    def shared_cpus(self) -> dict[str, str]:
        """By host whose ranks compute on fewer CPUs than they are: that in words, the worst first.

        Such ranks wait for a CPU, which traces cannot tell from computation or from a message.
        """
        cpus_of_ranks: dict[str, list[set[str]]] = defaultdict(list)
        for each in self.surveys:
            header = each.header
            if header.settings.get("device") == "cpu" and header.settings.get("cpus"):
                cpus_of_ranks[header.host].append(set(header.settings["cpus"].split(",")))
        ranks_per_cpu: dict[str, float] = {}
        words: dict[str, str] = {}
        for host, cpus in cpus_of_ranks.items():
            num_cpus = len(set[str]().union(*cpus))
            if len(cpus) > num_cpus:
                ranks_per_cpu[host] = len(cpus) / num_cpus
                words[host] = f"{len(cpus)} ranks shared {num_cpus} CPUs"
        worst_first = sorted(words, key=lambda host: -ranks_per_cpu[host])
        return {host: words[host] for host in worst_first}

    @property
    def links(self) -> list[Link]:
        """Every pair of ranks that exchanged messages, the longest waited for first."""
        found = [link for each in self.surveys for link in each.links.values()]
        return sorted(found, key=lambda link: -link.waited_ns)

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """By number: the complete steps of all ranks, the last of those that ran more than once."""
        found: dict[int, list[Step]] = defaultdict(list)
        for each in self.surveys:
            for number, step in {step.number: step for step in each.complete_steps}.items():
                found[number].append(step)
        return found


def read_run(directory: Path | str) -> Run:
    """Read the traces of a run once.

    Raises:
        DataError: The directory contains no trace.
    """
    directory = Path(directory)
    files, notes = open_run(directory)
    surveys: list[RankSurvey] = []
    run, table = Run(directory, surveys, notes), None
    with suppress(DataError):  # whoever needs the table says what is wrong with it
        table = run.schedule
    full, slices = (0, (1.0,)) if table is None else (table.num_microbatches, table.slices)
    for found in _surveys(files, full, slices):
        if isinstance(found, str):
            notes.append(found)
            continue
        surveys.append(found)
        if damaged := found.file.damaged:
            notes.append(f"{found.file.path.name}: {len(damaged)} damaged lines were skipped")
    counts = sorted({found.iterations for found in surveys})
    if not any(counts):
        raise DataError(f"{directory}: no iteration was recorded yet; {'; '.join(notes)}")
    if len(counts) > 1:
        notes.append(f"ranks recorded between {counts[0]} and {counts[-1]} iterations")
    if (kept := max(len(found.steps) for found in surveys)) < counts[-1]:
        notes.append(f"of {counts[-1]} iterations the first {kept} count")
    if others := Counter(step.microbatches for step in surveys[0].steps if not step.is_full):
        sizes = ", ".join(f"{count} of {size}" for size, count in sorted(others.items()))
        notes.append(
            f"steps of other sizes than the table's {full} micro-batches do not count: {sizes}"
        )
    if failed := {step.number for each in surveys for step in each.steps if step.failed}:
        numbers = ", ".join(map(str, sorted(failed)[:8]))
        notes.append(f"steps that failed or were discarded do not count: {numbers}")
    notes += _use_one_clock(surveys)
    return run


def _use_one_clock(surveys: Sequence[RankSurvey]) -> list[str]:
    """Shift the times of all ranks to one clock; return notes about that.

    What takes two clocks to know follows: how long messages were under way, and from when to when
    the pipeline of a step ran. Only its own messages tell how its clocks differ, so that other
    replicas do not count.
    """
    # By link: the time of each message from the begin of its send to the end of its receive, as the
    # two clocks have it, and whether its receiver waited for it.
    under_way: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
    # By sender, too: a file that names another rank than its peers do proves nothing about a clock.
    sent = {
        (each.header.rank, number): begin_ns
        for each in surveys
        for number, begin_ns in each.sends.items()
    }
    for each in surveys:
        for number, (source, end_ns, was_late) in each.receives.items():
            begin_ns = sent.get((source, number))
            if begin_ns is not None:
                under_way[source, each.header.rank].append((end_ns - begin_ns, was_late))
    headers = {each.header.rank: each.header for each in surveys}
    fastest = {link: min(took)[0] for link, took in under_way.items()}
    shifts = align(headers, fastest)
    notes = []
    for clock, (shift, error) in shifts.items() if len(shifts) > 1 else ():
        how = "by the time of day" if error is None else f"+- {error / 1e3:.0f} us by messages"
        notes.append(f"clock {clock}: {shift / 1e6:+.3f} ms, {how}")
    # By replica and number of a step: when the actions of its ranks began, and ended.
    begins: dict[tuple[int, int], list[float]] = defaultdict(list)
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in surveys:
        shift_ns = each.file.shift_ns = shifts[each.header.clock][0]
        each.steps = [step._replace(begin_ns=step.begin_ns + shift_ns) for step in each.steps]
        for step in (step for step in each.steps if step.actions and not step.failed):
            begins[each.header.data, step.number].append(step.begin_ns + step.first_ns)
            ends[each.header.data, step.number].append(step.begin_ns + step.pipeline_ns)
    for each in surveys:
        for index, step in enumerate(each.steps):
            key = each.header.data, step.number
            if key in ends and not step.failed:
                each.steps[index] = step.within(min(begins[key]), max(ends[key]))
        for source, link in each.links.items():
            late = [took for took, was_late in under_way[source, each.header.rank] if was_late]
            if late:
                shift = each.file.shift_ns - shifts[headers[source].clock][0]
                # Clocks agree to within an error: a fast message may seem to arrive early.
                link.delay_ns = max(0, statistics.median_low(late) + shift)
    return notes


def align(
    headers: Mapping[int, Header], fastest: Mapping[tuple[int, int], int]
) -> dict[str, tuple[int, int | None]]:
    """Find the shift of each clock's times so that all agree with the clock of the lowest rank.

    Messages relate two clocks, as in NTP; hosts that exchange none are related through others that
    do. The time since 1970 that each rank recorded at its start places what is left: the clock of
    the lowest rank there, and by messages those that it is related to.

    Args:
        headers: By rank.
        fastest: By sending and receiving rank: the nanoseconds of the fastest message between the
            two, from its begin on the one clock to its end on the other.

    Returns:
        By clock: its shift and its uncertainty in nanoseconds, half of the distance between the two
        bounds; None: of its own or a related clock's time since 1970, which may be wrong.
    """
    # What was sent at s on one clock and arrived at r on the other proves the other ahead by r - s
    # at most; the smallest difference in each direction bounds the offset from both sides.
    bounds: dict[tuple[str, str], int] = {}
    for (source, target), took in fastest.items():
        pair = headers[source].clock, headers[target].clock
        bounds[pair] = min(bounds.get(pair, took), took)
    here = headers[min(headers)]
    shifts: dict[str, tuple[int, int | None]] = {}
    for _, header in sorted(headers.items()):
        if header.clock in shifts:
            continue
        by_day = (header.wall_ns - header.clock_ns) - (here.wall_ns - here.clock_ns)
        shifts[header.clock] = by_day, 0 if header is here else None
        # Breadth first, so that each clock is as few steps from this one as can be.
        waiting = [header.clock]
        for known in waiting:
            shift, error = shifts[known]
            for (ahead, clock), bound in sorted(bounds.items()):
                back = bounds.get((clock, ahead))
                if ahead == known and clock not in shifts and back is not None:
                    # clock - known is at most `bound`, and at least `-back`; if the first is
                    # smaller, one of the clocks has drifted by the difference.
                    more = abs(bound + back) // 2
                    whole = None if error is None else error + more
                    shifts[clock] = shift - (bound - back) // 2, whole
                    waiting.append(clock)
    return shifts


def _surveys(
    files: Sequence[TraceFile], full: int, slices: Sequence[float]
) -> Iterator[RankSurvey | str]:
    """Survey every file, in their order, with a process for each core."""
    task = partial(_survey, full, slices)
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


def _survey(full: int, slices: Sequence[float], file: TraceFile) -> RankSurvey | str:
    try:
        return survey(file, full, slices)
    except DataError as error:
        return str(error)
    except DAMAGED as error:  # no rank of ours wrote it like that
        return f"{file.path.name} is damaged and left out: {error}"


def slow(run: Run) -> list[tuple[str, float]]:
    """Return slow ranks and links in words, with their factor over the median, worst first.

    A rank is slow if its actions take longer than the same actions on most others, a link if its
    messages take longer than those of most links. Links of hosts whose ranks share CPUs are not
    judged: their messages wait until the receiving process gets a CPU.
    """
    by_stage: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    by_name: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in run.surveys:
        for (name, stage, part), sample in each.actions.items():
            by_stage[name, stage, part][each.header.rank] = statistics.median(sample)
            by_name[name, part][each.header.rank].append(statistics.median(sample))
    factors: dict[int, list[float]] = defaultdict(list)
    for (name, _, part), peers in by_stage.items():
        means = {rank: statistics.fmean(found) for rank, found in by_name[name, part].items()}
        # Stages differ, so a rank is compared with those of its own. Two do not tell which is the
        # slow one, which is slower than the ranks of other stages, too.
        times = means if len(peers) < 3 else peers
        middle, least = statistics.median_low(times.values()), min(peers.values())
        for rank in peers if middle and least else ():
            factor = times[rank] / middle
            factors[rank].append(min(factor, peers[rank] / least) if len(peers) == 2 else factor)
    found = [(f"rank {rank}", statistics.fmean(values)) for rank, values in sorted(factors.items())]
    found = [(what, factor) for what, factor in found if factor >= SLOW_RANK]
    crowded = {each.header.rank for each in run.surveys if each.header.host in run.shared_cpus}
    delays = [
        (f"link from rank {link.source} to rank {link.target}", link.delay_ns)
        for link in run.links
        if link.delay_ns is not None and not crowded & {link.source, link.target}
    ]
    middle = statistics.median_low([delay for _, delay in delays]) if delays else 0
    found += [(what, delay / middle) for what, delay in delays if 0 < SLOW_LINK * middle <= delay]
    return sorted(found, key=lambda item: -item[1])


def aggregated_name(directory: Path) -> Path:
    """Return the path of a run's Chrome trace, `NAME/NAME-aggregated.json`."""
    return directory / f"{directory.resolve().name}-aggregated.json"


def write_chrome_trace(run: Run, output: Path) -> int:
    """Write the Chrome trace of a run, on the clock of its first rank; return its bytes."""
    size = 0
    with replacing(output) as merged, merged.open("w", encoding="utf-8") as out:
        for file in (survey.file for survey in run.surveys):
            for number, text in file.lines():
                if number >= file.num_lines:
                    break  # it has grown, and its last line may be half of one
                if number not in file.damaged:
                    before = ",\n" if size else "[\n"
                    size += out.write(before + _shifted(text, file.shift_ns / 1e3))
        return size + out.write("\n]\n")


def _shifted(text: str, shift_us: float) -> str:
    if not shift_us:  # as on all ranks of one host
        return text
    # Replaced in the text, so that everything else stays as it was written.
    return _TIME.sub(lambda time: f'"ts":{float(time[1]) + shift_us:.3f}', text)
