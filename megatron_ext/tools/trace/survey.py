"""The survey of one rank's trace: times by cause, costs, links and message stamps, in one pass.

The size of a survey is bounded, so the surveys of all ranks fit in memory, and several processes
can make them.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.tracing.records import ACTION_NAMES, Header, Span

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration, TraceFile

__all__ = ["Link", "MessageKey", "RankSurvey", "Sample", "Step", "survey"]

MAX_STEPS = 20_000
"""Number of iterations that a survey keeps separately; it ignores further ones."""
_MAX_SAMPLED_ITERATIONS = 16
_MAX_STAMPS = 20_000

_WORK = frozenset(ACTION_NAMES.values())
_IDLE = ("wait", "send", "weights")
"""Spans in which a rank computes nothing."""


class MessageKey(NamedTuple):
    """Identity of a message within a run."""

    iteration: int
    source: int
    target: int
    kind: str
    stage: int
    microbatch: int


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
    peak_live: int
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
        """Standard deviation of the logarithms, from the quartiles: robust against outliers."""
        values = sorted(value for value in self.kept if value > 0)
        if len(values) < 8:
            return 0.0
        low, high = values[len(values) // 4], values[3 * len(values) // 4]
        return math.log(high / low) / 1.349


@dataclass
class Link:
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
    steps: list[Step] = field(default_factory=list)
    actions: dict[tuple[str, int], Sample] = field(default_factory=dict)
    """By name and stage: from the begin of an action to the begin of what follows it, without
    waiting, so that what the runtime does around an action belongs to it."""
    times: dict[str, Sample] = field(default_factory=dict)
    """By name of everything that is no action."""
    links: dict[int, Link] = field(default_factory=dict)
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
    """Iterations that `actions`, `times`, `links` and `sent` are about."""
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


def survey(file: TraceFile, full: int = 0) -> RankSurvey:
    """Read the trace of a rank once.

    Args:
        file: The trace.
        full: Micro-batches of the table of the run; 0: not known.

    Raises:
        DataError: See `reader.TraceFile.iterations`.
    """
    found = RankSurvey(file.path, file.header, full)
    messages = _Messages(file.header.rank)
    for iteration in file.iterations():
        spans = iteration.spans
        found.iterations += 1
        found.spans += len(spans)
        spans.sort(key=_begin_of)
        if len(found.steps) < MAX_STEPS:
            found.steps.append(_step(iteration, found.stash_ratio))
        is_full = found.is_full(iteration.end.get("microbatches", 0))
        if is_full and (found.iterations > 1 or iteration.number > 1):  # the first one warms up
            _count(found, spans)
        for span in spans:
            if span.name == "wire":
                peer = _whole(span.attributes.get("peer"))
                found.wires[peer] = str(span.attributes.get("wire"))
        messages.take(iteration)
    messages.give(found)
    found.damaged = file.damaged
    return found


class _Messages:
    """The messages of some iterations: evenly spread, and the same iterations on all ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stride = 1
        self._kept: dict[int, tuple[int, list[tuple[MessageKey, Span]]]] = {}
        """By iteration: its begin, and its spans that are about a message."""

    def take(self, iteration: Iteration) -> None:
        """Keep an iteration if it is among the chosen ones; with too many, choose fewer."""
        if iteration.number % self._stride:
            return
        about = []
        for span in iteration.spans:
            if span.name in ("send", "receive", "wait"):
                key = message_key(self._rank, iteration.number, span)
                if key is not None:
                    about.append((key, span))
        self._kept[iteration.number] = iteration.begin_ns, about
        while len(self._kept) > 1 and (
            len(self._kept) > _MAX_SAMPLED_ITERATIONS
            or sum(len(kept) for _, kept in self._kept.values()) > _MAX_STAMPS
        ):
            self._stride *= 2
            self._kept = {n: kept for n, kept in self._kept.items() if n % self._stride == 0}

    def give(self, found: RankSurvey) -> None:
        """Note when each message was sent or received, and which were waited for."""
        for begin_ns, about in self._kept.values():
            waits: set[MessageKey] = set()
            for key, span in about:
                if span.name == "wait":
                    waits.add(key)
                    continue
                found.stamps[key] = begin_ns + span.begin_ns, begin_ns + span.end_ns
                if key in waits:
                    found.waited.add(key)


