"""ZB-H1: only input gradients are urgent; weight gradients fill the bubble.

This is 1F1B with the backward pass split into I, which the previous stage waits for, and W, which
no rank waits for. F and I run in 1F1B's order. W runs when memory requires it, and otherwise at the
end of the step, where 1F1B would idle.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241).

zb-h1: pp 4, m 4, makespan 15, bubble 3 (20.0 %), peak 4
0|F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
1|.  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
2|.  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
3|.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

Bubble: (pp - 1) max(Tf, Tb, Tf + Tb - Tw) for m >= pp. Activations: min(pp, m) on every rank.
Gradients are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import alternate, passes
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Action, Row, Schedule


@register("zb-h1")
def zb_h1(pp: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1's table."""
    rows = []
    for rank in range(pp):
        rows.append(_row(rank, pp, num_microbatches))
    return Schedule(
        "zb-h1",
        placement.linear(pp),
        num_microbatches,
        tuple(rows),
    )


def _row(
    rank: int,
    pp: int,
    num_microbatches: int,
) -> Row:
    """Return 1F1B's order, with W after I if memory requires it or no forward pass is left."""
    microbatches = range(num_microbatches)
    forwards = passes(rank, "F", microbatches)
    inputs = passes(rank, "I", microbatches)
    below = pp - 1 - rank
    warm_up = min(below, num_microbatches)
    row: list[Action] = []
    num_forwards = 0
    num_weights = 0
    for action in alternate(forwards, inputs, warm_up):
        row.append(action)
        if action.kind == "F":
            num_forwards += 1
            continue
        # A stage keeps activations for at most pp micro-batches.
        is_full = num_forwards - num_weights >= pp
        # After the last forward pass, W delays nothing urgent.
        is_draining = num_forwards == num_microbatches
        if is_full or is_draining:
            row.append(Action(rank, "W", num_weights))
            num_weights += 1
    # The remaining W actions fill the end of the step, where 1F1B idles.
    remaining = microbatches[num_weights:]
    row += passes(rank, "W", remaining)
    return tuple(row)
