"""Transforms tables into other tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Row, Schedule


def split_backwards(schedule: Schedule) -> Schedule:
    """Return the table with every B replaced by I and W. Memory use stays the same.

    Ranks then send the input gradient before computing the weight gradient, which shortens the step
    even in the static order. In addition, a dynamic policy (policies.py) moves W into idle time.
    """

    def split(action: Action) -> Row:
        if action.kind != "B":
            return (action,)
        input_gradient = action._replace(kind="I")
        weight_gradient = action._replace(kind="W")
        return input_gradient, weight_gradient

    return _replaced(schedule, split)


def weights_at_once(schedule: Schedule) -> Schedule:
    """Return the table with every W moved directly after its I.

    If layers are recomputed, W needs many times the memory that a micro-batch holds before I, so
    only one micro-batch at a time should hold that much. The table stays valid, because no other
    rank waits for a W, and I still sends its result before W runs.
    """

    def weights_behind_inputs(action: Action) -> Row:
        if action.kind == "W":
            return ()
        if action.kind == "I":
            return action, action._replace(kind="W")
        return (action,)

    return _replaced(schedule, weights_behind_inputs)


def weights_waiting(schedule: Schedule, num_waiting: int) -> Schedule:
    """Return the table with every W moved to the place of the `num_waiting`-th W after it.

    The runtime may run a W earlier if the rank is idle, so up to `num_waiting` additional W actions
    on a rank wait for idle time. The last W actions go to the end of the row. Rows without pairs do
    not change, because their ranks do not run W early. The W actions in a row keep their order. No
    W moves past a full backward pass on the same stage, because both add to the same gradients.
    """
    rows: list[Row] = []
    pairs: list[frozenset[int]] = []
    for rank, row in enumerate(schedule.rows):
        pair_begins = schedule.pairs_of(rank)
        if not pair_begins:
            rows.append(row)
            pairs.append(pair_begins)
            continue
        delayed_row: list[Action] = []
        waiting: deque[Action] = deque()
        new_begins: set[int] = set()
        for index, action in enumerate(row):
            if action.kind == "W":
                waiting.append(action)
                if len(waiting) > num_waiting:
                    # The oldest W takes this one's place.
                    delayed_row.append(waiting.popleft())
                continue
            # In a pair, the backward pass directly follows the forward pass, so check
            # both when reaching the forward pass.
            is_second = index - 1 in pair_begins
            begins_pair = index in pair_begins
            num_actions = 2 if begins_pair else 1
            if not is_second:
                whole_stages = set()
                for part in row[index : index + num_actions]:
                    if part.kind == "B":
                        whole_stages.add(part.stage)
                # A full backward pass must not overtake a W that is waiting on its
                # stage.
                while any(weight.stage in whole_stages for weight in waiting):
                    delayed_row.append(waiting.popleft())
            if begins_pair:
                new_begins.add(len(delayed_row))
            delayed_row.append(action)
        rows.append((*delayed_row, *waiting))
        pairs.append(frozenset(new_begins))
    if not schedule.pairs:
        pairs.clear()
    return replace(schedule, rows=tuple(rows), pairs=tuple(pairs))


def _replaced(schedule: Schedule, replacement: Callable[[Action], Row]) -> Schedule:
    """Return the table with every action replaced. The first replacements in a pair stay paired."""
    rows: list[Row] = []
    pairs: list[frozenset[int]] = []
    for rank, row in enumerate(schedule.rows):
        replacements = [replacement(action) for action in row]
        # Maps an action's position to the position of its first replacement.
        lengths = map(len, replacements)
        positions = list(accumulate(lengths, initial=0))
        begins = schedule.pairs_of(rank)
        rows.append(tuple(chain.from_iterable(replacements)))
        pairs.append(frozenset(positions[index] for index in begins))
    if not schedule.pairs:
        pairs.clear()
    return replace(schedule, rows=tuple(rows), pairs=tuple(pairs))


def ahead(row: Row, lead: int) -> Row:
    """Move every forward pass in a row to the place of the `lead`-th forward pass before it."""
    forwards = [action for action in row if action.kind == "F"]
    moved_row = forwards[:lead]
    following = iter(forwards[lead:])
    for action in row:
        if action.kind != "F":
            moved_row.append(action)
            continue
        forward = next(following, None)
        # The last places are dropped, because their forward passes have moved to
        # earlier places.
        if forward is not None:
            moved_row.append(forward)
    return tuple(moved_row)


def literal_rows(schedule: Schedule) -> tuple[Row, ...]:
    """Return all ranks' actions, for both twins, for display.

    A schedule with twins is stored as the table for one of two mirrored pipelines on pp/2 ranks.
    The table represents a bidirectional pipeline on pp ranks: ranks r and pp-1-r hold the same
    stages and run the same row with the directions swapped. Micro-batches in the second direction
    are numbered after those in the first.
    """
    if schedule.placement.twins == 1:
        return schedule.rows
    placement = schedule.placement
    # With twin routing, a micro-batch moves to the twin at every inner fold.
    is_crossed = [placement.is_crossed(stage) for stage in range(schedule.num_stages)]
    rows: list[Row] = []
    for rank in range(schedule.pp):
        is_twin = rank >= placement.num_ranks
        row: list[Action] = []
        stored_row = schedule.rows[table_rank(schedule, rank)]
        for action in stored_row:
            if is_crossed[action.stage] == is_twin:
                row.append(action)
            else:
                microbatch = action.microbatch + schedule.num_microbatches
                row.append(action._replace(microbatch=microbatch))
        rows.append(tuple(row))
    return tuple(rows)


def table_rank(schedule: Schedule, rank: int) -> int:
    """Return a rank's table row, where ranks are counted across both twins."""
    last = schedule.pp - 1
    if schedule.placement.twins == 1:
        return rank
    # Ranks r and pp-1-r run the same row with the directions swapped.
    return min(rank, last - rank)


def chunk_on_screen(schedule: Schedule, stage: int) -> int:
    """Return a stage's chunk number on its rank, within one direction."""
    placement = schedule.placement
    # With twin routing, a direction visits all ranks of both twins before returning to
    # a rank.
    if placement.twin_hops:
        return stage // schedule.pp
    return stage // placement.num_ranks
