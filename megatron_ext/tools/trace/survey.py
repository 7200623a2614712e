"""The survey of one rank's trace: times by cause, costs, links and message stamps, in one pass.

The page, the forecast and the lines of text are made of surveys.
"""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.tracing.records import ACTION_NAMES, Header, Span

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration, TraceFile

MAX_STEPS = 20_000
"""Number of iterations that a survey keeps separately; it ignores further ones."""
# Bounds on a survey: those of all ranks are in memory together, and travel between processes.
_MAX_ITERATIONS = 16
_MAX_SPANS = 40_000
_MAX_LINES = 16
"""Ranks that have a line of text of their own."""

_WORK = frozenset(ACTION_NAMES.values())
_WEIGHT = ACTION_NAMES["W"]
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
    """One iteration of one rank, or the summary of several; times in nanoseconds."""

    number: int = 0
    begin_ns: int = 0
    duration_ns: float = 0
    pipeline_ns: float = 0
    """From the begin of its first action to the end of its last."""
    busy_ns: float = 0
    """Of that, in actions."""
    idle_ns: Mapping[str, float] = MappingProxyType({})
    """The rest of `pipeline_ns` by cause: `input of rank 3`, `slot`, `leader`, `send`, `other`."""
    after_ns: float = 0
    """From the last action to the end of the iteration: reduction, optimizer and so on."""
    memory_bytes: int = 0
    peak_live: float = 0
    """Most activations of one stage that it kept at once; a weight stash may count more than 1."""
    actions: int = 0
    out_of_order: int = 0
    """Actions that ran although an earlier one of the table had not run."""
    activation_bytes: int = 0
    """Bytes that a forward of one stage keeps; 0: not known."""
    microbatches: int = 0
    """Of one pipeline; 0: not known."""

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline's time that is in no action."""
        idle_ns = sum(self.idle_ns.values())
        return idle_ns / (self.busy_ns + idle_ns) if idle_ns else 0.0

    @property
    def out_of_order_ratio(self) -> float:
        """Share of its actions that ran out of order."""
        return self.out_of_order / self.actions if self.actions else 0.0


@dataclass
class Link:
    """Messages that a rank received from another one."""

    source: int
    target: int
    messages: int = 0
    bytes: int = 0
    waited_ns: int = 0
    delay_ns: int | None = None
    """Median from the begin of a send to the end of its receive, of messages that were waited for;
    None: both ends of no such message are known. It takes the surveys of both ranks."""


def _lists() -> dict[tuple[str, int], list[int]]:
    return defaultdict(list)


