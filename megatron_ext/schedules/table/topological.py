"""Runs a table symbolically, to find an order that respects data edges and every rank's list.

Each rank runs its list until it needs an input that does not exist yet, and continues once another
rank has produced it. This is Kahn's algorithm over the data edges plus the order of each rank. If
it gets stuck there is a cycle, and the error shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Schedule
from megatron_ext.schedules.table.marking import marked_row

__all__ = ["Run", "execution_order"]

_Ranks = tuple[int, ...]

Run = tuple[int, int, int]
"""(rank, first, end): the rank runs its actions first .. end-1 without waiting."""


@dataclass
class _State:
    """Progress of the symbolic run.

    An input key is `stage * num_microbatches + microbatch`, plus `grad_offset` for gradients, plus
    twice that for activations shipped to the backward rank of the same stage.
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
    ready = bytearray(3 * count)
    ready[:m] = b"\1" * m  # the data
    ready[2 * count - m : 2 * count] = b"\1" * m  # the loss's own gradient
    num_ranks = len(schedule.rows)
    return _State(count, ready, [0] * num_ranks, [-1] * num_ranks)


def execution_order(schedule: Schedule) -> list[Run]:
    """Return all actions in an order in which one process could run them, as runs of ranks.

    The table must hold each action once, on its stage's rank (`validation.check_cover`).

    Raises:
        ScheduleError: The ranks deadlock; the message shows the cycle.
    """
    state, takers = _start(schedule), _takers(schedule)
    runs: list[Run] = []
    todo = list(range(len(schedule.rows)))[::-1]
    while todo:
        rank = todo.pop()
        begin = state.position[rank]
        woken = _advance(schedule, state, takers, rank)
        if state.position[rank] > begin:
            runs.append((rank, begin, state.position[rank]))
        todo += woken
    if any(state.position[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        raise ScheduleError(_cycle_message(schedule, state.position))
    return runs


def _advance(
    schedule: Schedule, state: _State, takers: tuple[list[_Ranks], list[_Ranks]], rank: int
) -> list[int]:
    """Run a rank as far as possible; return the ranks that waited for its outputs."""
    m, last = schedule.num_microbatches, schedule.num_stages - 1
    row = schedule.rows[rank]
    areas = {"F": 0, "B": 1, "I": 1, "R": 2 * schedule.ships_activations}
    ready, waiting, offset = state.ready, state.waiting, state.grad_offset
    woken = []
    index, end = state.position[rank], len(row)
    while index < end:
        stage, kind, microbatch = row[index]
        if kind != "W":
            key = stage * m + microbatch + offset * areas[kind]
            if not ready[key]:
                waiting[rank] = key
                break
            following = stage + 1 if kind == "F" else stage - 1
            made = key + m if kind == "F" else key - m
            if kind != "R" and 0 <= following <= last:
                woken += _make(state, made, takers[kind == "F"][following])
            if kind == "F" and schedule.ships_activations:
                woken += _make(state, key + 2 * offset, takers[False][stage])
        index += 1
    state.position[rank] = index
    return woken


def _make(state: _State, key: int, takers: _Ranks) -> list[int]:
    """Mark an input as present; return the ranks that waited for it."""
    state.ready[key] = 1
    woken = [rank for rank in takers if state.waiting[rank] == key]
    for rank in woken:
        state.waiting[rank] = -1
    return woken


def _takers(schedule: Schedule) -> tuple[list[_Ranks], list[_Ranks]]:
    """By stage: the ranks that need its gradient, and those that need its input."""
    placement = schedule.placement
    if placement.backward_rank_of is None:
        ranks: list[_Ranks] = [(rank,) for rank in placement.rank_of]
        return ranks, ranks
    both: list[_Ranks] = list(zip(placement.rank_of, placement.backward_rank_of, strict=True))
    return [ranks[1:] for ranks in both], both


def _cycle_message(schedule: Schedule, position: list[int]) -> str:
    """Follow the waiting ranks until one repeats, and describe that cycle."""
    rank = next(r for r, row in enumerate(schedule.rows) if position[r] < len(row))
    chain: list[tuple[int, Action, Action]] = []
    while rank not in (link[0] for link in chain):
        action = schedule.rows[rank][position[rank]]
        needed = _needed(schedule, action)
        chain.append((rank, action, needed))
        rank = schedule.placement.rank_for(needed.stage, needed.kind)
    cycle = chain[[link[0] for link in chain].index(rank) :]
    lines = ["the order of the ranks is cyclic, so these wait for each other forever:"]
    for rank, action, needed in cycle:
        peer = schedule.placement.rank_for(needed.stage, needed.kind)
        behind = schedule.rows[peer][position[peer]]
        lines.append(f"  {action} of rank {rank} needs {needed}, which is behind {behind}")
        lines.append(f"  {marked_row(schedule, rank, position[rank])}")
    lines.append("run every action after all that it needs, on all ranks in one common order")
    return "\n".join(lines)


def _needed(schedule: Schedule, action: Action) -> Action:
    if action.kind in ("F", "R"):
        from_twin = action.kind == "R" and schedule.ships_activations
        return Action(action.stage - (not from_twin), "F", action.microbatch)
    row = schedule.rows[schedule.placement.rank_for(action.stage + 1, "B")]
    full = Action(action.stage + 1, "B", action.microbatch)
    return full if full in row else full._replace(kind="I")
