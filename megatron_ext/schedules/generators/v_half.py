"""V-Half: ZB-V's placement with half of its activation memory.

The paper repeats a building block in which a micro-batch stays alive half as long as in 1F1B. Here,
a greedy search (greedy.py) orders the actions under the same activation cap. The resulting tables
are shorter than those built from the repeated block.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv 2405.15362).

v-half chunks=2: pp 4, m 4, makespan 15.5, bubble 3.5 (22.6 %), peak 3
0|F0 F1 F2 F3 .  .  .  f0 i0 f1 i1 w0 w1 .  .  I0 f2 I1 i2 W0 W1 f3 i3 w2 w3 I2 W2 .  .  I3 W3
1|.  F0 F1 F2 F3 .  f0 .  f1 i0 w0 i1 w1 .  I0 f2 I1 W0 W1 i2 f3 w2 .  i3 I2 W2 w3 .  I3 W3 .
2|.  .  F0 F1 F2 f0 F3 f1 .  .  i0 w0 i1 I0 f2 I1 W0 W1 w1 f3 i2 w2 .  I2 i3 W2 w3 I3 W3 .  .
3|.  .  .  F0 f0 F1 f1 F2 f2 .  .  i0 I0 i1 I1 W0 F3 W1 f3 w0 w1 i2 I2 W2 w2 i3 I3 W3 w3 .  .

Bubble: no closed form; at Tf = Tb = Tw, for m = pp, 2pp, 4pp and pp <= 16, it is at most half of
1F1B's. Activations: at most min((pp + 2) / 2, m). Gradients are summed in micro-batch order, as
without a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.search.greedy import Problem, Variant, search, spread
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Schedule

if TYPE_CHECKING:
    from megatron_ext.schedules.table.costs import Costs


@register(
    "v-half",
    num_chunks=2,
    needs_costs=True,
    searches=lambda _pp, _num_microbatches: True,
)
def v_half(
    pp: int,
    num_microbatches: int,
    costs: Costs,
) -> Schedule:
    """Return V-Half's table."""
    folded = placement.v(pp)
    problem = Problem(
        folded,
        num_microbatches,
        # Half of ZB-V's cap of 2pp, plus one for each of the two chunks.
        cap=pp + 2,
        costs=costs,
    )
    variants = [Variant()]
    # There is no formula for the best limit on micro-batches in flight, so try several limits.
    limits = spread(pp // 2 + 1, pp + 1)
    for limit in limits:
        variants.append(Variant(limit))
    rows = search(problem, variants)
    return Schedule(
        "v-half",
        folded,
        num_microbatches,
        rows,
        options={"chunks": 2},
    )
