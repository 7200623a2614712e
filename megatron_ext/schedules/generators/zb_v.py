"""ZB-V: two chunks per rank, laid out as a V, with split backward passes.

The stages go down the ranks and back up, so rank 0 holds both the first and the last stage, and the
turn at the last rank needs no message. Every rank keeps the same number of activations. For m >=
2pp, every rank works without a gap from its first to its last action, so the only bubble comes from
the staggered start. With few micro-batches, the published order has gaps. In that case, a search
(greedy.py) produces a table as well, and the shorter of the two is used.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241), section 6.

zb-v chunks=2: pp 4, m 4, makespan 13.5, bubble 1.5 (11.1 %), peak 4
0|F0 F1 F2 F3 .  .  .  f0 i0 f1 i1 f2 i2 f3 i3 I0 W0 I1 W1 I2 W2 I3 W3 w0 w1 w2 w3
1|.  F0 F1 F2 F3 .  f0 .  f1 i0 f2 i1 f3 i2 I0 i3 I1 W0 I2 W1 I3 W2 W3 w0 w1 w2 w3
2|.  .  F0 F1 F2 f0 F3 f1 .  f2 i0 f3 i1 I0 i2 I1 i3 I2 W0 I3 W1 W2 W3 w0 w1 w2 w3
3|.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 i0 I0 i1 I1 i2 I2 i3 I3 W0 W1 W2 W3 w0 w1 w2 w3

Bubble: (pp - 1)Tf / 2 at Tf = Tb = Tw, for m >= pp. No table with this placement has a smaller
bubble, because the last rank cannot start earlier. Activations: min(pp, m) on every rank. Gradients
are summed in micro-batch order, as without a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import expand, shortened
from megatron_ext.schedules.search.greedy import Problem, Rows, Variant, search, spread
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Row, Schedule

if TYPE_CHECKING:
    from megatron_ext.schedules.table.costs import Costs


def _is_short(pp: int, num_microbatches: int) -> bool:
    """Return whether the published order has gaps, so that a search may find a shorter table."""
    return num_microbatches <= max(2 * pp - 3, pp)


@register(
    "zb-v",
    num_chunks=2,
    needs_costs=True,
    searches=_is_short,
)
def zb_v(
    pp: int,
    num_microbatches: int,
    costs: Costs,
) -> Schedule:
    """Return ZB-V's table."""
    if not _is_short(pp, num_microbatches):
        return _published_table(pp, num_microbatches)
    problem = Problem(
        placement.v(pp),
        num_microbatches,
        cap=2 * pp,
        costs=costs,
    )
    variants = [Variant()]
    if num_microbatches > pp:
        # The cap admits most but not all of the step's micro-batches. Running I before
        # F then leaves a gap at the end (greedy.py).
        variants.insert(0, Variant(forwards_first=True))
    limits = spread(pp // 2 + 1, pp)
    for limit in limits:
        variants.append(Variant(limit))
    rows = search(problem, variants)
    searched = _table(pp, num_microbatches, rows)
    if num_microbatches <= pp:
        return searched
    published = _published_table(pp, num_microbatches)

    def step_time(table: Schedule) -> float:
        return simulate(table, costs).makespan

    # If costs or latencies are unequal, either table may be the shorter one.
    return min(searched, published, key=step_time)


def _table(
    pp: int,
    num_microbatches: int,
    rows: Rows,
) -> Schedule:
    return Schedule(
        "zb-v",
        placement.v(pp),
        num_microbatches,
        rows,
        options={"chunks": 2},
    )


def _published_table(pp: int, num_microbatches: int) -> Schedule:
    """Return the table in the published order."""
    # The phases need at least 2pp - 1 micro-batches. For fewer, shorten the table for
    # 2pp - 1.
    published = max(num_microbatches, 2 * pp - 1)
    long_rows = []
    for rank in range(pp):
        long_rows.append(_row(rank, pp, published))
    rows = tuple(long_rows)
    if published > num_microbatches:
        rows = shortened(rows, num_microbatches)
    return _table(pp, num_microbatches, rows)


def _row(
    rank: int,
    pp: int,
    num_microbatches: int,
) -> Row:
    """Return the published order for one rank, which runs at least 2pp - 1 micro-batches."""
    below = pp - 1 - rank
    stage_up = 2 * pp - 1 - rank
    phases = (
        # Warm-up: down the V, then as many forward passes as fit in memory, then up the V.
        ("F0", 2 * below + 1),
        ("F1 F0", rank),
        ("F1 I1 W1", below + 1),
        # Steady: no rank ever waits.
        ("F0 I0 W0 F1 I1 W1", num_microbatches - 2 * pp + rank + 1),
        ("I0 W0 F1 I1 W1", below),
        # Cool-down: first the I actions that other ranks wait for, then the remaining W actions.
        ("I0 I1", rank),
        ("I0 W0", below + 1),
        ("W1", rank),
        ("W0", rank),
    )
    return expand(phases, (rank, stage_up))
