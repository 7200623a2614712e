"""Figures from the records of all ranks.

The *replay* keeps the order in which each rank ran its ops and starts every op as early as
possible: when its rank is free and its inputs exist, with free messages. Its time with the recorded
durations shows the overhead of runtime and messages (both contain the noise of the ops); with the
nominal durations it shows the quality of the order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.schedules import Placement

    from .ops import Op, OpTimes, Step

__all__ = ["Draws", "Figures", "draws_of", "evaluate", "overhead", "peak", "replay"]

_Made = dict[tuple[str, int, int, int], float]
"""F or B, stage, micro-batch, twin -> since when that exists."""


@dataclass(frozen=True)
class Figures:
    """The figures of one system; activations in those of one micro-batch on 1/pp of the model."""

    median_s: float
    """Of the steps, each from its first rank's begin to its last rank's end."""
    min_s: float
    max_s: float
    ideal_s: float
    """The largest sum of op times of a rank."""
    optimum_s: float
    """Time of the order that ran with exact op times and free messages."""
    replay_s: float
    """Median over the steps of what it would take with the op times as they were."""
    replay_overhead: float
    """Median of (last end - first begin) / replay with the recorded durations, minus 1."""
    min_replay_overhead: float
    """The same of the step that was disturbed least."""
    op_inflation: float
    """Time recorded in ops over the time that they sleep, minus 1."""
    peak_live: float
    """Activations that were alive at once, at most, on the worst rank."""
    peak_of_order: float
    """Activations that the order must keep: from F to B or W."""
    cpu_s: float
    """Median over the steps of the mean processor time of a rank."""
    num_ops: int
    """Most ops of a rank in one step."""
    hops: float
    """Messages on the longest path of the order that ran: so many latencies make it longer."""
    gap_s: float
    """Median from the end of an op to the start of the next of its rank, whose input was there."""
    hop_s: float
    """Median from the end of an op to the start of one that waits for it on another rank."""

    @property
    def ratio(self) -> float:
        """Median time over ideal."""
        return self.median_s / self.ideal_s

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for `--json`."""
        return {**asdict(self), "ratio": self.ratio}


def evaluate(steps: Sequence[Sequence[Step]], placement: Placement, times: OpTimes) -> Figures:
    """Return the figures of a measurement.

    Args:
        steps: By rank of the world, then by step.
        placement: Where the stages are; rank r of pipeline t is rank `r * twins + t` of the world.
        times: What the ops slept.
    """
    by_step = list(zip(*steps, strict=True))
    rows = [[step.ops for step in ranks] for ranks in by_step]
    ops = [op for ranks in rows for row in ranks for op in row]
    seconds = [_seconds(ranks) for ranks in by_step]
    replays = [replay(ranks, placement, lambda op: op.duration_s) for ranks in rows]
    overheads = [_span(ranks) / found - 1 for ranks, found in zip(rows, replays, strict=True)]
    # A latency too small to change the longest path makes the order longer by one for each hop.
    little_s = 1e-6 * times.forward_s
    optimum_s, later_s = (
        statistics.median(replay(ranks, placement, times.of, latency_s) for ranks in rows)
        for latency_s in (0.0, little_s)
    )
    gaps_s, hops_s = [0.0] * (not ops), list[float]()
    for ranks in rows:
        made = {_made_by(op, r % placement.twins): op.end_s for r, row in enumerate(ranks)
                for op in row if op.kind != "W"}  # fmt: skip
        for r, row in enumerate(ranks):
            for before, op in pairwise(row):
                ready_s = _ready(op, r % placement.twins, placement, made, 0.0)
                assert ready_s is not None
                # An op whose input came before its rank was free tells what the runtime takes.
                if ready_s <= before.end_s:
                    gaps_s.append(op.begin_s - before.end_s)
                else:
                    hops_s.append(op.begin_s - ready_s)
    return Figures(
        median_s=statistics.median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
        ideal_s=max(sum(map(times.of, row)) for row in rows[0]),
        optimum_s=optimum_s,
        replay_s=statistics.median(replays),
        replay_overhead=statistics.median(overheads),
        min_replay_overhead=min(overheads),
        op_inflation=sum(op.duration_s for op in ops) / sum(map(times.of, ops)) - 1,
        peak_live=times.share * max(step.peak_live for ranks in by_step for step in ranks),
        peak_of_order=times.share * max(peak(row) for ranks in rows for row in ranks),
        cpu_s=statistics.median(statistics.mean(s.cpu_s for s in ranks) for ranks in by_step),
        num_ops=max(len(row) for row in rows[0]),
        hops=round((later_s - optimum_s) / little_s) if little_s else 0,
        gap_s=statistics.median(gaps_s or [0.0]),
        hop_s=statistics.median(hops_s or [0.0]),
    )


