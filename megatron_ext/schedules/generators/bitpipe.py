"""BitPipe: two mirrored pipelines, each interleaved in a V, on the same ranks.

The first pipeline goes down the ranks and back up through 2pp stages, and the second one starts at
the last rank. While one pipeline fills, the other does useful work. Ranks r and pp-1-r hold the
same four stages, so weights are stored twice. The table covers half of the micro-batches on pp/2
ranks in W placement and runs twice, once mirrored. The twins are data-parallel peers. With
`routing=twin`, activations cross to the twin at the inner folds, as in the paper. With
`routing=local`, activations stay on their rank, which saves messages.

`order=paper` is the published code's order. Its bubble grows with every additional pp
micro-batches.

Paper: Wu et al., BitPipe, 2024 (arXiv 2410.19367); code: wuhouming/BitPipe.

bitpipe order=paper: pp 4, m 4, makespan 14, bubble 2 (14.3 %), peak 4
0|F0 F1 .  F2 f2 F3 f3 f0 b0--- f1 b1--- .  b2--- B2--- b3--- B3--- B0--- .  .  B1---
1|.  F0 F2 F1 F3 f2 f0 f3 f1 .  b0--- b2--- b1--- b3--- B2--- B0--- B3--- B1--- .  .
2|.  F2 F0 F3 F1 f0 f2 f1 f3 .  b2--- b0--- b3--- b1--- B0--- B2--- B1--- B3--- .  .
3|F2 F3 .  F0 f0 F1 f1 f2 b2--- f3 b3--- .  b0--- B0--- b1--- B1--- B2--- .  .  B3---

Bubble: (pp/2 - 1) max(Tf, Tb + Tw) for m = pp; (k + 1)(pp - 2)Tf / 2 for m = k pp at Tb + Tw = 2Tf.

`order=zb` splits backward passes and searches (greedy.py) for an order that keeps no more
activations than `paper` does. The search uses the actual costs, because a table optimised for equal
times and zero latency is much slower under different costs.

bitpipe order=zb: pp 4, m 4, makespan 12.5, bubble 0.5 (4.0 %), peak 4
0|F0 F1 .  F2 f2 F3 f3 f0 i0 f1 i1 i2 I2 i3 I3 I0 W0 I1 W1 W2 W3 w2 w3 w0 w1
1|.  F0 F2 F1 F3 f2 f0 f3 f1 i0 i2 i1 i3 I2 I0 I3 I1 W0 W1 W2 W3 w2 w3 w0 w1
2|.  F2 F0 F3 F1 f0 f2 f1 f3 i2 i0 i3 i1 I0 I2 I1 I3 W2 W3 W0 W1 w0 w1 w2 w3
3|F2 F3 .  F0 f0 F1 f1 f2 i2 f3 i3 i0 I0 i1 I1 I2 W2 I3 W3 W0 W1 w0 w1 w2 w3

Bubble: (pp - 2)Tf / 4 at Tf = Tb = Tw for m = pp, 2pp - 2, 2pp, 3pp, 4pp, up to pp = 40. No table
with this placement has a smaller bubble, because the middle ranks cannot start earlier. Any even m
is valid. The bubble is larger if m is below or slightly above pp, or if costs are unequal. With
unequal costs and pp >= 16, it also grows slowly with m.

Activations: at most min(pp, m). Each direction sums its gradients in micro-batch order. The
gradients are then reduced across the twins, just as across data-parallel ranks. Losses and
gradients are therefore bit-identical to those of Megatron's pipeline on pp/2 ranks, with one
exception: with `routing=twin` and experts spread over the twins, the experts in stages between the
inner folds see the twins' tokens in the opposite order. In that case, losses agree to 1e-6 (with
`routing=local`, bit for bit).
"""

from __future__ import annotations

import math
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.generators.catalog import register
from megatron_ext.schedules.generators.patterns import passes, shortened
from megatron_ext.schedules.search.greedy import Problem, Variant, search
from megatron_ext.schedules.table import placement
from megatron_ext.schedules.table.actions import Action, Kind, Option, Row, Schedule

if TYPE_CHECKING:
    from megatron_ext.schedules.table.costs import Costs


