"""Interleaved 1F1B: v model chunks per rank, so that the pipeline fills v times as fast.

Rank r holds stages r, pp + r, 2pp + r, ... Micro-batches circulate in groups of pp. The bubble is v
times smaller than 1F1B's, but v times as many messages are sent, and more activations are alive.
This is Megatron's order without the extra warm-up for overlapped communication.

Paper: Narayanan et al., Efficient Large-Scale Language Model Training, 2021 (arXiv 2104.04473).

interleaved chunks=2: pp 4, m 4, makespan 16.5, bubble 4.5 (27.3 %), peak 4
0|F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3---
1|.  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .
2|.  .  F0 F1 F2 F3 f0 f1 f2 .  b0--- f3 b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .  .  .
3|.  .  .  F0 F1 F2 F3 f0 b0--- f1 b1--- f2 b2--- f3 b3--- B0--- B1--- B2--- B3--- .  .  .  .  .  .

If pp does not divide m, the table is generated for whole groups, and the surplus micro-batches are
removed from the last group.

Bubble: (pp - 1)(Tf + Tb + Tw) / v for m = k pp.
Activations: min(m, (2(pp - 1) + (v - 1)pp + 1) / v) on rank 0.
Gradients are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

import math

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import alternate, passes, shortened
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Action, Row, Schedule


@register(
    "interleaved",
    num_chunks=2,
    free_chunks=True,
    variants=({"chunks": 2}, {"chunks": 4}),
    flags="--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank {chunks}",
)
def interleaved(
    pp: int,
    num_microbatches: int,
    num_chunks: int,
) -> Schedule:
    """Return the interleaved 1F1B table.

    Raises:
        ScheduleError: There is only one rank.
    """
    if pp < 2:
        raise ScheduleError("interleaved needs at least 2 ranks, got pp 1; use 1f1b")
    num_groups = math.ceil(num_microbatches / pp)
    in_whole_groups = num_groups * pp
    long_rows = []
    for rank in range(pp):
        long_row = _row(rank, pp, in_whole_groups, num_chunks)
        long_rows.append(long_row)
    rows = tuple(long_rows)
    if in_whole_groups > num_microbatches:
        rows = shortened(rows, num_microbatches)
    return Schedule(
        "interleaved",
        placement.loop(pp, num_chunks),
        num_microbatches,
        rows,
        options={"chunks": num_chunks},
    )


def _row(
    rank: int,
    pp: int,
    num_microbatches: int,
    num_chunks: int,
) -> Row:
    """Return the order for one rank. The number of micro-batches must be a multiple of pp."""
    num_stages = pp * num_chunks
    stages = range(rank, num_stages, pp)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, num_microbatches, pp):
        group = range(first, first + pp)
        for stage in stages:
            forwards += passes(stage, "F", group)
        for stage in reversed(stages):
            backwards += passes(stage, "B", group)
    # One round of pp forward passes per chunk except the last, plus two forward passes
    # per rank below. One of these two runs while the last chunk's first micro-batch
    # travels down the ranks, the other while its gradient travels back.
    below = pp - 1 - rank
    warm_up = 2 * below + (num_chunks - 1) * pp
    warm_up = min(warm_up, len(forwards))
    return alternate(forwards, backwards, warm_up)
