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
from megatron_ext.schedules.generators.patterns import alternate
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Action, Schedule


@register("zb-h1")
def zb_h1(pp: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1's table."""
    rows = tuple(_row(rank, pp, num_microbatches) for rank in range(pp))
    return Schedule("zb-h1", placement.linear(pp), num_microbatches, rows)


def _row(rank: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return 1F1B's order, with W after I if memory requires it or no forward pass is left."""
    forwards = [Action(rank, "F", i) for i in range(num_microbatches)]
    inputs = [Action(rank, "I", i) for i in range(num_microbatches)]
    row: list[Action] = []
    num_forwards = num_weights = 0
    for action in alternate(forwards, inputs, min(pp - 1 - rank, num_microbatches)):
        row.append(action)
        if action.kind == "F":
            num_forwards += 1
        # A stage keeps activations for at most pp micro-batches. After the last forward
        # pass, W delays nothing urgent.
        elif num_forwards - num_weights >= pp or num_forwards == num_microbatches:
            row.append(Action(rank, "W", num_weights))
            num_weights += 1
    # The remaining W actions fill the end of the step, where 1F1B idles.
    row += (Action(rank, "W", i) for i in range(num_weights, num_microbatches))
    return tuple(row)
