"""Runs a table symbolically: an order of all actions that respects data and every rank's list.

Each rank runs its list until it needs something that does not exist yet, and goes on when another
rank made it. This is Kahn's algorithm over the data edges plus the order of each rank, where the
ranks' lists take the place of general edges. If it gets stuck there is a cycle, which is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.actions import Action, Schedule
from megatron_ext.schedules.marking import marked_row

__all__ = ["Run", "execution_order"]

Run = tuple[int, int, int]
"""(rank, first, end): the rank runs its actions first .. end-1 without waiting."""


@dataclass
class _State:
    """Progress of the symbolic run.

    An input key is `stage * num_microbatches + microbatch`, for gradients plus `grad_offset`.
    """

    grad_offset: int
    ready: bytearray
    """By key: whether the input exists."""
    position: list[int]
    """By rank: the next action."""
    waiting: list[int]
    """By rank: the key that it waits for, or -1."""


def _start(schedule: Schedule) -> _State:
    m, count = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
    ready = bytearray(2 * count)
    ready[:m] = b"\1" * m  # the data
    ready[2 * count - m :] = b"\1" * m  # the loss's own gradient
    num_ranks = len(schedule.rows)
    return _State(count, ready, [0] * num_ranks, [-1] * num_ranks)


def execution_order(schedule: Schedule) -> list[Run]:
    """Return all actions in an order in which one process could run them, as stretches of ranks.

    The table must hold each action once, on its stage's rank (`validate.check_cover`).

    Raises:
        ScheduleError: If ranks wait for each other in a circle; the message shows it.
    """
    state = _start(schedule)
    runs: list[Run] = []
    todo = list(range(len(schedule.rows)))[::-1]
    while todo:
        rank = todo.pop()
        begin = state.position[rank]
        woken = _advance(schedule, state, rank)
        if state.position[rank] > begin:
            runs.append((rank, begin, state.position[rank]))
        todo += woken
    if any(state.position[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        raise ScheduleError(_cycle_message(schedule, state.position))
    return runs


def _advance(schedule: Schedule, state: _State, rank: int) -> list[int]:
    """Run a rank as far as it goes; return the ranks that waited for what it made."""
    m, last = schedule.num_microbatches, schedule.num_stages - 1
    rank_of, row = schedule.placement.rank_of, schedule.rows[rank]
    ready, waiting, offset = state.ready, state.waiting, state.grad_offset
    woken = []
    index, end = state.position[rank], len(row)
    while index < end:
        stage, kind, microbatch = row[index]
        if kind != "W":
            key = stage * m + microbatch + (0 if kind == "F" else offset)
            if not ready[key]:
                waiting[rank] = key
                break
            following = stage + 1 if kind == "F" else stage - 1
            if 0 <= following <= last:
                made = key + m if kind == "F" else key - m
                ready[made] = 1
                peer = rank_of[following]
                if waiting[peer] == made:
                    waiting[peer] = -1
                    woken.append(peer)
        index += 1
    state.position[rank] = index
    return woken


def _cycle_message(schedule: Schedule, position: list[int]) -> str:
    """Follow who waits for whom until a rank comes up again."""
    rank = next(r for r, row in enumerate(schedule.rows) if position[r] < len(row))
    chain: list[tuple[int, Action, Action]] = []
    while rank not in (link[0] for link in chain):
        action = schedule.rows[rank][position[rank]]
        needed = _needed(schedule, action)
        chain.append((rank, action, needed))
        rank = schedule.placement.rank_of[needed.stage]
    cycle = chain[[link[0] for link in chain].index(rank) :]
    lines = ["the order of the ranks is cyclic, so these wait for each other for ever:"]
    for rank, action, needed in cycle:
        peer = schedule.placement.rank_of[needed.stage]
        behind = schedule.rows[peer][position[peer]]
        lines.append(f"  {action} of rank {rank} needs {needed}, which is behind {behind}")
        lines.append(f"  {marked_row(schedule, rank, position[rank])}")
    lines.append("run every action after all that it needs, on all ranks in one common order")
    return "\n".join(lines)


def _needed(schedule: Schedule, action: Action) -> Action:
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.microbatch)
    row = schedule.rows[schedule.placement.rank_of[action.stage + 1]]
    full = Action(action.stage + 1, "B", action.microbatch)
    return full if full in row else full._replace(kind="I")
