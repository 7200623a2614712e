"""The order of a forward-only step: evaluation.

It depends on the placement only, so it exists for any number of micro-batches, even if the training
schedule restricts them. Each rank runs the deepest stage that has an input, so micro-batches in
flight finish first and few activations are alive.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Schedule
from megatron_ext.schedules.table.slots import check_slots

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

__all__ = ["forward_only", "slots_for_forward"]


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Return a table with the F of each stage and micro-batch, in ascending order on each stage.

    The order comes from a simulated run in which every stage takes one unit of time and messages
    take none, so it cannot deadlock.
    """
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_ranks)]
    first = placement.rank_of[0]
    ready[first] = [(0, microbatch) for microbatch in range(num_microbatches)]
    while any(ready):
        done = [heapq.heappop(inputs) if inputs else None for inputs in ready]
        for rank, item in enumerate(done):
            if item is None:
                continue
            stage, microbatch = -item[0], item[1]
            rows[rank].append(Action(stage, "F", microbatch))
            if stage + 1 < placement.num_stages:
                follower = ready[placement.rank_of[stage + 1]]
                heapq.heappush(follower, (-(stage + 1), microbatch))
    return Schedule("forward-only", placement, num_microbatches, tuple(map(tuple, rows)))


def slots_for_forward(schedule: Schedule) -> int:
    """Return the number of slots on each edge with which the table ends.

    No activation memory bounds the messages in flight here, so senders wait for receivers; with
    this many slots they never deadlock.
    """
    slots = 2
    while not _ends(schedule, slots):
        slots *= 2
    return slots


def _ends(schedule: Schedule, slots: int) -> bool:
    try:
        check_slots(schedule, slots)
    except ScheduleError:
        return False
    return True
