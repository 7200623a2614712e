"""Figures from the records of all ranks.

The *replay* keeps the order in which each rank ran its ops and starts every op as early as
possible: when its rank is free and its inputs exist, with free messages. Its time with the recorded
durations shows the overhead of runtime and messages (both contain the noise of the ops); with the
nominal durations it shows the quality of the order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from megatron_ext.schedules import Placement

from .ops import Op, OpTimes, Step

_Made = dict[tuple[str, int, int, int], float]
"""(F or B, stage, micro-batch, twin) -> the time from which this tensor exists."""


@dataclass(frozen=True)
class Figures:
    """The figures of one system; the unit of activations is one micro-batch on 1/pp of the model.

    Lists have one item per draw of the ops' times, from the draw's shortest repetition, since other
    load only adds time. Without draws, each step counts as a draw.
    """

    seconds: list[float]
    """Time of the step, from the start of its first rank to the end of its last rank."""
    peak_of_order: float
    """Activations that the order must keep on the worst rank, from F to B or W; in a sliced table,
    counted in slices."""
    order_s: list[float] = field(default_factory=list)
    """Time of the order that ran, with exact ops and free messages."""
    overheads: list[float] = field(default_factory=list)
    """The time of the step divided by the time of that order with the measured ops, minus 1: the
    overhead of runtime and messages."""
    op_inflation: float = 0.0
    """Time recorded in ops divided by their nominal time, minus 1."""
    peak_live: float = 0.0
    """Most activations alive at once, on the worst rank."""
    cpu_s: float = 0.0
    """Median over the steps of the mean processor time of a rank."""
    num_ops: int = 0
    """Largest number of ops of a rank in one step."""
    hops: float = 0.0
    """Messages on the longest path of the order that ran, which grows by that many latencies."""
    gap_s: float = 0.0
    """Median time from the end of an op to the start of the rank's next op, if its input was
    ready."""
    hop_s: float = 0.0
    """Median time from the end of an op to the start of an op waiting for it on another rank."""
    waits_per_action: float = 0.0
    """How often a host waited for its device, per action."""

    @property
    def median_s(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    @property
    def optimum_s(self) -> float:
        """Median time of the order that ran, with exact ops."""
        return statistics.median(self.order_s)


def evaluate(
    steps: Sequence[Sequence[Step]], placement: Placement, draws: Sequence[OpTimes]
) -> Figures:
    """Return the figures of a measurement.

    Args:
        steps: By rank of the world, then by step: all draws, repeated for each repetition.
        placement: Where the stages are; rank r of pipeline t is rank `r * twins + t` of the world.
        draws: Nominal times of the ops in each draw.
    """
    totals = _Totals()
    timings_of_draws: list[list[_Timing]] = [[] for _ in draws]
    ranks_of_steps = list(zip(*steps, strict=True))
    for position, ranks in enumerate(ranks_of_steps):
        number = position % len(draws)
        timing = totals.add(ranks, placement, draws[number])
        timings_of_draws[number].append(timing)
    # Take the shortest repetition of each draw: tuples compare first by the time of the step.
    shortest = [min(timings) for timings in timings_of_draws]
    return Figures(
        seconds=[timing.step_s for timing in shortest],
        peak_of_order=totals.peak_of_order,
        order_s=[timing.order_s for timing in shortest],
        overheads=[timing.overhead for timing in shortest],
        op_inflation=totals.spent_s / totals.nominal_s - 1,
        peak_live=totals.peak_live,
        cpu_s=statistics.median(totals.cpu_s),
        num_ops=max(len(step.ops) for step in ranks_of_steps[0]),
        hops=statistics.median(totals.hops),
        gap_s=statistics.median(totals.gaps_s or [0.0]),
        hop_s=statistics.median(totals.hops_s or [0.0]),
        waits_per_action=totals.host_waits / totals.num_ops,
    )


class _Timing(NamedTuple):
    """The times of one step, as in `Figures`."""

    step_s: float
    order_s: float
    overhead: float


@dataclass
class _Totals:
    """Sums, maxima and samples over all steps of a measurement; see `Figures`."""

    spent_s: float = 0.0
    nominal_s: float = 0.0
    peak_live: float = 0.0
    peak_of_order: float = 0.0
    host_waits: int = 0
    num_ops: int = 0
    hops: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    hops_s: list[float] = field(default_factory=list)

    def add(
        self, ranks: Sequence[Step], placement: Placement, draw: OpTimes
    ) -> _Timing:
        """Add a step of all ranks, whose ops had the nominal times of a draw."""
        rows = [step.ops for step in ranks]
        order_s = replay(rows, placement, draw.of)
        replay_s = replay(rows, placement, lambda op: op.duration_s)
        # A latency too small to change the longest path lengthens the order by one latency per hop.
        latency_s = 1e-6 * draw.forward_s
        with_latency_s = replay(rows, placement, draw.of, latency_s)
        self.hops.append(round((with_latency_s - order_s) / latency_s))
        for step in ranks:
            self.spent_s += sum(op.duration_s for op in step.ops)
            self.nominal_s += sum(draw.of(op) for op in step.ops)
            self.peak_live = max(self.peak_live, draw.share * step.peak_live)
            self.peak_of_order = max(self.peak_of_order, draw.share * peak(step.ops))
            self.host_waits += step.host_waits
            self.num_ops += len(step.ops)
        self.cpu_s.append(statistics.mean(step.cpu_s for step in ranks))
        self._add_gaps(rows, placement)
        first_s = min(op.begin_s for row in rows for op in row)
        last_s = max(op.end_s for row in rows for op in row)
        return _Timing(seconds_of(ranks), order_s, (last_s - first_s) / replay_s - 1)

    def _add_gaps(self, rows: Sequence[Sequence[Op]], placement: Placement) -> None:
        """Add the gaps between ops on a rank, and between an op and its input from another rank."""
        ends_s: _Made = {}
        for rank, row in enumerate(rows):
            for op in row:
                if op.kind != "W":
                    ends_s[_made_by(op, rank % placement.twins)] = op.end_s
        for rank, row in enumerate(rows):
            for previous, op in pairwise(row):
                ready_s = _ready(op, rank % placement.twins, placement, ends_s, 0.0)
                assert ready_s is not None
                # If an op's input arrived before its rank was free, the gap is the runtime's time.
                if ready_s <= previous.end_s:
                    self.gaps_s.append(op.begin_s - previous.end_s)
                else:
                    self.hops_s.append(op.begin_s - ready_s)


def seconds_of(ranks: Sequence[Step]) -> float:
    """Return the time of a step, from the start of its first rank to the end of its last rank."""
    return max(step.end_s for step in ranks) - min(step.begin_s for step in ranks)


def peak(row: Sequence[Op]) -> int:
    """Return the most activations that an order of ops keeps: from F to B or W."""
    live = highest = 0
    for op in row:
        live += {"F": 1, "I": 0}.get(op.kind, -1)
        highest = max(highest, live)
    return highest


def replay(
    rows: Sequence[Sequence[Op]],
    placement: Placement,
    duration_s: Callable[[Op], float],
    latency_s: float = 0.0,
) -> float:
    """Return the makespan of an order of ops.

    Args:
        rows: By rank of the world: the ops in the order in which they ran.
        placement: Where the stages are.
        duration_s: The time of an op.
        latency_s: Time from the end of an op to the start of an op waiting for it on another rank.

    Raises:
        ValueError: The order is impossible, so the record is wrong.
    """
    ready_s: _Made = {}
    position = [0] * len(rows)
    now = [0.0] * len(rows)
    # Advance each rank as far as inputs exist, until no rank gets any further.
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            twin = rank % placement.twins
            while position[rank] < len(row):
                op = row[position[rank]]
                ready = _ready(op, twin, placement, ready_s, latency_s)
                if ready is None:
                    break
                now[rank] = max(now[rank], ready) + duration_s(op)
                if op.kind != "W":
                    ready_s[_made_by(op, twin)] = now[rank]
                position[rank] += 1
                progress = True
    for rank, row in enumerate(rows):
        if position[rank] < len(row):
            raise ValueError(
                f"rank {rank} ran {row[position[rank]]} before what it needs"
            )
    return max(now)


def _made_by(op: Op, twin: int) -> tuple[str, int, int, int]:
    return "F" if op.kind == "F" else "B", op.stage, op.microbatch, twin


def _ready(
    op: Op, twin: int, placement: Placement, ready_s: _Made, latency_s: float
) -> float | None:
    """Return the time from which the input of an op exists, or None."""
    source = placement.source(op.stage, op.kind)
    if source is None:
        return 0.0
    hop = placement.hops[min(source, op.stage)]
    kind = "F" if op.kind == "F" else "B"
    end_s = ready_s.get((kind, source, op.microbatch, twin ^ (hop == "twin")))
    return end_s if end_s is None or hop == "local" else end_s + latency_s
