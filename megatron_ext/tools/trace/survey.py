"""The survey of one rank's trace: times by cause, costs, links and message stamps, in one pass.

The page, the forecast and the lines of text are made of surveys.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.table.actions import Action, Kind
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.tracing.records import ACTION_NAMES, Header

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration, TraceFile

# Bounds on a survey: those of all ranks are in memory together, and travel between processes.
_MAX_STEPS = 20_000
_MAX_ITERATIONS = 16
_MAX_SPANS = 40_000
_GOLDEN = (5**0.5 - 1) / 2
_MAX_LINES = 16
"""Ranks that have a line of text of their own."""

_KINDS: dict[str, Kind] = {name: kind for kind, name in ACTION_NAMES.items()}
_IDLE = ("wait", "send", "weights")
"""Spans in which a rank computes nothing."""


class Step(NamedTuple):
    """One iteration of one rank, or the summary of several; times in nanoseconds."""

    number: int = 0
    begin_ns: int = 0
    """On the clock of the rank; in a `Run` on that of all ranks."""
    duration_ns: float = 0
    first_ns: float = 0
    """From the begin of the step to that of its first action; in a `Run`, to that of its pipeline,
    which another rank may have begun before."""
    pipeline_ns: float = 0
    """From the begin of the step to the end of its last action; in a `Run`, to that of its
    pipeline."""
    busy_ns: float = 0
    """Of that, in actions."""
    idle_ns: Mapping[str, float] = MappingProxyType({})
    """The rest of `pipeline_ns` by cause: `input of rank 3`, `slot`, `leader`, `send`, `other`, and
    `end of the pipeline`, when only other ranks have actions left."""
    after_ns: float = 0
    """What follows of the step: reduction, optimizer and so on."""
    optimizer_ns: float = 0
    memory_bytes: int = 0
    peak_live: float = 0
    """Most activations of one stage that it kept at once; a weight stash may count more than 1."""
    actions: int = 0
    out_of_order: int = 0
    """Actions that ran although an earlier one of the table had not run."""
    activation_bytes: int = 0
    """Bytes that a forward of one stage keeps; 0: not known."""
    microbatches: int = 0
    """Of one pipeline."""
    is_full: bool = True
    """Whether it has those of the table; others, of a batch that still grows, take another time."""
    failed: bool = False
    """True if the step ended with an error, perhaps after a time-out."""

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline's time that is in no action."""
        idle_ns = sum(self.idle_ns.values())
        return idle_ns / (self.busy_ns + idle_ns) if idle_ns else 0.0

    def within(self, begin_ns: float, end_ns: float) -> Step:
        """Return the step with a pipeline that begins and ends at these times."""
        rest_ns = min(self.after_ns, max(0, end_ns - self.begin_ns - self.pipeline_ns))
        return self._replace(
            first_ns=begin_ns - self.begin_ns,
            pipeline_ns=self.pipeline_ns + rest_ns,
            idle_ns={**self.idle_ns, "end of the pipeline": rest_ns} if rest_ns else self.idle_ns,
            after_ns=self.after_ns - rest_ns,
        )


@dataclass
class Link:
    """Messages that a rank received from another one."""

    source: int
    target: int
    messages: int = 0
    bytes: int = 0
    waited_ns: int = 0
    steps: int = 0
    """Iterations that these are of."""
    wire: str = ""
    """What carries the messages."""
    delay_ns: int | None = None
    """Median from the begin of a send to the end of its receive, of messages that were waited for;
    None: both ends of no such message are known. It takes the surveys of both ranks."""