@dataclass
class Draws:
    """One system at several draws of the times of its ops.

    Lists have one item for each draw, that of its shortest repetition: other load only adds time.
    """

    seconds: list[float]
    """Of the step, from its first rank's begin to its last rank's end."""
    peak: float
    """Activations that the order keeps at most, in those of a micro-batch on 1/pp of the model."""
    order_s: list[float] = field(default_factory=list)
    """Time of the order that ran, with exact ops and free messages."""
    overheads: list[float] = field(default_factory=list)
    """Share of that order, with its ops as they were, that runtime and messages added."""
    op_inflation: float = 0.0
    """Time in ops over the time that they should take, minus 1."""


def draws_of(
    steps: Sequence[Sequence[Step]], placement: Placement, times: Sequence[OpTimes]
) -> Draws:
    """Return the figures of steps at several draws.

    Args:
        steps: By rank of the world, then by step: all draws, and again for each repetition.
        placement: Where the stages are.
        times: What ops should have taken, by draw.
    """
    by_draw: list[list[tuple[float, float, float]]] = [[] for _ in times]
    spent_s = nominal_s = most = 0.0
    for position, ranks in enumerate(zip(*steps, strict=True)):
        draw = times[position % len(times)]
        rows = [step.ops for step in ranks]
        ops = [op for row in rows for op in row]
        order_s = replay(rows, placement, draw.of)
        # Compared as tuples below: the time of the step comes first.
        took = _seconds(ranks), order_s, overhead(rows, placement)
        by_draw[position % len(times)].append(took)
        spent_s += sum(op.duration_s for op in ops)
        nominal_s += sum(map(draw.of, ops))
        most = max(most, draw.share * max(map(peak, rows)))
    seconds, orders_s, overheads = map(list, zip(*map(min, by_draw), strict=True))
    return Draws(seconds, most, orders_s, overheads, spent_s / nominal_s - 1)


def _seconds(ranks: Sequence[Step]) -> float:
    return max(step.end_s for step in ranks) - min(step.begin_s for step in ranks)


def _span(rows: Sequence[Sequence[Op]]) -> float:
    ops = [op for row in rows for op in row]
    return max(op.end_s for op in ops) - min(op.begin_s for op in ops)


def overhead(rows: Sequence[Sequence[Op]], placement: Placement) -> float:
    """Return what the runtime and its messages added to an order of ops, as a part of its time.

    Args:
        rows: By rank of the world, the ops in the order in which they ran.
        placement: Where the stages are.
    """
    return _span(rows) / replay(rows, placement, lambda op: op.duration_s) - 1


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
    if op.kind == "W":
        return 0.0  # its rank made the input
    source = op.stage - 1 if op.kind == "F" else op.stage + 1
    if not 0 <= source < placement.num_stages:
        return 0.0
    crosses = min(source, op.stage) in placement.twin_hops
    what = "F" if op.kind == "F" else "B"
    end_s = made.get((what, source, op.microbatch, twin ^ crosses))
    is_local = placement.hops[min(source, op.stage)] == "local"
    return end_s if end_s is None or is_local else end_s + latency_s
