"""GPipe: all forward passes, then all backward passes.

This is the simplest pipeline and needs the most memory, because all micro-batches' activations are
alive at the end of the last forward pass.

Paper: Huang et al., GPipe, 2019 (arXiv 1811.06965).

gpipe: pp 4, m 4, makespan 21, bubble 9 (42.9 %), peak 4
0|F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
1|.  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
2|.  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
3|.  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .

Bubble: (pp - 1)(Tf + Tb + Tw), the same as for 1F1B. Activations: m on every rank. Gradients are
summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import passes
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Schedule


@register("gpipe")
def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """Return GPipe's table."""
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(pp):
        forwards = passes(rank, "F", microbatches)
        backwards = passes(rank, "B", microbatches)
        # Backward passes run in ascending micro-batch order, as in 1F1B, so gradients are summed in
        # the same order as without a pipeline.
        rows.append((*forwards, *backwards))
    return Schedule(
        "gpipe",
        placement.linear(pp),
        num_microbatches,
        tuple(rows),
    )