@dataclass
class RankSurvey:
    """The survey of one rank."""

    file: TraceFile
    full: int = 0
    """Micro-batches of the table of the run; 0: not known. The figures are of steps with so many
    only, because others take another time (`--rampup-batch-size`)."""
    slices: tuple[float, ...] = (1.0,)
    """Share of a micro-batch that each of its slices is."""
    steps: list[Step] = field(default_factory=list)
    actions: dict[tuple[str, int], list[int]] = field(default_factory=_lists)
    """Nanoseconds by name and stage: from the begin of an action to the begin of what follows it,
    without waiting, so that what the runtime does around an action belongs to it."""
    exchanges: dict[tuple[str, int], list[int]] = field(default_factory=_lists)
    """By the same keys: what an action exchanges between experts, alone as in pairs."""
    links: dict[int, Link] = field(default_factory=dict)
    """By the global rank that sent."""
    wires: dict[int, str] = field(default_factory=dict)
    """By the global rank of each peer: what carries messages between the two."""
    sends: dict[MessageKey, int] = field(default_factory=dict)
    """When the `send` of a message began, on the clock of the rank."""
    receives: dict[MessageKey, tuple[int, bool]] = field(default_factory=dict)
    """When the `receive` of a message ended, and whether the rank had waited for it."""
    sent: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of the messages that it sent, by kind and stage."""
    counted: int = 0
    """Iterations that `actions`, `exchanges`, `links` and `sent` are about: some, evenly spread."""
    iterations: int = 0
    spans: int = 0

    @property
    def header(self) -> Header:
        """The identity of the rank."""
        return self.file.header

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
    found = RankSurvey(file, full, slices)
    # Every iteration has its figures; single durations and messages are those of some, evenly
    # spread, and of the same ones on all ranks: weeks of iterations must not grow what is kept.
    # Those that are no measure, of other sizes or the first, serve only where there are no others.
    kept: dict[int, Iteration] = {}  # by line, from the first of those that count
    first, stride, measures = 1, 1, False
    for iteration in file.iterations():
        found.iterations += 1
        found.spans += len(iteration.spans)
        iteration.spans.sort(key=operator.itemgetter(1))
        for span in iteration.spans:
            if span.name == "wire":
                peer = _whole(span.attributes.get("peer"))
                found.wires[peer] = str(span.attributes.get("wire"))
        if len(found.steps) < MAX_STEPS:
            found.steps.append(_step(iteration, found.stash_ratio, slices))
        is_measure = found.is_full(iteration.end.get("microbatches", 0)) and iteration.number > 1
        line = found.iterations + file.damaged  # skipped here, whole on other ranks
        if is_measure and not measures:
            first, stride, measures, kept = line, 1, True, {}
        if is_measure == measures and (line - first) % stride == 0:
            kept[line - first] = iteration
        while len(kept) > 1 and (
            len(kept) > _MAX_ITERATIONS or sum(len(one.spans) for one in kept.values()) > _MAX_SPANS
        ):
            stride *= 2
            kept = {at: one for at, one in kept.items() if at % stride == 0}
    for iteration in kept.values():
        waits: set[MessageKey] = set()
        for span in iteration.spans:
            key = message_key(found.header.rank, iteration.number, span)
            if key is not None and span.name == "wait":
                waits.add(key)
            elif key is not None and span.name == "send":
                found.sends[key] = iteration.begin_ns + span.begin_ns
            elif key is not None:
                found.receives[key] = iteration.begin_ns + span.end_ns, key in waits
        if measures:
            _count(found, iteration.spans)
    return found


def _step(iteration: Iteration, stash_ratio: float, slices: tuple[float, ...]) -> Step:
    work = [span for span in iteration.spans if span.name in _WORK]
    begin = work[0].begin_ns if work else 0
    end = max((span.end_ns for span in work), default=0)
    busy, covered = 0, begin
    live = peak = 0.0
    of = [(about("stage"), about("microbatch"), about("slice", 0))
          for about in (span.attributes.get for span in work)]  # fmt: skip
    splits = {action for action, span in zip(of, work, strict=True) if span.name == _WEIGHT}
    for action, span in zip(of, work, strict=True):
        busy += max(0, span.end_ns - max(span.begin_ns, covered))  # those of a pair overlap
        covered = max(covered, span.end_ns)
        part = _whole(action[2])
        share = slices[part] if part < len(slices) else 0.0
        if span.name == ACTION_NAMES["F"]:
            live += share
        elif action not in splits:
            live -= share
        elif span.name == ACTION_NAMES["I"]:
            live += (stash_ratio - 1) * share
        else:
            live -= stash_ratio * share
        peak = max(peak, live)
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
        peak_live=peak,
        actions=len(work),
        out_of_order=given("out_of_order", 0),
        activation_bytes=given("activation_bytes", 0),
        microbatches=given("microbatches", 0),
    )


def _count(found: RankSurvey, spans: Sequence[Span]) -> None:
    """Add the durations of an iteration's actions, and what it sent and received."""
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
            found.actions[action].append(max(begin, ended) - begun)
            action = None
        other = about.get(_OTHER_END.get(name, ""))
        if name in _WORK:
            action, begun, ended = (name, about.get("stage", 0)), begin, end
        elif name == "send":
            of = str(about.get("for")), _whole(about.get("stage"))
            found.sent[of] += _whole(about.get("bytes"))  # damaged numbers count as none
        # Exactly int: a damaged `true` would count as rank 1.
        elif name in ("receive", "wait") and type(other) is int:
            link = found.links.setdefault(other, Link(other, found.header.rank))
            if name == "wait":
                link.waited_ns += end - begin
            else:
                link.messages += 1
                link.bytes += _whole(about.get("bytes"))
    if action is not None:
        found.actions[action].append(ended - begun)
    for (of_kind, stage, _), exchanged_ns in exchanged.items():
        found.exchanges[of_kind, stage].append(exchanged_ns)


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


def figures(surveys: Iterable[RankSurvey]) -> Step:
    """Summarise the steps of some ranks, without each rank's first step, which warms up.

    Durations are medians, what a step consists of are means, the longest wait first; memory and
    activations are those of the worst step, and numbers of actions sums.
    """
    steps = [step for survey in surveys for step in survey.complete_steps]
    if not steps:
        return Step()
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
    )


def text(surveys: Sequence[RankSurvey]) -> str:
    """Return the figures of a run: all ranks together, then what each waits for."""
    total = figures(surveys)
    spans, iterations = sum(s.spans for s in surveys), max(s.iterations for s in surveys)
    lines = [f"{len(surveys)} ranks, {iterations} iterations, {spans} spans"]
    lines.append(
        f"step {total.duration_ns / 1e6:.1f} ms, bubble {100 * total.bubble_ratio:.1f} % of the "
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
