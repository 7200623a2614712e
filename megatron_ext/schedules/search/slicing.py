"""Slices: a table whose micro-batches run through the pipeline part by part of their sequence.

A pipeline fills with slices as it does with micro-batches, in 1/k of the time, and keeps the
activations of as many slices, which are 1/k of a micro-batch each. So a table of k times as many
micro-batches is nearly the table of slices. Only the order of backwards differs: those of a
micro-batch's slices run in reverse and begin after its last forward, k - 1 forwards later.

    1f1b, last rank, m 4            the same, m 2 in 2 slices
    F0 B0 F1 B1 F2 B2 F3 B3         F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1

Here all forwards move ahead by as many.

Sources of the idea: SlimPipe (arXiv 2504.14519) and Seq1F1B (arXiv 2406.03488), without split
backwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.greedy import Problem, Variant, search, spread
from megatron_ext.schedules.search.simulate import fastest, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.transforms import ahead
from megatron_ext.schedules.table.validation import check_actions
from megatron_ext.schedules.table.walk import stuck

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Row, Schedule


def sliced(schedule: Schedule, num_slices: int, costs: Costs = UNIT) -> Schedule:
    """Return the table of micro-batches in slices of equal cost.

    `schedule` is the table of as many micro-batches as there are slices in a step. Of the orders
    that are tried, the result has the shortest step for `costs` without jitter, and among equals
    the least memory.

    Raises:
        ScheduleError: Forwards and backwards are on different ranks, or no order is found.
    """
    equal = shares_of_equal_cost(num_slices)
    table = replace(
        schedule,
        num_microbatches=schedule.num_microbatches // num_slices,
        rows=tuple(tuple(_of_slice(action, num_slices) for action in r) for r in schedule.rows),
        slices=equal,
        options={**schedule.options, "slices": num_slices},
    )
    # Without chunks, and in interleaved tables, that costs nothing but k - 1 slices of memory.
    lead = max(_lead(row) for row in table.rows)
    moved = replace(table, rows=tuple(ahead(row, lead) for row in table.rows))
    check_actions(moved)
    even = replace(costs, attention=0.0)
    whole = replace(even, latency=num_slices * costs.latency)
    ends = not stuck(moved)
    found = [moved.rows] if ends else []
    shares = shares_of_equal_cost(num_slices, costs.attention)
    # Slices that take more than 1/k of as many micro-batches, beyond noise, are placed anew, with
    # the same memory: in folded tables each chunk needs a move of its own.
    least = simulate(schedule, whole).makespan / num_slices
    if not ends or simulate(moved, even).makespan > least * (1 + 1e-6):
        chunks = max(map(len, schedule.placement.stages_of))
        cap = (max(map(most_alive, schedule.rows)) + chunks * (num_slices - 1)) / num_slices
        problem = Problem(
            schedule.placement,
            table.num_microbatches,
            cap,
            costs,
            shares,
            ("I", "W") if schedule.splits_backward else ("B",),
        )
        limits = spread(num_slices, num_slices + schedule.pp)
        try:
            found.append(search(problem, [Variant(), *map(Variant, limits)]))
        except ScheduleError:
            if not found:
                raise
    return fastest((replace(table, rows=rows, slices=shares) for rows in found), costs)


def _of_slice(action: Action, num_slices: int) -> Action:
    """Return the action of a slice in the place of that of a micro-batch."""
    microbatch, part = divmod(action.microbatch, num_slices)
    # Backwards of a micro-batch begin with its last slice, which saw all keys and values.
    if action.kind != "F":
        part = num_slices - 1 - part
    return action._replace(microbatch=microbatch, slice=part)


def _lead(row: Row) -> int:
    """Return by how many forwards those of a row are too late for its backwards."""
    needed: dict[tuple[int, int], int] = {}
    """By stage and micro-batch: the forwards of the row until that of its last slice."""
    for count, action in enumerate((action for action in row if action.kind == "F"), start=1):
        needed[action.stage, action.microbatch] = count
    lead = ran = 0
    for action in row:
        if action.kind == "F":
            ran += 1
        else:
            lead = max(lead, needed.get((action.stage, action.microbatch), 0) - ran)
    return lead