@register(
    "bitpipe",
    num_chunks=4,
    twins=2,
    options={
        "order": ("zb", "paper"),
        "routing": ("twin", "local"),
    },
    variants=({"order": "zb"}, {"order": "paper"}),
    flags="--enable-bitpipe-schedule",
    needs_costs=True,
    searches=lambda _pp, _num_microbatches: True,
)
def bitpipe(
    pp: int,
    num_microbatches: int,
    costs: Costs,
    *,
    order: str,
    routing: placement.Routing,
) -> Schedule:
    """Return the table for one of BitPipe's two mirrored pipelines."""
    num_ranks = pp // 2
    one_way = placement.w(num_ranks)
    folded = placement.mirrored(one_way, routing)
    m = num_microbatches // 2
    if order == "paper":
        rows = _paper_rows(pp, m)
    else:
        problem = Problem(
            folded,
            m,
            # The cap counts every stage's activations separately. A stage is 1/(2pp) of
            # the model, so a cap of 2pp corresponds to the pp units stated above.
            cap=2 * pp,
            costs=costs,
        )
        # With few ranks, the search reaches the lower bound without limiting the
        # micro-batches in flight. With many ranks, it does so only if the limit is near
        # pp/2.
        variants = [Variant()]
        for limit in range(num_ranks, pp + 1):
            variants.append(Variant(limit))
        rows = search(problem, variants)
    options: dict[str, Option] = {"order": order}
    if routing != "twin":
        options["routing"] = routing
    return Schedule("bitpipe", folded, m, rows, options)


def _paper_rows(
    pp: int,
    num_microbatches: int,
) -> tuple[Row, ...]:
    """Return the published order for one of the two pipelines."""
    num_ranks = pp // 2
    # The published order consists of whole units with one micro-batch per rank. Round
    # the number of micro-batches up to whole units and drop the surplus.
    num_units = math.ceil(num_microbatches / num_ranks)
    published = num_units * num_ranks
    rows = []
    for rank in range(num_ranks):
        rows.append(_paper_row(rank, pp, published))
    if published == num_microbatches:
        return tuple(rows)
    return shortened(rows, num_microbatches)


class _Pass(NamedTuple):
    """The stages on one rank, in forward order: both sides of one V, then both of the other V."""

    first_down: int
    first_up: int
    second_down: int
    second_up: int


def _paper_row(
    rank: int,
    pp: int,
    num_microbatches: int,
) -> Row:
    """Return the published order for one rank."""
    num_ranks = pp // 2
    forward = _Pass(
        first_down=rank,
        first_up=pp - 1 - rank,
        second_down=pp + rank,
        second_up=2 * pp - 1 - rank,
    )
    # Backward passes visit the stages in the opposite order.
    backward = _Pass(*reversed(forward))
    forwards: list[Action] = []
    backwards: list[Action] = []
    firsts = range(0, num_microbatches, num_ranks)
    for first in firsts:
        unit = range(first, first + num_ranks)
        forwards += _unit("F", forward, unit, rank)
        backwards += _unit("B", backward, unit, rank)
    row = _weave(
        forwards,
        backwards,
        num_units=len(firsts),
        pp=pp,
        num_alternations=num_ranks - rank,
    )
    return tuple(row)


def _unit(
    kind: Kind,
    stages: _Pass,
    unit: range,
    rank: int,
) -> list[Action]:
    """Return one kind of action for one unit, which is one micro-batch per rank."""
    # Ranks further down run fewer micro-batches before the first one returns.
    num_head = len(unit) - rank
    head = unit[:num_head]
    tail = unit[num_head:]
    early = unit[:rank]
    late = unit[rank:]
    # Down the first V, until the first micro-batch returns.
    row = passes(stages.first_down, kind, head)
    for i, j in zip(early, tail, strict=True):
        row.append(Action(stages.first_up, kind, i))
        row.append(Action(stages.first_down, kind, j))
    # Up the first V, alternating with the second V down.
    for i, j in zip(late, head, strict=True):
        row.append(Action(stages.first_up, kind, i))
        row.append(Action(stages.second_down, kind, j))
    for i, j in zip(early, tail, strict=True):
        row.append(Action(stages.second_up, kind, i))
        row.append(Action(stages.second_down, kind, j))
    row += passes(stages.second_up, kind, late)
    return row


def _weave(
    forwards: list[Action],
    backwards: list[Action],
    num_units: int,
    pp: int,
    num_alternations: int,
) -> list[Action]:
    """Return the warm-up, then per unit: F and B in turn, drain, both in turn, refill."""
    warm_up = 2 * pp - num_alternations
    drain = warm_up - num_alternations + 1
    remaining_forwards = iter(forwards)
    remaining_backwards = iter(backwards)
    # Alternate forward and backward passes. `alternating` consumes the same two
    # iterators as the calls below, so every action appears once.
    alternating = chain.from_iterable(
        zip(remaining_forwards, remaining_backwards, strict=False)
    )
    row = list(islice(remaining_forwards, warm_up))
    for _ in range(num_units - 1):
        row += islice(alternating, 2 * num_alternations)
        # The current unit drains.
        row += islice(remaining_backwards, drain)
        # This unit's backward passes alternate with the next unit's forward passes, and the next
        # unit then refills the pipeline.
        row += islice(alternating, 2 * num_alternations - 2)
        row += islice(remaining_forwards, drain)
    row += islice(alternating, 2 * num_alternations)
    row += remaining_backwards
    return row
