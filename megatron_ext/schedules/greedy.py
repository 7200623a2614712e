"""A greedy list scheduler for split backwards under a cap on activations.

It fills the time line from the front. Whenever a rank is free it starts, among the actions whose
inputs are there, the one of best priority: I before F before W, so that W fills gaps and otherwise
runs only when the cap leaves nothing else. A search tries several priorities and limits on the
micro-batches in flight, and keeps the shortest table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.actions import Action

if TYPE_CHECKING:
    from megatron_ext.schedules.placement import Placement

__all__ = ["PRIORITIES", "Problem", "Rows", "search"]

Rows = tuple[tuple[Action, ...], ...]
Key = tuple[int, int, int]
Priority = Callable[[Action], Key]


def _late_forward(action: Action) -> Key:
    if action.kind == "F":
        return 1, -action.stage, action.microbatch
    return (0 if action.kind == "I" else 2), action.stage, action.microbatch


def _old_backward(action: Action) -> Key:
    if action.kind == "F":
        return 1, -action.stage, action.microbatch
    return (0 if action.kind == "I" else 2), action.microbatch, action.stage


def _early_forward(action: Action) -> Key:
    if action.kind == "F":
        return 1, action.stage, action.microbatch
    return (0 if action.kind == "I" else 2), action.stage, action.microbatch


def _old_forward(action: Action) -> Key:
    if action.kind == "F":
        return 1, action.microbatch, -action.stage
    return (0 if action.kind == "I" else 2), action.microbatch, action.stage


PRIORITIES: tuple[Priority, ...] = (_late_forward, _old_backward, _early_forward, _old_forward)


@dataclass(frozen=True)
class Problem:
    """What to schedule. All stages take the same time, one unit for each of F, I and W."""

    placement: Placement
    num_microbatches: int
    cap: int
    """Most stages' activations alive on one rank."""


def search(
    problem: Problem,
    limits: Iterable[int | None],
    bound: int,
    priorities: Sequence[Priority] = PRIORITIES,
) -> Rows:
    """Return the shortest table that the greedy scheduler finds.

    Args:
        problem: What to schedule.
        limits: Limits to try on the micro-batches between first F and last I; None: no limit.
        bound: A makespan that cannot be beaten; the search ends when it is reached.
        priorities: Priorities to try with each limit.

    Raises:
        ScheduleError: If the cap is too low for any table.
    """
    best: Rows | None = None
    shortest = 0
    for limit, priority in product(limits, priorities):
        attempt = _Attempt(problem, limit or problem.num_microbatches, priority)
        if not attempt.run():
            continue
        if best is None or attempt.makespan < shortest:
            best, shortest = tuple(map(tuple, attempt.rows)), attempt.makespan
        if shortest <= bound:
            break
    if best is None:
        raise ScheduleError(
            f"no order of {problem.num_microbatches} micro-batches keeps at most {problem.cap} "
            f"activations of a stage on each of {problem.placement.num_ranks} ranks; allow more"
        )
    return best


@dataclass
class _Rank:
    """One rank's time line so far and what it could do next."""

    free: int = 0
    live: int = 0
    ready: list[tuple[int, Key, Action]] = field(default_factory=list)
    """(time from which it may run, priority, action)"""
    choice: tuple[int, Key, Action] | None = None
    """(start, priority, action) of the best of them, or None if there is none."""


class _Attempt:
    """One greedy run."""

    def __init__(self, problem: Problem, limit: int, priority: Priority) -> None:
        self._problem = problem
        self._limit = limit
        self._priority = priority
        self._in_flight = 0
        self._ranks = [_Rank() for _ in range(problem.placement.num_ranks)]
        self.rows: list[list[Action]] = [[] for _ in self._ranks]

    @property
    def makespan(self) -> int:
        """End of the last action."""
        return max(rank.free for rank in self._ranks)

    def run(self) -> bool:
        """Place all actions; return False if the cap made that impossible."""
        self._release(0, Action(0, "F", 0))
        stages, m = self._problem.placement.num_stages, self._problem.num_microbatches
        for _ in range(3 * stages * m):
            number = self._next_rank()
            if number is None:
                return False
            self._commit(number)
        return True

    def _next_rank(self) -> int | None:
        """Return the rank that can start first, the lowest on ties."""
        found, earliest = None, 0
        for number, rank in enumerate(self._ranks):
            if rank.choice is not None and (found is None or rank.choice[0] < earliest):
                found, earliest = number, rank.choice[0]
        return found

    def _commit(self, number: int) -> None:
        rank = self._ranks[number]
        assert rank.choice is not None
        start, key, action = rank.choice
        rank.ready.remove(next(r for r in rank.ready if r[1] == key and r[2] == action))
        rank.free = start + 1
        self.rows[number].append(action)
        self._follow(rank, action)
        self._choose(rank)

    def _follow(self, rank: _Rank, action: Action) -> None:
        """Release what an action makes possible."""
        stage, kind, microbatch = action
        now, last = rank.free, self._problem.placement.num_stages - 1
        if kind == "F":
            rank.live += 1
            if stage == 0:
                self._in_flight += 1
                if microbatch + 1 < self._problem.num_microbatches:
                    self._release(now, Action(0, "F", microbatch + 1))
            above = Action(stage + 1, "F", microbatch)
            self._release(now, above if stage < last else action._replace(kind="I"))
        elif kind == "I":
            self._release(now, action._replace(kind="W"))
            if stage:
                self._release(now, Action(stage - 1, "I", microbatch))
            else:
                self._in_flight -= 1
        else:
            rank.live -= 1

    def _release(self, time: int, action: Action) -> None:
        rank = self._ranks[self._problem.placement.rank_of[action.stage]]
        rank.ready.append((time, self._priority(action), action))
        self._choose(rank)

    def _choose(self, rank: _Rank) -> None:
        may_grow = rank.live < self._problem.cap
        may_begin = self._in_flight < self._limit
        best: tuple[int, Key, Action] | None = None
        for time, key, action in rank.ready:
            if action.kind == "F" and not (may_grow and (action.stage or may_begin)):
                continue
            start = max(time, rank.free)
            if best is None or (start, key) < best[:2]:
                best = start, key, action
        rank.choice = best
