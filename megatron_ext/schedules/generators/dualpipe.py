"""DualPipe: two pipelines in opposite directions on the same ranks, each running half of the step.

Ranks r and pp-1-r hold the same two stages, so weights are stored twice, and gradients are reduced
across these twins at the end of the step. The table is DualPipeV's table for pp/2 ranks and runs
twice, once mirrored.

Paper: DeepSeek-V3 technical report, 2024 (arXiv 2412.19437).

dualpipe overlap=False: pp 4, m 8, makespan 25, bubble 1 (4.0 %), peak 5
0|F0 F1 F2 F4 I4 W4 F5 F3 B5--- F6 B0--- B6--- F7 .  B1--- B7--- I2 W2 I3 W3
1|.  F0 F4 F1 F5 F2 B4--- F6 B0--- F3 B5--- F7 B1--- B6--- B2--- I7 I3 W7 W3
2|.  F4 F0 F5 F1 F6 B0--- F2 B4--- F7 B1--- F3 B5--- B2--- B6--- I3 I7 W3 W7
3|F4 F5 F6 F0 I0 W0 F1 F7 B1--- F2 B4--- B2--- F3 .  B5--- B3--- I6 W6 I7 W7

Bubble: (pp/2 - 1)Tf for m >= 2pp at Tf = Tb = Tw. Activations: pp + 1 on every rank. Both pp and m
must be even. Each direction sums its gradients in micro-batch order. The gradients are then reduced
across the twins, just as across data-parallel ranks.
"""

from __future__ import annotations

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.dualpipe_v import step_lists
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Schedule


@register(
    "dualpipe",
    num_chunks=2,
    alternates=True,
    twins=2,
)
def dualpipe(pp: int, num_microbatches: int) -> Schedule:
    """Return the table for one of DualPipe's two mirrored pipelines."""
    # The table covers one of the two pipelines. The other runs the same rows, mirrored.
    num_ranks = pp // 2
    m = num_microbatches // 2
    one_way = placement.v(num_ranks)
    folded = placement.mirrored(one_way, "twin")
    rows = step_lists(num_ranks, m)
    return Schedule(
        "dualpipe",
        folded,
        m,
        rows,
        options={"overlap": False},
    )
