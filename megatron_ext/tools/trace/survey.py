"""Surveys a rank's trace in one pass: times by cause, costs, links and message times.

The page, the forecast and the text summary are built from all ranks' surveys.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.table.actions import Action, Kind
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.tracing.records import ACTION_NAMES, Header

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration, Span, TraceFile

# These limit the size of a survey, because all ranks' surveys are in memory at once and
# are passed between processes.
_MAX_STEPS = 20_000
_MAX_SAMPLED_ITERATIONS = 16
_MAX_SAMPLED_SPANS = 40_000
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_MAX_LINES = 16
"""Maximum number of ranks listed in the text."""

_KINDS: dict[str, Kind] = {name: kind for kind, name in ACTION_NAMES.items()}
_IDLE = ("wait", "send", "weights")
"""Spans during which a rank does not compute."""


class Step(NamedTuple):
    """One iteration on one rank, or a summary of several. Times are in nanoseconds."""

    number: int = 0
    begin_ns: int = 0
    """Start time on the rank's clock or, in a `Run`, on the common clock."""
    duration_ns: float = 0
    first_ns: float = 0
    """Time from the start of the step until its first action or, in a `Run`, until the first rank
    starts the pipeline."""
    pipeline_ns: float = 0
    """Time from the start of the step until its last action finishes or, in a `Run`, until the last
    rank finishes the pipeline."""
    busy_ns: float = 0
    """The part of `pipeline_ns` during which actions run."""
    idle_ns: Mapping[str, float] = MappingProxyType({})
    """Cause -> its share of the rest of `pipeline_ns`. Causes include `input of rank 3`, `slot`,
    `leader`, `send`, `other`, and, while only other ranks have actions left, `end of the pipeline`.
    """
    after_ns: float = 0
    """Time after the pipeline: gradient reduction, the optimizer and so on."""
    optimizer_ns: float = 0
    memory_bytes: int = 0
    peak_live: float = 0
    """The largest number of one-stage activations that the rank held at once. Activations between I
    and W may count as more than 1. If slices depend on lengths, the step's longest micro-batch
    counts as 1."""
    actions: int = 0
    """Number of actions."""
    out_of_order: int = 0
    """Number of actions that ran before an action that precedes them in the table."""
    activation_bytes: int = 0
    """Bytes that one stage's forward pass keeps, or 0 if not known."""
    microbatches: int = 0
    """Number of micro-batches in one pipeline."""
    is_full: bool = True
    """True if the step has as many micro-batches as the table. Step times differ while the batch
    size ramps up."""
    failed: bool = False
    """True if the step failed with an error, perhaps after a time-out."""

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline time during which no action runs."""
        idle_ns = sum(self.idle_ns.values())
        if not idle_ns:
            return 0.0
        return idle_ns / (self.busy_ns + idle_ns)

    def within(self, begin_ns: float, end_ns: float) -> Step:
        """Return this step, for a pipeline that starts and ends at these times."""
        # A rank that finishes early waits for the others until the pipeline ends.
        until_end_ns = end_ns - self.begin_ns - self.pipeline_ns
        wait_ns = min(self.after_ns, max(0, until_end_ns))
        idle_ns = dict(self.idle_ns)
        if wait_ns:
            idle_ns["end of the pipeline"] = wait_ns
        return self._replace(
            first_ns=begin_ns - self.begin_ns,
            pipeline_ns=self.pipeline_ns + wait_ns,
            idle_ns=idle_ns,
            after_ns=self.after_ns - wait_ns,
        )


class Receive(NamedTuple):
    """A received message."""

    source: int
    """The global rank that sent the message."""
    end_ns: int
    was_late: bool
    """True if the message carried a pipeline tensor that the rank waited for."""


@dataclass
class Link:
    """The messages that a rank received from one other rank."""

    source: int
    target: int
    messages: int = 0
    """Number of messages."""
    bytes: int = 0
    waited_ns: int = 0
    steps: int = 0
    """Number of iterations that contain these messages."""
    wire: str = ""
    """The wire that carries the messages."""
    delay_ns: int | None = None
    """Median time from the start of a send to the end of its receive, over messages that the
    receiver waited for. None: both ends were not recorded for any such message. Set by `clocks.py`,
    because it needs both ranks' surveys."""


