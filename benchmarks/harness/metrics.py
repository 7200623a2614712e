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

from megatron_ext.schedules import Placement

from .ops import Op, OpTimes, Step

_Made = dict[tuple[str, int, int, int], float]
"""F or B, stage, micro-batch, twin -> since when that exists."""


@dataclass(frozen=True)
class Figures:
    """The figures of one system; activations in those of one micro-batch on 1/pp of the model.

    Lists have one item for each draw of the times of ops, that of its shortest repetition: other
    load only adds time. Without draws, each step is one.
    """

    seconds: list[float]
    """Of the step, from its first rank's begin to its last rank's end."""
    peak_of_order: float
    """Activations that the order must keep on the worst rank, from F to B or W; in a sliced table
    those of slices."""
    order_s: list[float] = field(default_factory=list)
    """Time of the order that ran, with exact ops and free messages."""
    overheads: list[float] = field(default_factory=list)
    """Last end - first begin over the time of that order with the ops as they were, minus 1: what
    runtime and messages added."""
    op_inflation: float = 0.0
    """Time recorded in ops over the time that they should take, minus 1."""
    peak_live: float = 0.0
    """Activations that were alive at once, at most, on the worst rank."""
    cpu_s: float = 0.0
    """Median over the steps of the mean processor time of a rank."""
    num_ops: int = 0
    """Most ops of a rank in one step."""
    hops: float = 0.0
    """Messages on the longest path of the order that ran: so many latencies make it longer."""
    gap_s: float = 0.0
    """Median from the end of an op to the start of the next of its rank, whose input was there."""
    hop_s: float = 0.0
    """Median from the end of an op to the start of one that waits for it on another rank."""
    waits_per_action: float = 0.0
    """How often a host waited for its device, for each action."""

    @property
    def median_s(self) -> float:
        """Median step."""
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
        steps: By rank of the world, then by step: all draws, and again for each repetition.
        placement: Where the stages are; rank r of pipeline t is rank `r * twins + t` of the world.
        draws: What the ops should have taken in each draw.
    """
    by_step = list(zip(*steps, strict=True))
    by_draw: list[list[tuple[float, ...]]] = [[] for _ in draws]
    every = [step for ranks in by_step for step in ranks]
    spent_s = nominal_s = live = most = 0.0
    gaps_s, hops_s, hops = list[float](), list[float](), list[float]()
    for position, ranks in enumerate(by_step):
        draw, rows = draws[position % len(draws)], [step.ops for step in ranks]
        order_s = replay(rows, placement, draw.of)
        replay_s = replay(rows, placement, lambda op: op.duration_s)
        # Compared as tuples below: the time of the step comes first.
        ops = [op for row in rows for op in row]
        span_s = max(op.end_s for op in ops) - min(op.begin_s for op in ops)
        took = seconds_of(ranks), order_s, span_s / replay_s - 1
        by_draw[position % len(draws)].append(took)
        # A latency too small to change the longest path makes the order longer by one for each hop.
        little_s = 1e-6 * draw.forward_s
        hops.append(round((replay(rows, placement, draw.of, little_s) - order_s) / little_s))
        spent_s += sum(op.duration_s for op in ops)
        nominal_s += sum(map(draw.of, ops))
        live = max(live, draw.share * max(step.peak_live for step in ranks))
        most = max(most, draw.share * max(map(peak, rows)))
        made = {_made_by(op, r % placement.twins): op.end_s for r, row in enumerate(rows)
                for op in row if op.kind != "W"}  # fmt: skip
        for r, row in enumerate(rows):
            for before, op in pairwise(row):
                ready_s = _ready(op, r % placement.twins, placement, made, 0.0)
                assert ready_s is not None
                # An op whose input came before its rank was free tells what the runtime takes.
                if ready_s <= before.end_s:
                    gaps_s.append(op.begin_s - before.end_s)
                else:
                    hops_s.append(op.begin_s - ready_s)
    seconds, orders_s, overheads = map(list, zip(*map(min, by_draw), strict=True))
    return Figures(
        seconds=seconds,
        peak_of_order=most,
        order_s=orders_s,
        overheads=overheads,
        op_inflation=spent_s / nominal_s - 1,
        peak_live=live,
        cpu_s=statistics.median(statistics.mean(s.cpu_s for s in ranks) for ranks in by_step),
        num_ops=max(len(step.ops) for step in by_step[0]),
        hops=statistics.median(hops),
        gap_s=statistics.median(gaps_s or [0.0]),
        hop_s=statistics.median(hops_s or [0.0]),
        waits_per_action=sum(step.host_waits for step in every)
        / sum(len(step.ops) for step in every),
    )


def seconds_of(ranks: Sequence[Step]) -> float:
    """Return the time of a step, from its first rank's begin to its last rank's end."""
    return max(step.end_s for step in ranks) - min(step.begin_s for step in ranks)


def peak(row: Sequence[Op]) -> int:
    """Return the most activations that an order of ops keeps: from F to B or W."""
    live = most = 0
    for op in row:
        live += {"F": 1, "I": 0}.get(op.kind, -1)
        most = max(most, live)
    return most


def replay(
    rows: Sequence[Sequence[Op]],
    placement: Placement,
    duration_s: Callable[[Op], float],
    latency_s: float = 0.0,
) -> float:
    """Return the makespan of an order of ops.

    Args:
        rows: By rank of the world, the ops in the order in which they ran.
        placement: Where the stages are.
        duration_s: The time of an op.
        latency_s: From the end of an op to the start of one that waits for it on another rank.

    Raises:
        ValueError: The order is impossible, so the record is wrong.
    """
    made: _Made = {}
    position, now = [0] * len(rows), [0.0] * len(rows)
    # Rank after rank as far as inputs exist, until nobody gets further.
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            twin = rank % placement.twins
            while position[rank] < len(row):
                op = row[position[rank]]
                ready = _ready(op, twin, placement, made, latency_s)
                if ready is None:
                    break
                now[rank] = max(now[rank], ready) + duration_s(op)
                if op.kind != "W":
                    made[_made_by(op, twin)] = now[rank]
                position[rank] += 1
                progress = True
    for rank, row in enumerate(rows):
        if position[rank] < len(row):
            raise ValueError(f"rank {rank} ran {row[position[rank]]} before what it needs")
    return max(now)


def _made_by(op: Op, twin: int) -> tuple[str, int, int, int]:
    return "F" if op.kind == "F" else "B", op.stage, op.microbatch, twin


def _ready(op: Op, twin: int, placement: Placement, made: _Made, latency_s: float) -> float | None:
    """Return since when the input of an op exists, or None."""
    source = placement.source(op.stage, op.kind)
    if source is None:
        return 0.0
    hop = placement.hops[min(source, op.stage)]
    what = "F" if op.kind == "F" else "B"
    end_s = made.get((what, source, op.microbatch, twin ^ (hop == "twin")))
    return end_s if end_s is None or hop == "local" else end_s + latency_s
