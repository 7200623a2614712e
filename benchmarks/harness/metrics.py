"""Computes figures from all ranks' records.

The *replay* keeps the order in which each rank ran its ops and starts every op as early as
possible: as soon as its rank is free and its inputs exist, with messages that take no time. With
the recorded durations, its time shows the overhead of the runtime and messages (both times contain
the noise of the ops). With the nominal durations, it shows the quality of the order.
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
"""(F or B, stage, micro-batch, twin) -> the time at which this tensor becomes available."""


@dataclass(frozen=True)
class Figures:
    """One system's figures. Activations are in units of one micro-batch on 1/pp of the model.

    Lists have one item per draw of the ops' times, from the draw's shortest repetition, because
    other load only adds time. Without draws, every step counts as a draw.
    """

    seconds: list[float]
    """Step time, from when the first rank starts to when the last rank ends."""
    peak_of_order: float
    """Activations that the order must keep on the worst rank, from F to B or W, counted in slices
    if the table is sliced."""
    order_s: list[float] = field(default_factory=list)
    """Time of the order that ran, with exact ops and messages that take no time."""
    overheads: list[float] = field(default_factory=list)
    """Step time divided by the time of that order with the measured ops, minus 1: the overhead of
    the runtime and messages."""
    op_inflation: float = 0.0
    """Recorded time of ops divided by their nominal time, minus 1."""
    peak_live: float = 0.0
    """Maximum number of activations alive at once, on the worst rank."""
    cpu_s: float = 0.0
    """Mean processor time per rank, as the median over the steps."""
    num_ops: int = 0
    """Largest number of ops on a rank in one step."""
    hops: float = 0.0
    """Number of messages on the longest path of the order that ran; each adds a latency to it."""
    gap_s: float = 0.0
    """Median time from the end of an op to the start of the rank's next op, if its input was
    ready."""
    hop_s: float = 0.0
    """Median time from the end of an op to the start of an op that waits for it on another rank."""
    waits_per_action: float = 0.0
    """How often a host waited for its device, per action."""

    @property
    def median_s(self) -> float:
        """Median step time."""
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
        steps: By rank of the world, then by step: all draws, once per repetition.
        placement: Where the stages are. Rank r of pipeline t is rank `r * twins + t` of the world.
        draws: Nominal times of the ops in each draw.
    """
    totals = _Totals()
    timings_of_draws: list[list[_Timing]] = [[] for _ in draws]
    ranks_of_steps = list(zip(*steps, strict=True))
    for position, ranks in enumerate(ranks_of_steps):
        number = position % len(draws)
        timing = totals.add(ranks, placement, draws[number])
        timings_of_draws[number].append(timing)
    # Take the shortest repetition of each draw: tuples compare by step time first.
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
    """One step's times, as in `Figures`."""

    step_s: float
    order_s: float
    overhead: float


@dataclass
class _Totals:
    """Sums, maxima and samples over all steps of a measurement, see `Figures`."""

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
        """Add all ranks' records of a step whose ops had a draw's nominal times."""
        rows = [step.ops for step in ranks]
        order_s = replay(rows, placement, draw.of)
        replay_s = replay(rows, placement, lambda op: op.duration_s)
        # A latency that is too small to change the longest path lengthens the
        # order by one latency per hop.
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
        """Add the gaps between a rank's ops, and between ops and their inputs from other ranks."""
        ends_s: _Made = {}
        for rank, row in enumerate(rows):
            for op in row:
                if op.kind != "W":
                    ends_s[_made_by(op, rank % placement.twins)] = op.end_s
        for rank, row in enumerate(rows):
            for previous, op in pairwise(row):
                ready_s = _ready(op, rank % placement.twins, placement, ends_s, 0.0)
                assert ready_s is not None
                # If an op's input arrived before its rank was free, the
                # gap is the runtime's time.
                if ready_s <= previous.end_s:
                    self.gaps_s.append(op.begin_s - previous.end_s)
                else:
                    self.hops_s.append(op.begin_s - ready_s)


def seconds_of(ranks: Sequence[Step]) -> float:
    """Return the step time, from when the first rank starts to when the last rank ends."""
    return max(step.end_s for step in ranks) - min(step.begin_s for step in ranks)


def peak(row: Sequence[Op]) -> int:
    """Return the maximum number of activations that an order of ops keeps, from F to B or W."""
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
        duration_s: Returns an op's duration.
        latency_s: Time from the end of an op to the start of an op that waits for it on another
            rank.

    Raises:
        ValueError: The order is impossible, so the record is wrong.
    """
    ready_s: _Made = {}
    position = [0] * len(rows)
    now = [0.0] * len(rows)
    # Advance every rank as far as its inputs allow, until no rank makes progress.
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
    """Return the time at which an op's input becomes available, or None."""
    source = placement.source(op.stage, op.kind)
    if source is None:
        return 0.0
    hop = placement.hops[min(source, op.stage)]
    kind = "F" if op.kind == "F" else "B"
    end_s = ready_s.get((kind, source, op.microbatch, twin ^ (hop == "twin")))
    return end_s if end_s is None or hop == "local" else end_s + latency_s