@dataclass
class RankSurvey:
    """The survey of one rank, on its clock."""

    file: TraceFile
    steps: list[Step] = field(default_factory=list)
    iterations: int = 0
    spans: int = 0
    wires: dict[int, str] = field(default_factory=dict)
    """By the global rank of each peer: what carries messages between the two."""
    counted: int = 0
    """Iterations that the fields below are about: some, evenly spread."""
    actions: dict[tuple[str, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Nanoseconds by name, stage and slice: from the begin of an action to the begin of what
    follows it, without waiting, so that what the runtime does around an action belongs to it."""
    took: dict[tuple[int, int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    """Nanoseconds of all actions by stage, iteration, micro-batch and slice."""
    exchanges: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By stage: what a forward exchanges between experts, alone as in pairs."""
    lengths: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """By iteration and micro-batch: its tokens, and the pairs of tokens of one sample."""
    links: dict[int, Link] = field(default_factory=dict)
    """By the global rank that sent."""
    sends: dict[int, int] = field(default_factory=dict)
    """When the `send` of a message began; by number of the message."""
    receives: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    """By number: the rank that sent the message, when its `receive` ended, and whether it is a
    tensor of the pipeline for which the rank had waited."""

    @property
    def header(self) -> Header:
        """The identity of the rank."""
        return self.file.header

    @property
    def stash_ratio(self) -> float:
        """Memory of a micro-batch between I and W over that before I."""
        return float(self.header.settings.get("stash_ratio", 1.0))

    @property
    def complete_steps(self) -> list[Step]:
        """The steps of the table's size except the first of all, which warms up.

        If there are none: that one, or all of another size, and those that failed.
        """
        full = [step for step in self.steps if step.is_full and not step.failed]
        return [step for step in full if step is not self.steps[0]] or full or self.steps


def survey(file: TraceFile, full: int = 0, slices: Sequence[float] = (1.0,)) -> RankSurvey:
    """Read the trace of a rank once.

    Args:
        file: The trace.
        full: Micro-batches of the table of the run; 0: not known.
        slices: Share of a micro-batch that each of its slices is.

    Raises:
        DataError: See `reader.TraceFile.lines`.
    """
    found = RankSurvey(file)
    # Every iteration has its figures; single durations and messages are those of some, because
    # weeks of iterations must not grow what is kept: of those whose multiples of the golden ratio
    # have the smallest fractions, which are spread evenly, and the same on all ranks. The first
    # one and those of other sizes are no measure, and make room for all others.
    kept: dict[tuple[bool, float], Iteration] = {}
    for iteration in file.iterations():
        found.iterations += 1
        found.spans += len(iteration.spans)
        found.wires |= {
            int(peer): wire for peer, wire in iteration.figures.get("wires", {}).items()
        }
        step = _step(iteration, found.stash_ratio, full, slices)
        if len(found.steps) < _MAX_STEPS:
            found.steps.append(step)
        is_measure = step.is_full and not step.failed and found.iterations > 1
        kept[not is_measure, iteration.number * _GOLDEN % 1] = iteration
        while len(kept) > 1 and (
            len(kept) > _MAX_ITERATIONS or sum(len(one.spans) for one in kept.values()) > _MAX_SPANS
        ):
            del kept[max(kept)]
    measures = [iteration for (is_other, _), iteration in kept.items() if not is_other]
    for iteration in measures or kept.values():
        _count(found, iteration)
    if not measures:  # messages align clocks in any case
        found.actions.clear()
    for source, link in found.links.items():
        link.steps = found.counted
        # Messages of Megatron's own transport have no wire that we know.
        link.wire = found.wires.get(source, found.header.settings.get("transport", ""))
    return found


def _step(iteration: Iteration, stash_ratio: float, full: int, slices: Sequence[float]) -> Step:
    work = [span for span in iteration.spans if span.name in _KINDS]
    end = max((span.end_ns for span in work), default=0)
    busy = covered = 0
    row: list[Action] = []
    for name, started, ended, about, _ in work:
        busy += max(0, ended - max(started, covered))  # those of a pair overlap
        covered = max(covered, ended)
        part = about.get("slice", 0) if full else 0  # of unknown size without the table
        row.append(Action(about["stage"], _KINDS[name], about["microbatch"], part))
    idle: dict[str, int] = defaultdict(int)
    optimizer = 0
    for name, started, ended, about, _ in iteration.spans:
        if name in _IDLE and started < end:
            cause = str(about.get("cause", name))
            idle[f"{cause} of rank {about['on']}" if "on" in about else cause] += ended - started
        elif name == "optimizer":
            optimizer += ended - started
    other = end - busy - sum(idle.values())
    if other > 0:  # data, Python, and whatever else no span is about
        idle["other"] = other
    noted = ("memory_bytes", "out_of_order", "activation_bytes", "microbatches", "failed")
    return Step(
        iteration.number,
        iteration.begin_ns,
        iteration.duration_ns,
        first_ns=work[0].begin_ns if work else 0,
        pipeline_ns=end,
        busy_ns=busy,
        idle_ns=dict(idle),
        after_ns=iteration.duration_ns - end,
        optimizer_ns=optimizer,
        peak_live=most_alive(tuple(row), stash_ratio, slices),
        actions=len(work),
        is_full=full in (0, iteration.figures.get("microbatches")),
        **{name: iteration.figures.get(name, 0) for name in noted},
    )


def _count(found: RankSurvey, iteration: Iteration) -> None:
    """Add what an iteration's actions took, and what it sent and received."""
    found.counted += 1
    for microbatch, (tokens, pairs) in iteration.figures.get("lengths", {}).items():
        found.lengths[iteration.number, int(microbatch)] = tokens, pairs
    action: tuple[str, int, int] | None = None
    begun = ended = 0
    exchanged: dict[tuple[int, int], int] = defaultdict(int)
    waited: set[tuple[object, ...]] = set()
    for name, begin, end, about, number in iteration.spans:
        if name == "exchange":
            if about["of"] == "F":
                exchanged[about["stage"], about["microbatch"]] += end - begin
            continue
        if name in _KINDS:
            place = about["stage"], iteration.number, about["microbatch"], about.get("slice", 0)
            found.took[place] += end - begin
            # The two of a pair begin together, and neither has a price of its own.
            if 2 * begin < begun + ended:
                action, ended = None, max(ended, end)
                continue
        if action is not None and (name in _KINDS or name in ("wait", "receive")):
            # What is done until the rank waits or computes again is the price of the action.
            found.actions[action].append(max(begin, ended) - begun)
            action = None
        if name in _KINDS:
            action, begun, ended = (name, about["stage"], about.get("slice", 0)), begin, end
        elif name == "send":
            found.sends[number] = iteration.begin_ns + begin
        elif name == "receive" or (name == "wait" and "on" in about):
            other = about["on" if name == "wait" else "from"]
            link = found.links.setdefault(other, Link(other, found.header.rank))
            message = other, *map(about.get, ("for", "stage", "microbatch", "slice"))
            if name == "wait":
                link.waited_ns += end - begin
                waited.add(message)
                continue
            link.messages += 1
            link.bytes += about["bytes"]
            was_late = message in waited and about["for"] in ("F", "B")
            found.receives[number] = other, iteration.begin_ns + end, was_late
    if action is not None:
        found.actions[action].append(ended - begun)
    for (stage, _), exchanged_ns in exchanged.items():
        found.exchanges[stage].append(exchanged_ns)


def figures(surveys: Iterable[RankSurvey]) -> Step:
    """Summarise the complete steps of some ranks.

    Durations are medians, what a step consists of are means, the longest wait first; memory and
    activations are those of the worst step, and numbers of actions sums.
    """
    steps = [step for survey in surveys for step in survey.complete_steps] or [Step()]
    idle: dict[str, float] = defaultdict(float)
    for step in steps:
        for cause, time_ns in step.idle_ns.items():
            idle[cause] += time_ns / len(steps)
    return Step(
        duration_ns=statistics.median(step.duration_ns for step in steps),
        pipeline_ns=statistics.median(step.pipeline_ns for step in steps),
        busy_ns=statistics.fmean(step.busy_ns for step in steps),
        idle_ns=dict(sorted(idle.items(), key=lambda item: -item[1])),
        after_ns=statistics.fmean(step.after_ns for step in steps),
        memory_bytes=max(step.memory_bytes for step in steps),
        peak_live=max(step.peak_live for step in steps),
        actions=sum(step.actions for step in steps),
        out_of_order=sum(step.out_of_order for step in steps),
        activation_bytes=max(step.activation_bytes for step in steps),
    )


def text(surveys: Sequence[RankSurvey]) -> str:
    """Return the figures of a run: all ranks together, then what each waits for."""
    total = figures(surveys)
    spans, iterations = sum(s.spans for s in surveys), max(s.iterations for s in surveys)
    jumped = 100 * total.out_of_order / max(1, total.actions)
    lines = [f"{len(surveys)} ranks, {iterations} iterations, {spans} spans"]
    lines.append(
        f"step {total.duration_ns / 1e6:.1f} ms, bubble {100 * total.bubble_ratio:.1f} % of the "
        f"pipeline's time, {jumped:.1f} % of the actions out of order"
    )
    for survey in surveys[:_MAX_LINES]:
        mine = figures([survey])
        longest = list(mine.idle_ns.items())[:3]
        causes = ", ".join(f"{cause} {time_ns / 1e6:.1f} ms" for cause, time_ns in longest)
        lines.append(
            f"  {survey.header.label}: busy {mine.busy_ns / 1e6:.1f} ms; {causes or 'never idle'}; "
            f"peak memory {mine.memory_bytes / 2**30:.2f} GiB"
        )
    if len(surveys) > _MAX_LINES:
        lines.append(f"  and {len(surveys) - _MAX_LINES} further ranks")
    return "\n".join(lines)