class ActionKey(NamedTuple):
    """Identifies actions that take equally long: they differ only in their micro-batches."""

    name: str
    stage: int
    slice: int


class MicrobatchSize(NamedTuple):
    """The amount of data in a micro-batch."""

    tokens: int
    sum_of_squares: int
    """Sum of the squared lengths of its samples."""


class ExchangeKey(NamedTuple):
    """Identifies a token exchange on all ranks of an expert group."""

    iteration: int
    kind: str
    """Kind of action that the exchange belongs to."""
    stage: int
    microbatch: int
    layer: int
    """Index within the stage."""
    number: int
    """Number of earlier exchanges in this layer and action."""


@dataclass
class RankSurvey:
    """One rank's survey, with times on its own clock."""

    file: TraceFile
    steps: list[Step] = field(default_factory=list)
    num_iterations: int = 0
    num_spans: int = 0
    wires: dict[int, str] = field(default_factory=dict)
    """Global rank of each peer -> the wire for messages to and from it."""
    num_sampled: int = 0
    """Number of iterations, spread evenly over the run, that the fields below cover."""
    actions: dict[ActionKey, list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(name, stage, slice) -> nanoseconds from the start of each action until the rank waits or
    starts the next action, which includes runtime overhead."""
    # These keys are plain tuples, because there are many and surveys are pickled between
    # processes: named tuples take about 6 times as long and a quarter more space.
    microbatch_ns: dict[tuple[int, int, int, int], int] = field(
        default_factory=lambda: defaultdict(int)
    )
    """(stage, iteration, micro-batch, slice) -> total nanoseconds of its actions."""
    exchanges: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Stage -> nanoseconds that each forward pass spent exchanging tokens between experts."""
    exchange_ns: dict[ExchangeKey, int] = field(default_factory=dict)
    """Duration of each token exchange in nanoseconds, including the wait for the slowest rank."""
    lengths: dict[tuple[int, int], MicrobatchSize] = field(default_factory=dict)
    """(iteration, micro-batch) -> the micro-batch's size."""
    links: dict[int, Link] = field(default_factory=dict)
    """Global rank of the sender -> the link from that rank."""
    sends: dict[int, int] = field(default_factory=dict)
    """Message number -> the start of its `send`, in nanoseconds."""
    receives: dict[int, Receive] = field(default_factory=dict)
    """Message number -> its receive."""

    @property
    def header(self) -> Header:
        """The trace file's header, which identifies the rank."""
        return self.file.header

    @property
    def stash_ratio(self) -> float:
        """A micro-batch's memory between I and W, relative to its memory before I."""
        return float(self.header.settings.get("stash_ratio", 1.0))

    @property
    def complete_steps(self) -> list[Step]:
        """The steps of the same size as the table, except for the run's first step.

        If there are none, the first step is used instead or, if that step failed or has a different
        size, all steps.
        """
        full = [step for step in self.steps if step.is_full and not step.failed]
        # A run's first step also allocates memory and compiles kernels.
        warm = [step for step in full if step is not self.steps[0]]
        return warm or full or self.steps


class _Sample:
    """A limited number of iterations, spread evenly over the run and the same on all ranks.

    Keeps the iterations whose numbers, times the golden ratio, have the smallest fractional parts.
    These are spread evenly no matter how many iterations there are.
    """

    def __init__(self) -> None:
        self._iterations: dict[tuple[bool, float], Iteration] = {}

    def add(self, iteration: Iteration, *, is_measure: bool) -> None:
        """Add an iteration, and drop iterations if the sample becomes too large.

        Unrepresentative iterations are dropped first: the run's first iteration, and iterations
        that failed or have a different size.
        """
        # Use the iteration's number, not its line: if one rank is missing a line, all
        # its later lines would be different iterations than on other ranks, and no
        # message would have both of its ends in the sample.
        fraction = iteration.number * _GOLDEN_RATIO % 1
        self._iterations[not is_measure, fraction] = iteration
        # The key's first part sorts unrepresentative iterations to the end.
        while len(self._iterations) > 1 and self._is_too_large():
            del self._iterations[max(self._iterations)]

    def _is_too_large(self) -> bool:
        num_spans = sum(len(iteration.spans) for iteration in self._iterations.values())
        return (
            len(self._iterations) > _MAX_SAMPLED_ITERATIONS
            or num_spans > _MAX_SAMPLED_SPANS
        )

    @property
    def iterations(self) -> list[Iteration]:
        """All iterations in the sample."""
        return list(self._iterations.values())

    @property
    def measures(self) -> list[Iteration]:
        """The representative iterations, which are used to measure costs."""
        measures = []
        for (is_no_measure, _), iteration in self._iterations.items():
            if not is_no_measure:
                measures.append(iteration)
        return measures


def survey(
    file: TraceFile,
    full_microbatches: int = 0,
    slices: Sequence[float] = (1.0,),
) -> RankSurvey:
    """Read a rank's trace once and return its survey.

    Args:
        file: The trace.
        full_microbatches: Number of micro-batches in the run's table, or 0 if not known.
        slices: The fraction of a micro-batch in each of its slices.

    Raises:
        DataError: The file can no longer be read.
    """
    result = RankSurvey(file)
    sample = _Sample()
    for iteration in file.iterations():
        result.num_iterations += 1
        result.num_spans += len(iteration.spans)
        wires = iteration.figures.get("wires", {})
        for peer, wire in wires.items():
            result.wires[int(peer)] = wire
        step = _step_of(iteration, result.stash_ratio, full_microbatches, slices)
        if len(result.steps) < _MAX_STEPS:
            result.steps.append(step)
        is_first = result.num_iterations == 1
        is_measure = step.is_full and not step.failed and not is_first
        sample.add(iteration, is_measure=is_measure)

    # If no iteration is representative, use the others: any message will do
    # for aligning the clocks.
    for iteration in sample.measures or sample.iterations:
        _IterationCounter(result, iteration).count()
    if not sample.measures:
        # Costs measured from these iterations would be wrong.
        result.actions.clear()
    transport = result.header.settings.get("transport", "")
    for source, link in result.links.items():
        link.steps = result.num_sampled
        # With Megatron's own transport, the wires are not known, so
        # name the transport instead.
        link.wire = result.wires.get(source, transport)
    return result


def _step_of(
    iteration: Iteration,
    stash_ratio: float,
    full_microbatches: int,
    slices: Sequence[float],
) -> Step:
    """Return an iteration's times and figures."""
    actions = [span for span in iteration.spans if span.name in _KINDS]
    busy_ns = 0
    covered_ns = 0
    row: list[Action] = []
    figures = iteration.figures
    slice_sizes = figures.get("slice_sizes", ())
    # Without the table, slice sizes are not known, so ignore slices.
    has_known_slices = bool(full_microbatches or slice_sizes)
    for span in actions:
        # The two actions of a pair overlap, so only count time not
        # covered by an earlier action.
        uncovered_from_ns = max(span.begin_ns, covered_ns)
        busy_ns += max(0, span.end_ns - uncovered_from_ns)
        covered_ns = max(covered_ns, span.end_ns)
        attributes = span.attributes
        slice_index = 0
        if has_known_slices:
            slice_index = attributes.get("slice", 0)
        action = Action(
            attributes["stage"],
            _KINDS[span.name],
            attributes["microbatch"],
            slice_index,
        )
        row.append(action)
    first_ns = 0
    if actions:
        first_ns = actions[0].begin_ns
    idle_ns, optimizer_ns = _idle_times(iteration.spans, covered_ns)
    other_ns = covered_ns - busy_ns - sum(idle_ns.values())
    # The rest is data loading, Python, and everything else that has no span.
    if other_ns > 0:
        idle_ns["other"] = other_ns
    return Step(
        iteration.number,
        iteration.begin_ns,
        iteration.duration_ns,
        first_ns=first_ns,
        pipeline_ns=covered_ns,
        busy_ns=busy_ns,
        idle_ns=idle_ns,
        after_ns=iteration.duration_ns - covered_ns,
        optimizer_ns=optimizer_ns,
        memory_bytes=figures.get("memory_bytes", 0),
        peak_live=most_alive(tuple(row), stash_ratio, slices, slice_sizes),
        actions=len(actions),
        out_of_order=figures.get("out_of_order", 0),
        activation_bytes=figures.get("activation_bytes", 0),
        microbatches=figures.get("microbatches", 0),
        is_full=full_microbatches in (0, figures.get("microbatches")),
        failed=figures.get("failed", False),
    )


def _idle_times(
    spans: Iterable[Span], pipeline_ns: int
) -> tuple[dict[str, float], int]:
    """Return cause -> idle nanoseconds in the pipeline, and the nanoseconds in the optimizer."""
    idle_ns: dict[str, float] = {}
    optimizer_ns = 0
    for span in spans:
        took_ns = span.end_ns - span.begin_ns
        if span.name == "optimizer":
            optimizer_ns += took_ns
        # Waiting after the rank's last action counts as time after the pipeline.
        elif span.name in _IDLE and span.begin_ns < pipeline_ns:
            cause = str(span.attributes.get("cause", span.name))
            if "on" in span.attributes:
                cause += f" of rank {span.attributes['on']}"
            idle_ns[cause] = idle_ns.get(cause, 0) + took_ns
    return idle_ns, optimizer_ns


class _IterationCounter:
    """Adds one iteration's actions and messages to a survey."""

    def __init__(self, result: RankSurvey, iteration: Iteration) -> None:
        self._result = result
        self._iteration = iteration
        self._open_action: ActionKey | None = None
        """The last action, until the next activity."""
        self._begin_ns = 0
        self._end_ns = 0
        """Start and end of the last action or of its pair."""
        self._awaited: set[tuple[object, ...]] = set()
        """Keys of the messages that the rank has waited for."""

    def count(self) -> None:
        """Add all actions and messages to the survey."""
        number = self._iteration.number
        lengths = self._iteration.figures.get("lengths", {})
        for microbatch, (tokens, sum_of_squares) in lengths.items():
            size = MicrobatchSize(tokens, sum_of_squares)
            self._result.lengths[number, int(microbatch)] = size
        for span in self._iteration.spans:
            if span.name in _KINDS:
                self._add_action(span)
            elif span.name == "send":
                begin_ns = self._iteration.begin_ns + span.begin_ns
                self._result.sends[span.message] = begin_ns
            elif span.name == "receive":
                self._close_action(span.begin_ns)
                self._add_receive(span)
            elif span.name == "wait":
                self._close_action(span.begin_ns)
                self._add_wait(span)
        self._close_action(self._end_ns)
        self._add_exchanges()
        self._result.num_sampled += 1

    def _add_action(self, span: Span) -> None:
        stage = span.attributes["stage"]
        microbatch = span.attributes["microbatch"]
        slice_index = span.attributes.get("slice", 0)
        place = stage, self._iteration.number, microbatch, slice_index
        self._result.microbatch_ns[place] += span.end_ns - span.begin_ns
        # Only a pair's second action starts before the midpoint of the
        # preceding action. The two run at the same time, so neither duration
        # is the cost of its action.
        if 2 * span.begin_ns < self._begin_ns + self._end_ns:
            self._open_action = None
            self._end_ns = max(self._end_ns, span.end_ns)
            return
        self._close_action(span.begin_ns)
        self._open_action = ActionKey(span.name, stage, slice_index)
        self._begin_ns = span.begin_ns
        self._end_ns = span.end_ns

    def _close_action(self, next_ns: int) -> None:
        """Record the cost of the last action, which lasts until the rank's next activity."""
        if self._open_action is not None:
            price_ns = max(next_ns, self._end_ns) - self._begin_ns
            self._result.actions[self._open_action].append(price_ns)
            self._open_action = None

    def _add_receive(self, span: Span) -> None:
        source = span.attributes["from"]
        link = self._link(source)
        link.messages += 1
        link.bytes += span.attributes["bytes"]
        is_awaited = self._message(source, span) in self._awaited
        end_ns = self._iteration.begin_ns + span.end_ns
        # F and B messages carry activations and gradients.
        was_late = is_awaited and span.attributes["for"] in ("F", "B")
        self._result.receives[span.message] = Receive(source, end_ns, was_late)

    def _add_wait(self, span: Span) -> None:
        source = span.attributes.get("on")
        # A wait for a slot has no single source rank, because any of
        # several ranks may free one.
        if source is not None:
            self._link(source).waited_ns += span.end_ns - span.begin_ns
            self._awaited.add(self._message(source, span))

    def _link(self, source: int) -> Link:
        return self._result.links.setdefault(
            source, Link(source, self._result.header.rank)
        )

    def _message(self, source: int, span: Span) -> tuple[object, ...]:
        """Return a key that identifies a message within this iteration."""
        attributes = span.attributes
        values = [
            attributes.get(name) for name in ("for", "stage", "microbatch", "slice")
        ]
        return source, *values

    def _add_exchanges(self) -> None:
        """Add all token exchanges and the time that each forward pass spent in them."""
        exchanged_ns: dict[tuple[int, int], int] = defaultdict(int)
        num_exchanges: Counter[tuple[str, int, int, int]] = Counter()
        for span in self._iteration.spans:
            if span.name != "exchange":
                continue
            took_ns = span.end_ns - span.begin_ns
            kind = span.attributes["of"]
            stage = span.attributes["stage"]
            microbatch = span.attributes["microbatch"]
            layer = span.attributes.get("layer", 0)
            of_layer = kind, stage, microbatch, layer
            number = num_exchanges[of_layer]
            num_exchanges[of_layer] += 1
            key = ExchangeKey(self._iteration.number, *of_layer, number)
            self._result.exchange_ns[key] = took_ns
            # `Costs.all_to_all` is a share of the forward pass.
            if kind == "F":
                exchanged_ns[stage, microbatch] += took_ns
        for (stage, _), took_ns in exchanged_ns.items():
            self._result.exchanges[stage].append(took_ns)


def figures(surveys: Iterable[RankSurvey]) -> Step:
    """Summarise the complete steps of the given ranks.

    Durations are medians. The parts of a step are means, and the longest wait comes first. Memory
    and activations are from the worst step. Action counts are sums.
    """
    steps: list[Step] = []
    for rank in surveys:
        steps += rank.complete_steps
    # A rank that died during its first step has no steps.
    if not steps:
        steps = [Step()]
    idle_ns: dict[str, float] = defaultdict(float)
    for step in steps:
        # A step without this cause counts as 0, so divide by the total number of steps.
        for cause, time_ns in step.idle_ns.items():
            idle_ns[cause] += time_ns / len(steps)
    longest_first = sorted(idle_ns.items(), key=lambda item: -item[1])
    return Step(
        duration_ns=statistics.median(step.duration_ns for step in steps),
        pipeline_ns=statistics.median(step.pipeline_ns for step in steps),
        # The parts are means, because medians would not add up to a step.
        busy_ns=statistics.fmean(step.busy_ns for step in steps),
        idle_ns=dict(longest_first),
        after_ns=statistics.fmean(step.after_ns for step in steps),
        memory_bytes=max(step.memory_bytes for step in steps),
        peak_live=max(step.peak_live for step in steps),
        actions=sum(step.actions for step in steps),
        out_of_order=sum(step.out_of_order for step in steps),
        activation_bytes=max(step.activation_bytes for step in steps),
    )


def text(surveys: Sequence[RankSurvey]) -> str:
    """Return a run's figures as text: for all ranks together, then for each rank."""
    total = figures(surveys)
    num_spans = sum(survey.num_spans for survey in surveys)
    num_iterations = max(survey.num_iterations for survey in surveys)
    jumped_percent = 100 * total.out_of_order / max(1, total.actions)
    lines = [f"{len(surveys)} ranks, {num_iterations} iterations, {num_spans} spans"]
    lines.append(
        f"step {total.duration_ns / 1e6:.1f} ms, bubble {100 * total.bubble_ratio:.1f} % of the "
        f"pipeline's time, {jumped_percent:.1f} % of the actions out of order"
    )
    # One line per rank, with its three longest causes of waiting.
    for survey in surveys[:_MAX_LINES]:
        rank = figures([survey])
        longest_waits = list(rank.idle_ns.items())[:3]
        causes = []
        for cause, time_ns in longest_waits:
            causes.append(f"{cause} {time_ns / 1e6:.1f} ms")
        lines.append(
            f"  {survey.header.label}: busy {rank.busy_ns / 1e6:.1f} ms; "
            f"{', '.join(causes) or 'never idle'}; "
            f"peak memory {rank.memory_bytes / 2**30:.2f} GiB"
        )
    if len(surveys) > _MAX_LINES:
        lines.append(f"  and {len(surveys) - _MAX_LINES} more ranks")
    return "\n".join(lines)
