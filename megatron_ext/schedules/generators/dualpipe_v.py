"""DualPipeV: DualPipe folded into a V, so that weights are stored once.

Forward passes on one chunk alternate with backward passes on the other, F B F B, so that an
executor can overlap one pass's communication with the other's computation. Backward passes are
split only while the pipeline fills and drains. In this table, forward and backward passes are
separate actions, each of which sends its result as soon as it finishes.

Code: deepseek-ai/DualPipe; idea: DeepSeek-V3 technical report, 2024 (arXiv 2412.19437).

dualpipe-v chunks=2 overlap=False: pp 4, m 8, makespan 25.5, bubble 1.5 (5.9 %), peak 4.5
0|F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3--- f4 B0--- b4--- f5 .  B1--- b5--- f6
1|.  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2--- f4 B0--- F7 b3--- f5 B1--- b4--- f6 .  B2-
2|.  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1--- f4 B0--- F6 b2--- f5 B1--- F7 b3--- f6 B2--- b4-
3|.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 F4 b0--- f4 B0--- F5 b1--- f5 B1--- F6 b2--- f6 B2--- F7 b3---

0|.  B2--- b6--- f7 .  B3--- b7--- I4 W4 I5 W5 I6 W6 I7 W7
1|-- b5--- f7 .  B3--- b6--- B4--- i7 I5 w7 I6 W5 I7 W6 W7
2|-- f7 .  B3--- b5--- B4--- b6--- I5 i7 I6 W5 I7 w7 W6 W7
3|f7 B3--- b4--- B4--- b5--- B5--- i6 I6 i7 I7 w6 W6 w7 W7

Bubble: (pp - 1)Tf / 2 for m >= 2pp at Tf = Tb = Tw. Activations: pp + 1/2 on every rank.
For fewer than 2pp micro-batches, the table for 2pp is generated and the surplus is removed.
Gradients are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import expand, shortened
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Row, Schedule


@register("dualpipe-v", num_chunks=2, alternates=True)
def dualpipe_v(pp: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV's table."""
    rows = step_lists(pp, num_microbatches)
    return Schedule(
        "dualpipe-v",
        placement.v(pp),
        num_microbatches,
        rows,
        options={"chunks": 2, "overlap": False},
    )


def step_lists(pp: int, num_microbatches: int) -> tuple[Row, ...]:
    """Return the published steps for all ranks, shortened for fewer than 2pp micro-batches."""
    published = max(num_microbatches, 2 * pp)
    rows = []
    for rank in range(pp):
        rows.append(_step_list(rank, pp, published))
    if published == num_microbatches:
        return tuple(rows)
    return shortened(rows, num_microbatches)


def _step_list(
    rank: int,
    pp: int,
    num_microbatches: int,
) -> Row:
    """Return the published steps for one rank, which runs at least 2pp micro-batches."""
    below = pp - 1 - rank
    half = (rank + 1) // 2
    stage_up = 2 * pp - 1 - rank
    # As in the published code, the number of full backward passes depends on whether
    # the rank is even or odd.
    turn = [("B1 B0", half)]
    if rank % 2:
        num_split = rank + 1 - half
    else:
        turn.append(("B1 I0", 1))
        num_split = rank - half
    turn.append(("I1 I0", num_split))
    phases = (
        # Steps 1 to 3 in the published code: forward passes fill the V, and the first I
        # actions run early.
        ("F0", 2 * below),
        ("F0 F1", rank + 1),
        ("I1 W F1", below),
        # Step 4, the steady phase: every forward pass is followed by a backward pass on
        # the other chunk.
        ("F0 B1 F1 B0", num_microbatches - 2 * pp + rank + 1),
        # Steps 5 to 8, the cool-down: from the second half of step 6 on, backward passes are split.
        ("B1 F1 B0", below),
        *turn,
        ("W I0", below),
        ("W", rank + 1),
    )
    return expand(phases, (rank, stage_up))
