"""1F1B: every micro-batch starts its backward pass early, which frees its activations.

Rank r runs pp - 1 - r forward passes first, then alternates between one forward pass and one
backward pass. The bubble is the same as GPipe's, but the pipeline depth bounds the number of live
activations. This is Megatron's schedule without interleaving.

Paper: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021 (arXiv 2006.09503).

1f1b: pp 4, m 4, makespan 21, bubble 9 (42.9 %), peak 4
0|F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
1|.  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3--- .  .
2|.  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .  .  .
3|.  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .  .  .

Bubble: (pp - 1)(Tf + Tb + Tw). Activations: min(pp - rank, m).
Gradients are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import alternate, passes
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Schedule


@register("1f1b")
def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """Return 1F1B's table."""
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(pp):
        forwards = passes(rank, "F", microbatches)
        backwards = passes(rank, "B", microbatches)
        # Run one forward pass for every rank below this one. By then, the first
        # gradient is on its way back.
        below = pp - 1 - rank
        warm_up = min(below, num_microbatches)
        row = alternate(forwards, backwards, warm_up)
        rows.append(row)
    return Schedule(
        "1f1b",
        placement.linear(pp),
        num_microbatches,
        tuple(rows),
    )