_begin_of = operator.itemgetter(1)


def _step(iteration: Iteration, stash_ratio: float) -> Step:
    work = [span for span in iteration.spans if span.name in _WORK]
    begin = work[0].begin_ns if work else 0
    end = max((span.end_ns for span in work), default=0)
    busy = sum(span.end_ns - span.begin_ns for span in work)
    idle: dict[str, int] = {}
    for span in iteration.spans:
        if span.name in _IDLE and begin <= span.begin_ns < end:
            cause = _cause(span)
            idle[cause] = idle.get(cause, 0) + span.end_ns - span.begin_ns
    other = end - begin - busy - sum(idle.values())
    if other > 0:
        idle["other"] = other
    given = iteration.end.get
    return Step(
        iteration.number,
        iteration.begin_ns,
        iteration.duration_ns,
        end - begin,
        busy,
        idle,
        iteration.duration_ns - end,
        given("memory_bytes", 0),
        int(_peak_live(work)),
        _peak_live(work, stash_ratio),
        len(work),
        given("out_of_order", 0),
        given("activation_bytes", 0),
        given("microbatches", 0),
    )


def _cause(span: Span) -> str:
    if span.name != "wait":
        return span.name
    cause = str(span.attributes.get("cause", "unknown"))
    on = span.attributes.get("on")
    return cause if on is None else f"{cause} of rank {on}"


def _peak_live(work: list[Span], stash_ratio: float = 1.0) -> float:
    """Count the forwards whose backward, or whose weight gradient, has not ended.

    Args:
        work: The actions of an iteration, in order.
        stash_ratio: What one between its input gradient and its weight gradient counts.
    """
    splits = {
        (span.attributes.get("stage"), span.attributes.get("microbatch"))
        for span in work
        if span.name == "weight_gradient"
    }
    live = peak = 0.0
    for span in work:
        about = span.attributes.get("stage"), span.attributes.get("microbatch")
        if span.name == "forward":
            live += 1
        elif about not in splits:
            live -= 1
        elif span.name == "input_gradient":
            live += stash_ratio - 1
        else:
            live -= stash_ratio
        peak = max(peak, live)
    return peak


def _count(found: RankSurvey, spans: Sequence[Span]) -> None:
    """Add the durations of an iteration and what came over its links."""
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    times: dict[str, list[int]] = defaultdict(list)
    action: tuple[str, int] | None = None
    found.counted += 1
    begun = ended = 0
    for name, begin, end, about in spans:
        if action is not None and (name in _WORK or name in ("wait", "receive")):
            # What is done until the rank waits or computes again is the price of the action.
            costs[action].append(max(begin, ended) - begun)
            action = None
        if name in _WORK:
            action, begun, ended = (name, about.get("stage", 0)), begin, end
            continue
        if name == "wire":
            continue
        times[name].append(end - begin)
        if name == "send":
            of = str(about.get("for")), _whole(about.get("stage"))
            found.sent[of] += _whole(about.get("bytes"))
        source = about.get("from") if name == "receive" else about.get("on")
        if name in ("receive", "wait") and type(source) is int:
            link = found.links.setdefault(source, Link())
            if name == "wait":
                link.waited_ns += end - begin
            else:
                link.messages += 1
                link.bytes += _whole(about.get("bytes"))
    if action is not None:
        costs[action].append(ended - begun)
    for of_action, values_ns in costs.items():
        found.actions.setdefault(of_action, Sample()).add(values_ns)
    for of_name, values_ns in times.items():
        found.times.setdefault(of_name, Sample()).add(values_ns)


def message_key(rank: int, iteration: int, span: Span) -> MessageKey | None:
    """Return which message a span of a rank is about, None if it is about none."""
    about = span.attributes
    try:
        if span.name == "send":
            source, target = rank, about["to"]
        else:
            source, target = about["from" if span.name == "receive" else "on"], rank
        key = MessageKey(
            iteration, source, target, about["for"], about["stage"], about["microbatch"]
        )
    except KeyError:
        return None
    numbers = (key.source, key.target, key.stage, key.microbatch)
    return key if all(type(n) is int for n in numbers) and key.kind in ("F", "B") else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
