"""What one pass over the trace of a rank finds out: times by cause, costs, links, message stamps.

A survey has a bounded size whatever the trace is, so that the surveys of all ranks fit in memory
and can be made by several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.trace.records import ACTION_NAMES, Header, Span

if TYPE_CHECKING:
    from megatron_ext.trace.reader import Iteration, TraceFile

__all__ = ["Link", "MessageKey", "RankSurvey", "Sample", "Step", "survey"]

MAX_STEPS = 20_000
"""Iterations that a survey keeps one by one; further ones are left out of it."""
_MAX_SAMPLED_ITERATIONS = 16
_MAX_STAMPS = 20_000
_MAX_GROUPS = 10_000
"""Different stages, links or causes of one rank; a hostile file could name any number."""

_WORK = frozenset(ACTION_NAMES.values())


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
    actions: int
    out_of_order: int
    """Actions that ran although an earlier one of the table had not run."""
    activation_bytes: int
    """What a forward of one stage keeps; 0: not known."""


@dataclass
class Sample:
    """Durations of one kind: count, sum and an evenly thinned selection of at most 512."""

    count: int = 0
    total_ns: int = 0
    kept: list[int] = field(default_factory=list)
    _stride: int = 1

    def add(self, value_ns: int) -> None:
        """Take in a duration."""
        if self.count % self._stride == 0:
            self.kept.append(value_ns)
            if len(self.kept) == 512:
                self.kept = self.kept[::2]
                self._stride *= 2
        self.count += 1
        self.total_ns += value_ns

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
    """What a rank got from another one."""

    messages: int = 0
    bytes: int = 0
    waited_ns: int = 0


@dataclass
class RankSurvey:
    """Everything that is to be known about one rank."""

    path: Path
    header: Header
    steps: list[Step] = field(default_factory=list)
    actions: dict[tuple[str, int], Sample] = field(default_factory=dict)
    """By name and stage: from the begin of an action to the begin of what follows it, without
    waiting, so that what the runtime does around an action belongs to it."""
    times: dict[str, Sample] = field(default_factory=dict)
    """By name of everything that is no action."""
    links: dict[int, Link] = field(default_factory=dict)
    """By the global rank that sent."""
    stamps: dict[MessageKey, tuple[int, int]] = field(default_factory=dict)
    """Of the messages of some iterations: begin and end of their `send` or `receive`, on the clock
    of the rank."""
    waited: set[MessageKey] = field(default_factory=set)
    """Those of `stamps` that were received and had been waited for."""
    iterations: int = 0
    spans: int = 0
    damaged: int = 0

    @property
    def complete_steps(self) -> list[Step]:
        """The steps but for the first, which warms up, if there are more."""
        return self.steps[1:] or self.steps


def survey(file: TraceFile) -> RankSurvey:
    """Read the trace of a rank once.

    Raises:
        DataError: See `reader.TraceFile.iterations`.
    """
    found = RankSurvey(file.path, file.header)
    stride = 1
    sampled: dict[int, int] = {}
    for iteration in file.iterations():
        found.iterations += 1
        found.spans += len(iteration.spans)
        iteration.spans.sort(key=lambda span: span.begin_ns)
        if len(found.steps) < MAX_STEPS:
            found.steps.append(_step(iteration))
        _count(found, iteration)
        if iteration.number % stride == 0:
            sampled[iteration.number] = 1
            _note_stamps(found, iteration)
            while len(sampled) > _MAX_SAMPLED_ITERATIONS or len(found.stamps) > _MAX_STAMPS:
                stride *= 2  # the same numbers on all ranks
                sampled = {n: 1 for n in sampled if n % stride == 0}
                found.stamps = {
                    key: times for key, times in found.stamps.items() if key.iteration in sampled
                }
                if len(sampled) <= 1:
                    break
    found.waited &= found.stamps.keys()
    found.damaged = file.damaged
    return found


def _step(iteration: Iteration) -> Step:
    work = [span for span in iteration.spans if span.name in _WORK]
    begin = work[0].begin_ns if work else 0
    end = max((span.end_ns for span in work), default=0)
    busy = sum(span.end_ns - span.begin_ns for span in work)
    idle: dict[str, int] = {}
    for span in iteration.spans:
        if span.name in ("wait", "send", "weights") and begin <= span.begin_ns < end:
            cause = _cause(span)
            if cause in idle or len(idle) < _MAX_GROUPS:
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
        _peak_live(work),
        len(work),
        given("out_of_order", 0),
        given("activation_bytes", 0),
    )


def _cause(span: Span) -> str:
    if span.name != "wait":
        return span.name
    cause = str(span.attributes.get("cause", "unknown"))
    on = span.attributes.get("on")
    return cause if on is None else f"{cause} of rank {on}"


def _peak_live(work: list[Span]) -> int:
    """Count the forwards whose backward, or whose weight gradient, has not ended."""
    splits = {
        (span.attributes.get("stage"), span.attributes.get("microbatch"))
        for span in work
        if span.name == "weight_gradient"
    }
    live = peak = 0
    for span in work:
        if span.name == "forward":
            live += 1
            peak = max(peak, live)
        else:
            about = span.attributes.get("stage"), span.attributes.get("microbatch")
            live -= span.name != "input_gradient" or about not in splits
    return peak


def _count(found: RankSurvey, iteration: Iteration) -> None:
    """Add the durations of an iteration; the first one warms up and does not count."""
    if found.iterations == 1 and iteration.number <= 1:
        return
    spans = iteration.spans
    for index, span in enumerate(spans):
        name, begin, end, attributes = span
        if name in _WORK:
            # What is done until the rank waits or computes again is the price of the action.
            following = _next_begin(spans, index)
            cost = following - begin if following is not None else end - begin
            key = (name, attributes.get("stage", attributes.get("model_chunk", 0)))
            if key in found.actions or len(found.actions) < _MAX_GROUPS:
                found.actions.setdefault(key, Sample()).add(cost)
            continue
        if name in found.times or len(found.times) < _MAX_GROUPS:
            found.times.setdefault(name, Sample()).add(end - begin)
        source = attributes.get("from") if name == "receive" else attributes.get("on")
        if name in ("receive", "wait") and type(source) is int:
            if source not in found.links and len(found.links) >= _MAX_GROUPS:
                continue
            link = found.links.setdefault(source, Link())
            if name == "wait":
                link.waited_ns += end - begin
            else:
                link.messages += 1
                link.bytes += _whole(attributes.get("bytes"))


def _next_begin(spans: list[Span], index: int) -> int | None:
    for span in spans[index + 1 : index + 8]:
        if span.name in _WORK or span.name in ("wait", "receive"):
            return max(span.begin_ns, spans[index].end_ns)
    return None


def _note_stamps(found: RankSurvey, iteration: Iteration) -> None:
    waits: set[tuple[object, ...]] = set()
    for span, key in _messages(found.header.rank, iteration):
        if span.name == "wait":
            waits.add(key)
        else:
            moment = iteration.begin_ns
            found.stamps[key] = moment + span.begin_ns, moment + span.end_ns
            if key in waits:
                found.waited.add(key)


def _messages(rank: int, iteration: Iteration) -> Iterator[tuple[Span, MessageKey]]:
    """Yield the sends, the receives and the waits for one message."""
    for span in iteration.spans:
        if span.name not in ("send", "receive", "wait"):
            continue
        key = message_key(rank, iteration.number, span)
        if key is not None:
            yield span, key


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
