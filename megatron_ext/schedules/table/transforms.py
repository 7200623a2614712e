"""Tables made from other tables, and from a placement alone."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Schedule
from megatron_ext.schedules.table.communication import check_slots

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Row
    from megatron_ext.schedules.table.placement import Placement


def split_backwards(schedule: Schedule) -> Schedule:
    """Return the table with each B replaced by I, W; memory stays the same.

    Each rank then sends the input gradient before it computes the weight gradient. That alone
    shortens a step in the table's own order; a dynamic policy (policies.py) also moves W into idle
    time.
    """
    rows, pairs = [], []
    for rank, row in enumerate(schedule.rows):
        split: list[Action] = []
        begins = set()
        for index, action in enumerate(row):
            # Positions shift with each B that became two. A pair keeps its forward, and has the I
            # in place of the B.
            if index in schedule.pairs_of(rank):
                begins.add(len(split))
            if action.kind == "B":
                split += (action._replace(kind="I"), action._replace(kind="W"))
            else:
                split.append(action)
        rows.append(tuple(split))
        pairs.append(frozenset(begins))
    return replace(schedule, rows=tuple(rows), pairs=tuple(pairs) if schedule.pairs else ())


def weights_at_once(schedule: Schedule) -> Schedule:
    """Return the table with each W moved right behind its I.

    Where layers are recomputed, what W needs is many times what a micro-batch keeps before I, so it
    should be held for one micro-batch at a time. No other rank waits for a W, so the table stays
    valid, and I still sends its result before W runs.
    """
    rows = []
    for row in schedule.rows:
        moved: list[Action] = []
        for action in row:
            if action.kind != "W":
                moved.append(action)
            if action.kind == "I":
                moved.append(action._replace(kind="W"))
        rows.append(tuple(moved))
    return replace(schedule, rows=tuple(rows))


def ahead(row: Row, lead: int) -> Row:
    """Let each forward of a row run where the one that is `lead` forwards earlier did."""
    forwards = [action for action in row if action.kind == "F"]
    following = iter(forwards[lead:])
    others = (next(following, None) if action.kind == "F" else action for action in row)
    return (*forwards[:lead], *(action for action in others if action is not None))


def literal_rows(schedule: Schedule) -> tuple[Row, ...]:
    """Return the actions of every rank of the world, for display.

    A schedule with twins is stored as the table of one of two mirrored pipelines on pp/2 ranks.
    From outside it is a bidirectional pipeline on pp ranks: ranks r and pp-1-r hold the same stages
    and run the same list with directions exchanged. Here the micro-batches of the second direction
    are numbered after those of the first.
    """
    if schedule.placement.twins == 1:
        return schedule.rows
    m, crossed = schedule.num_microbatches, schedule.placement.is_crossed
    # With twin routing, a micro-batch changes sides at each inner fold.
    sides = list(map(crossed, range(schedule.num_stages)))
    return tuple(
        tuple(
            action._replace(microbatch=action.microbatch + m)
            if sides[action.stage] != (rank >= schedule.placement.num_ranks)
            else action
            for action in schedule.rows[table_rank(schedule, rank)]
        )
        for rank in range(schedule.pp)
    )


def table_rank(schedule: Schedule, rank: int) -> int:
    """Return the row of the table that a rank of the world runs."""
    last = schedule.pp - 1
    return min(rank, last - rank) if schedule.placement.twins == 2 else rank


def chunk_on_screen(schedule: Schedule, stage: int) -> int:
    """Return the chunk number of a stage within its direction on its rank."""
    placement = schedule.placement
    return stage // (schedule.pp if placement.twin_hops else placement.num_ranks)


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Return the table of evaluation: F of each stage and micro-batch, ascending on each stage.

    It depends on the placement only, so it exists for any number of micro-batches, even if the
    training schedule restricts them. Each rank runs the deepest stage that has an input, so
    micro-batches in flight finish first and few activations are alive. The order comes from a
    simulated run in which every stage takes one unit of time and messages take none, so it cannot
    deadlock.
    """
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_ranks)]
    ready[placement.rank_of[0]] = [(0, microbatch) for microbatch in range(num_microbatches)]
    while any(ready):
        # All ranks choose before any of them hands on: what is made now is ready in the next unit.
        done = [heapq.heappop(inputs) if inputs else None for inputs in ready]
        for rank, item in enumerate(done):
            if item is None:
                continue
            stage, microbatch = -item[0], item[1]
            rows[rank].append(Action(stage, "F", microbatch))
            target = placement.target(stage, "F")
            if target is not None:
                heapq.heappush(ready[placement.rank_of[target]], (-target, microbatch))
    return Schedule("forward-only", placement, num_microbatches, tuple(map(tuple, rows)))


def slots_for_forward(schedule: Schedule) -> int:
    """Return the number of slots on each edge with which a forward-only table ends.

    No activation memory bounds the messages in flight here, so senders wait for receivers; with
    this many slots they never deadlock.
    """
    # Doubled: the exact number would cost more walks, and saves nothing that counts in evaluations.
    slots = 2
    while True:
        try:
            check_slots(schedule, slots)
        except ScheduleError:  # noqa: PERF203 - a number that is too small
            slots *= 2
        else:
            return slots
