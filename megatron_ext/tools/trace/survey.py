"""The survey of one rank's trace: times by cause, costs, links and message stamps, in one pass.

The page, the forecast and the lines of text are made of surveys.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.tracing.records import ACTION_NAMES, Header, Span

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration, TraceFile

__all__ = ["Figures", "Incoming", "MessageKey", "RankSurvey", "Sample", "Step", "figures",
           "message_key", "survey", "text"]  # fmt: skip

MAX_STEPS = 20_000
"""Number of iterations that a survey keeps separately; it ignores further ones."""
# Bounds on a survey: those of all ranks are in memory together, and travel between processes.
_MAX_SAMPLED_ITERATIONS = 16
_MAX_STAMPS = 20_000
_MAX_LINES = 16
"""Ranks that have a line of text of their own."""

_WORK = frozenset(ACTION_NAMES.values())
_IDLE = ("wait", "send", "weights")
"""Spans in which a rank computes nothing."""
_OTHER_END = {"send": "to", "receive": "from", "wait": "on"}
"""By name of a span about a message: its attribute with the other rank."""


class MessageKey(NamedTuple):
    """Identity of a message within a run."""

    iteration: int
    source: int
    target: int
    kind: str
    stage: int
    microbatch: int
    slice: int


class Step(NamedTuple):
    """One iteration of one rank, in nanoseconds."""

    number: int
    begin_ns: int
    duration_ns: int
    pipeline_ns: int
    """From the begin of its first action to the end of its last."""
    busy_ns: int
    """Of that, in actions."""
    idle_ns: dict[str, int]
    """The rest of `pipeline_ns` by cause: `input of rank 3`, `slot`, `leader`, `send`, `other`."""
    after_ns: int
    """From the last action to the end of the iteration: reduction, optimizer and so on."""
    memory_bytes: int
    peak_live: float
    """Most forwards that waited for the end of their backward at once, in stages."""
    peak_kept: float
    """The same in activations of one stage; a weight stash may count more than 1."""
    actions: int
    out_of_order: int
    """Actions that ran although an earlier one of the table had not run."""
    activation_bytes: int
    """Bytes that a forward of one stage keeps; 0: not known."""
    microbatches: int
    """Of one pipeline; 0: not known."""


@dataclass
class Sample:
    """Durations of one kind: count and an evenly thinned selection of at most 512."""

    count: int = 0
    kept: list[int] = field(default_factory=list)
    _stride: int = 1

    def add(self, values_ns: Sequence[int]) -> None:
        """Take in durations."""
        # Every stride-th of all values, across calls: `count` says how many were seen before.
        self.kept += values_ns[-self.count % self._stride :: self._stride]
        while len(self.kept) >= 512:
            self.kept = self.kept[::2]
            self._stride *= 2
        self.count += len(values_ns)

    @property
    def median_ns(self) -> int:
        """The median of the selection, 0 if there is nothing."""
        return sorted(self.kept)[len(self.kept) // 2] if self.kept else 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithms."""
        values = sorted(value for value in self.kept if value > 0)
        if len(values) < 8:
            return 0.0
        # The quartiles of a normal distribution are 1.349 sigma apart; a step in which the machine
        # did something else moves them little.
        return math.log(values[3 * len(values) // 4] / values[len(values) // 4]) / 1.349


@dataclass
class Incoming:
    """Messages that a rank received from another one."""

    messages: int = 0
    bytes: int = 0
    waited_ns: int = 0


@dataclass
class RankSurvey:
    """The survey of one rank."""

    path: Path
    header: Header
    full: int = 0
    """Micro-batches of the table of the run; 0: not known. The figures are of steps with so many
    only, because others take another time (`--rampup-batch-size`)."""
    slices: tuple[float, ...] = (1.0,)
    """Share of a micro-batch that each of its slices is."""
    steps: list[Step] = field(default_factory=list)
    actions: dict[tuple[str, int], Sample] = field(default_factory=lambda: defaultdict(Sample))
    """By name and stage: from the begin of an action to the begin of what follows it, without
    waiting, so that what the runtime does around an action belongs to it."""
    exchanges: dict[tuple[str, int], Sample] = field(default_factory=lambda: defaultdict(Sample))
    """By the same keys: what an action exchanges between experts, alone as in pairs."""
    links: dict[int, Incoming] = field(default_factory=lambda: defaultdict(Incoming))
    """By the global rank that sent."""
    wires: dict[int, str] = field(default_factory=dict)
    """By the global rank of each peer: what carries messages between the two."""
    stamps: dict[MessageKey, tuple[int, int]] = field(default_factory=dict)
    """Of the messages of some iterations: begin and end of their `send` or `receive`, on the clock
    of the rank."""
    waited: set[MessageKey] = field(default_factory=set)
    """Keys of `stamps` that were received and had been waited for."""
    sent: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of the messages that it sent, by kind and stage."""
    counted: int = 0
    """Iterations that `actions`, `links` and `sent` are about."""
    iterations: int = 0
    spans: int = 0
    damaged: int = 0

    @property
    def stash_ratio(self) -> float:
        """Memory of a micro-batch between I and W over that before I."""
        given = self.header.settings.get("stash_ratio")
        return given if isinstance(given, int | float) and given >= 1 else 1.0

    @property
    def complete_steps(self) -> list[Step]:
        """The steps of the table's size except the first of all, which warms up.

        If there are none: that one, or all of another size.
        """
        full = [step for step in self.steps if self.is_full(step.microbatches)]
        return [step for step in full if step is not self.steps[0]] or full or self.steps

    def is_full(self, microbatches: int) -> bool:
        """Return whether a step with so many micro-batches, 0 if not known, is what is planned."""
        return not (microbatches and self.full) or microbatches == self.full


def survey(file: TraceFile, full: int = 0, slices: tuple[float, ...] = (1.0,)) -> RankSurvey:
    """Read the trace of a rank once.

    Args:
        file: The trace.
        full: Micro-batches of the table of the run; 0: not known.
        slices: Share of a micro-batch that each of its slices is.

    Raises:
        DataError: See `reader.TraceFile.iterations`.
    """
    found = RankSurvey(file.path, file.header, full, slices)
    # The messages of some iterations, evenly spread, and of the same ones on all ranks: by number
    # their begin, and their spans that are about a message.
    kept: dict[int, tuple[int, list[tuple[MessageKey, Span]]]] = {}
    stride = 1
    for iteration in file.iterations():
        spans = iteration.spans
        found.iterations += 1
        found.spans += len(spans)
        spans.sort(key=operator.itemgetter(1))
        # Weeks of iterations must not grow what a process keeps.
        if len(found.steps) < MAX_STEPS:
            found.steps.append(_step(iteration, found.stash_ratio, slices))
        is_full = found.is_full(iteration.end.get("microbatches", 0))
        if is_full and (found.iterations > 1 or iteration.number > 1):  # the first one warms up
            _count(found, spans)
        for span in spans:
            if span.name == "wire":
                peer = _whole(span.attributes.get("peer"))
                found.wires[peer] = str(span.attributes.get("wire"))
        if iteration.number % stride:
            continue
        keyed = ((message_key(found.header.rank, iteration.number, span), span) for span in spans)
        about = [(key, span) for key, span in keyed if key is not None]
        kept[iteration.number] = iteration.begin_ns, about
        while len(kept) > 1 and (
            len(kept) > _MAX_SAMPLED_ITERATIONS
            or sum(len(about) for _, about in kept.values()) > _MAX_STAMPS
        ):
            stride *= 2
            kept = {number: one for number, one in kept.items() if number % stride == 0}
    for begin_ns, about in kept.values():
        waits = {key for key, span in about if span.name == "wait"}
        for key, span in about:
            if span.name != "wait":
                found.stamps[key] = begin_ns + span.begin_ns, begin_ns + span.end_ns
        found.waited |= waits & found.stamps.keys()
    found.damaged = file.damaged
    return found


def _step(iteration: Iteration, stash_ratio: float, slices: tuple[float, ...]) -> Step:
    work = [span for span in iteration.spans if span.name in _WORK]
    begin = work[0].begin_ns if work else 0
    end = max((span.end_ns for span in work), default=0)
    busy, covered = 0, begin
    for span in work:  # the two of a pair overlap, and the rank is busy once
        busy += max(0, span.end_ns - max(span.begin_ns, covered))
        covered = max(covered, span.end_ns)
    idle: dict[str, int] = defaultdict(int)
    for span in iteration.spans:
        if span.name in _IDLE and begin <= span.begin_ns < end:
            cause, on = span.name, span.attributes.get("on")
            if cause == "wait":
                cause = str(span.attributes.get("cause", "unknown"))
                cause += "" if on is None else f" of rank {on}"
            idle[cause] += span.end_ns - span.begin_ns
    other = end - begin - busy - sum(idle.values())
    if other > 0:  # data, Python, and whatever else no span is about
        idle["other"] = other
    given = iteration.end.get
    return Step(
        iteration.number,
        iteration.begin_ns,
        iteration.duration_ns,
        pipeline_ns=end - begin,
        busy_ns=busy,
        idle_ns=dict(idle),
        after_ns=iteration.duration_ns - end,
        memory_bytes=given("memory_bytes", 0),
        peak_live=_peak_live(work, slices),
        peak_kept=_peak_live(work, slices, stash_ratio),
        actions=len(work),
        out_of_order=given("out_of_order", 0),
        activation_bytes=given("activation_bytes", 0),
        microbatches=given("microbatches", 0),
    )


def _peak_live(work: list[Span], slices: Sequence[float], stash_ratio: float = 1.0) -> float:
    """Count the forwards whose backward, or whose weight gradient, has not ended.

    Args:
        work: The actions of an iteration, in order.
        slices: What each slice counts.
        stash_ratio: What one between its input gradient and its weight gradient counts.
    """
    splits = {_action_of(span) for span in work if span.name == "weight_gradient"}
    live = peak = 0.0
    for span in work:
        about = _action_of(span)
        number = _whole(about[2])
        share = slices[number] if number < len(slices) else 0.0
        if span.name == "forward":
            live += share
        elif about not in splits:
            live -= share
        elif span.name == "input_gradient":
            live += (stash_ratio - 1) * share
        else:
            live -= stash_ratio * share
        peak = max(peak, live)
    return peak


def _action_of(span: Span) -> tuple[Any, Any, Any]:
    """Return stage, micro-batch and slice of an action, whatever its kind."""
    about = span.attributes.get
    return about("stage"), about("microbatch"), about("slice", 0)


def _count(found: RankSurvey, spans: Sequence[Span]) -> None:
    """Add the durations of an iteration's actions, and what it sent and received."""
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    action: tuple[str, int] | None = None
    found.counted += 1
    begun = ended = 0
    exchanged: dict[tuple[str, int, int], int] = defaultdict(int)
    for name, begin, end, about in spans:
        if name == "exchange":
            kind = ACTION_NAMES.get(str(about.get("of")), "")
            key = kind, _whole(about.get("stage")), _whole(about.get("microbatch"))
            exchanged[key] += end - begin
            continue
        # The two of a pair begin together, and neither has a price of its own.
        if name in _WORK and 2 * begin < begun + ended:
            action, ended = None, max(ended, end)
            continue
        if action is not None and (name in _WORK or name in ("wait", "receive")):
            # What is done until the rank waits or computes again is the price of the action.
            costs[action].append(max(begin, ended) - begun)
            action = None
        if name in _WORK:
            action, begun, ended = (name, about.get("stage", 0)), begin, end
        elif name == "send":
            of = str(about.get("for")), _whole(about.get("stage"))
            found.sent[of] += _whole(about.get("bytes"))  # damaged numbers count as none
        # Exactly int: a damaged `true` would count as rank 1.
        elif name in ("receive", "wait") and type(about.get(_OTHER_END[name])) is int:
            link = found.links[about[_OTHER_END[name]]]
            if name == "wait":
                link.waited_ns += end - begin
            else:
                link.messages += 1
                link.bytes += _whole(about.get("bytes"))
    if action is not None:
        costs[action].append(ended - begun)
    for of_action, values_ns in costs.items():
        found.actions[of_action].add(values_ns)
    for (of_kind, stage, _), exchanged_ns in exchanged.items():
        found.exchanges[of_kind, stage].add([exchanged_ns])


def message_key(rank: int, iteration: int, span: Span) -> MessageKey | None:
    """Return which message a span of a rank is about, None if it is about none."""
    about = span.attributes
    if span.name not in _OTHER_END or about.get("for") not in ("F", "B"):
        return None
    match about.get(_OTHER_END[span.name]), about.get("stage"), about.get("microbatch"):
        case int(other), int(stage), int(microbatch):
            source, target = (rank, other) if span.name == "send" else (other, rank)
            part = _whole(about.get("slice"))
            return MessageKey(iteration, source, target, about["for"], stage, microbatch, part)
    return None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(frozen=True)
class Figures:
    """Summary of the steps of one or more ranks; times in nanoseconds."""

    step_ns: float = 0.0
    """Median time of an iteration."""
    pipeline_ns: float = 0.0
    """Median of the time from the first to the last action."""
    busy_ns: float = 0.0
    """Mean per step in actions."""
    idle_ns: dict[str, float] = field(default_factory=dict)
    """Mean per step, by cause, the longest first."""
    after_ns: float = 0.0
    """Mean per step after the last action."""
    memory_bytes: int = 0
    peak_live: float = 0.0
    peak_kept: float = 0.0
    out_of_order_ratio: float = 0.0

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline's time that is in no action."""
        total = self.busy_ns + sum(self.idle_ns.values())
        return sum(self.idle_ns.values()) / total if total else 0.0


def figures(surveys: Iterable[RankSurvey]) -> Figures:
    """Summarise the steps of some ranks, without each rank's first step, which warms up."""
    steps = [step for survey in surveys for step in survey.complete_steps]
    if not steps:
        return Figures()
    idle: dict[str, float] = defaultdict(float)
    for step in steps:
        for cause, time_ns in step.idle_ns.items():
            idle[cause] += time_ns / len(steps)
    actions = sum(step.actions for step in steps)
    return Figures(
        step_ns=statistics.median(step.duration_ns for step in steps),
        pipeline_ns=statistics.median(step.pipeline_ns for step in steps),
        busy_ns=statistics.fmean(step.busy_ns for step in steps),
        idle_ns=dict(sorted(idle.items(), key=lambda item: -item[1])),
        after_ns=statistics.fmean(step.after_ns for step in steps),
        memory_bytes=max(step.memory_bytes for step in steps),
        peak_live=max(step.peak_live for step in steps),
        peak_kept=max(step.peak_kept for step in steps),
        out_of_order_ratio=sum(step.out_of_order for step in steps) / actions if actions else 0.0,
    )


def text(surveys: Sequence[RankSurvey]) -> str:
    """Return the figures of a run: all ranks together, then what each waits for."""
    total = figures(surveys)
    spans, iterations = sum(s.spans for s in surveys), max(s.iterations for s in surveys)
    lines = [f"{len(surveys)} ranks, {iterations} iterations, {spans} spans"]
    lines.append(
        f"step {total.step_ns / 1e6:.1f} ms, bubble {100 * total.bubble_ratio:.1f} % of the "
        f"pipeline's time, {100 * total.out_of_order_ratio:.1f} % of the actions out of order"
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
