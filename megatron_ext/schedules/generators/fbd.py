"""Forward/backward disaggregation: separate ranks for forward and for backward passes.

Forward ranks 0 to p/2-1 hold the p/2 stages and keep no activations. Each of them sends its output
to the next forward rank and to the next stage's backward rank. Backward ranks p/2 to p-1 hold the
stages in reverse. There, R repeats the forward pass, this time recording an autograd graph, and B
runs the backward pass, so only one micro-batch's activations are alive at a time. No rank needs the
last stage's output, so the last forward rank idles.

With `activations=ship`, forward ranks send every layer's saved input, and B recomputes each layer
just before that layer's backward pass, so R takes no time. All forward ranks then do useful work,
and backward ranks keep the activations of a single layer instead of an entire stage.

The idea comes from MegatronApp's forward/backward disaggregation.

fbd activations=recompute: pp 4, m 4, makespan 30, bubble 6 (20.0 %), peak 2
0|F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  .  .
1|.  .  .  .  .  .  .  .  .  .  .  .  .  .  .
2|.  R0 B0--- R1 B1--- R2 B2--- R3 B3--- .  .
3|R0 .  .  .  B0--- R1 B1--- R2 B2--- R3 B3---

Bubble: (pp - 2)(Tf + Tb + Tw), plus pp Tf with `ship`. Activations: 2 (one stage is 2/pp of the
model). With `ship` this is an upper bound, because layers are recomputed one at a time. Gradients
are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import passes
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Action, Row, Schedule


@register(
    "fbd",
    options={"activations": ("recompute", "ship")},
    variants=({"activations": "recompute"}, {"activations": "ship"}),
    listed=False,
    flags="--forward-backward-disaggregating",
)
def fbd(
    pp: int,
    num_microbatches: int,
    activations: str = "recompute",
) -> Schedule:
    """Return the table for both roles. Half of the `pp` ranks run forward passes.

    Raises:
        ScheduleError: pp is odd.
    """
    if pp % 2:
        near = f"{pp - 1} or {pp + 1}" if pp > 1 else "2"
        raise ScheduleError(
            f"fbd has a forward rank and a backward rank per stage, so pp must be even, got {pp}; "
            f"use {near}"
        )
    stages = range(pp // 2)
    microbatches = range(num_microbatches)
    rows: list[Row] = []
    for stage in stages:
        # If backward ranks recompute, no rank needs the last stage's output.
        is_needed = activations == "ship" or stage < stages[-1]
        forwards: list[Action] = []
        if is_needed:
            forwards = passes(stage, "F", microbatches)
        rows.append(tuple(forwards))
    for stage in reversed(stages):
        row: list[Action] = []
        for m in microbatches:
            row.append(Action(stage, "R", m))
            row.append(Action(stage, "B", m))
        rows.append(tuple(row))
    return Schedule(
        "fbd",
        placement.roles(pp),
        num_microbatches,
        tuple(rows),
        {"activations": activations},
    )
