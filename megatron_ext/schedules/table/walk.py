"""Runs a table symbolically: every pass that follows a table through all ranks is one `walk`.

Each rank runs its list until it needs a tensor that does not exist yet, and continues once another
rank has made it. This is Kahn's algorithm over the tensors plus the order of each rank. What a
tensor *is* during a walk is up to the visitor: its arrival time (`search/simulate.py`), or nothing
at all (`stuck`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import KINDS, Action, Kind, Schedule

Visit = Callable[[int, int, Any], Any]
"""(rank, position in its row, value of the tensor that the action takes) -> value of the tensor
that it makes; two values where it feeds two ranks. A pair is one visit with two values, and returns
two."""


def check_ends(schedule: Schedule) -> None:
    """Check that all ranks finish, whatever the times of actions and messages.

    The table must hold each action once, on its stage's rank (`validation.check_actions`).

    Raises:
        ScheduleError: The ranks deadlock; the message shows the cycle.
    """
    waiting = stuck(schedule)
    if waiting:
        raise ScheduleError(_cycle_message(schedule, waiting))


def stuck(schedule: Schedule) -> dict[int, int]:
    """Return the ranks that cannot finish, with the position at which each waits."""
    return walk(schedule, lambda _rank, _index, _taken: (True, True))


def walk(schedule: Schedule, visit: Visit) -> dict[int, int]:
    """Visit each action once its tensors exist, after all actions before it on its rank.

    Returns:
        The ranks that did not finish, with the position at which they wait; empty if all did.
    """
    steps = _steps(schedule)
    # Numbered and not by name: a table has millions of tensors, and this is asked twice for each.
    there: list[Any] = [None] * 3 * schedule.num_stages * schedule.slices_in_step
    num_slices = schedule.num_slices
    position = [0] * len(schedule.rows)
    awaited: dict[int, int] = {}  # missing tensor: the rank that waits for it
    waiting: dict[int, int] = {}  # rank: the position of the action that cannot run
    # A stack: rank 0, which has the first forward, is on top.
    todo = list(range(len(schedule.rows)))[::-1]

    def hand_over(number: int, value: Any) -> None:
        there[number] = value
        if number in awaited:
            todo.append(awaited.pop(number))

    while todo:
        rank = todo.pop()
        row, index, pairs = schedule.rows[rank], position[rank], schedule.pairs_of(rank)
        while index < len(row):
            stage, kind, microbatch, part = row[index]
            number = microbatch * num_slices + part
            source, makes, copies = steps[kind][stage]
            taken = there[source + number] if source >= 0 else None
            if source >= 0 and taken is None:
                awaited[source + number] = rank
                waiting[rank] = index
                break
            if index in pairs:  # both wait for all inputs, and hand on at the end
                stage, kind, microbatch, part = row[index + 1]
                partner = microbatch * num_slices + part
                source, sent, _ = steps[kind][stage]
                other = there[source + partner] if source >= 0 else None
                if source >= 0 and other is None:
                    awaited[source + partner] = rank
                    waiting[rank] = index + 1
                    break
                made, other = visit(rank, index, (taken, other))
                index += 1
                if sent >= 0:
                    hand_over(sent + partner, other)
            else:
                made = visit(rank, index, taken)
                if copies >= 0:
                    made, other = made
                    hand_over(copies + number, other)
            index += 1
            if makes >= 0:  # not by `hand_over`: this runs for nearly every action
                there[makes + number] = made
                if makes + number in awaited:
                    todo.append(awaited.pop(makes + number))
        else:
            waiting.pop(rank, None)
        position[rank] = index
    return waiting


def _steps(schedule: Schedule) -> dict[Kind, list[tuple[int, int, int]]]:
    """By kind and stage of an action: the tensor that it takes and those that it makes, or -1.

    The tensors are those of slice 0 of micro-batch 0. They are numbered by the stage, micro-batch
    and slice that take them: activations first, then gradients, then what R takes. Tables have
    millions of actions, so a walk looks up nothing but these numbers.
    """
    m, count = schedule.slices_in_step, schedule.num_stages * schedule.slices_in_step
    base = {"F": 0, "B": count, "I": count, "R": 2 * count}
    makes = {
        kind: [[base[fed.kind] + fed.stage * m for fed, _ in each] for each in of_stages]
        for kind, of_stages in schedule.links.items()
    }
    made = {number for of_stages in makes.values() for each in of_stages for number in each}
    steps: dict[Kind, list[tuple[int, int, int]]] = {}
    for kind in KINDS:
        steps[kind] = []
        for stage, each in enumerate(makes[kind]):
            taken = base.get(kind, -1) + stage * m
            first, second, *_ = *each, -1, -1
            steps[kind].append((taken if kind != "W" and taken in made else -1, first, second))
    return steps


def _cycle_message(schedule: Schedule, position: dict[int, int]) -> str:
    """Follow the waiting ranks until one repeats, and describe that cycle."""
    rank_for = schedule.placement.rank_for
    rank = min(position)
    chain: dict[int, tuple[Action, Action]] = {}
    while rank not in chain:
        action = schedule.rows[rank][position[rank]]
        [needed] = (n for n in schedule.needs(action) if schedule.travels(n, action))
        chain[rank] = action, needed
        rank = rank_for(needed.stage, needed.kind)
    lines = ["the order of the ranks is cyclic, so these wait for each other forever:"]
    for waiting in list(chain)[list(chain).index(rank) :]:
        action, needed = chain[waiting]
        peer = rank_for(needed.stage, needed.kind)
        behind = schedule.rows[peer][position[peer]]
        lines.append(f"  {action} of rank {waiting} needs {needed}, which is behind {behind}")
        lines.append(f"  {schedule.marked(waiting, position[waiting])}")
    lines.append("run every action after all that it needs, on all ranks in one common order")
    return "\n".join(lines)
