"""Simulates a step in dynamic order, event by event.

The counterpart of `simulate.py`, with the same costs: there the order is given and the times
follow; here policies choose the order as time advances. The result is the timeline of that order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.messages import Message
from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.search.simulate import Clock, Timeline

if TYPE_CHECKING:
    from megatron_ext.messages import MessageKind
    from megatron_ext.schedules.representation.actions import Action, Schedule
    from megatron_ext.schedules.search.policies import Policy

__all__ = ["simulate_dynamic"]


class _Event(NamedTuple):
    """An event on a rank. At equal times, arrivals come first."""

    time: float
    chooses: bool
    """Whether the rank chooses an action; else a tensor arrives."""
    rank: int
    arrival: Message | None = None
    """(F or B, stage that needs it, micro-batch)."""


def simulate_dynamic(
    schedule: Schedule, policies: Callable[[int], Policy], costs: Costs = UNIT
) -> Timeline:
    """Return the timeline of a step in which each rank's policy chooses the order.

    Args:
        schedule: The static table that the policies start from.
        policies: Factory of a rank's policy.
        costs: Durations of actions and latencies of links.

    Returns:
        A timeline; its schedule has the rows in the order in which they ran.

    Raises:
        ScheduleError: The policies stopped before all actions had run.
    """
    return _Run(schedule, policies, costs).timeline()


class _Run:
    """The state of one simulated step."""

    def __init__(self, schedule: Schedule, policies: Callable[[int], Policy], costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._clock = Clock(schedule, costs)
        self._policies = [policies(rank) for rank in range(len(schedule.rows))]
        self._rows: list[list[Action]] = [[] for _ in schedule.rows]
        self._running: list[int | None] = [None] * len(schedule.rows)
        self._events = [_Event(0.0, True, rank) for rank in range(len(schedule.rows))]

    def timeline(self) -> Timeline:
        """Run everything."""
        while self._events:
            event = heapq.heappop(self._events)
            if event.arrival is not None:
                self._policies[event.rank].progress.arrived(event.arrival)
            self._wake(event)
        left = sum(policy.progress.left for policy in self._policies)
        if left:
            raise ScheduleError(f"the policies of {self._schedule.label} left {left} actions")
        done = replace(self._schedule, rows=tuple(map(tuple, self._rows)))
        starts, ends = self._clock.starts, self._clock.ends
        return Timeline(done, self._costs, tuple(starts), tuple(ends))

    def _wake(self, event: _Event) -> None:
        """Let an idle rank choose, after all arrivals at this time."""
        rank, ends = event.rank, self._clock.ends[event.rank]
        if ends and ends[-1] > event.time:
            return
        if not event.chooses:
            heapq.heappush(self._events, _Event(event.time, True, rank))
            return
        policy = self._policies[rank]
        running, self._running[rank] = self._running[rank], None
        if running is not None:
            policy.progress.finished(running)
        again = (ends[-1] if ends else 0.0) + policy.wait()
        if event.time < again:
            heapq.heappush(self._events, _Event(again, True, rank))
            return
        index = self._running[rank] = policy.choose()
        if index is not None:
            self._run(rank, policy.progress.row[index], event.time)

    def _run(self, rank: int, action: Action, now: float) -> None:
        self._rows[rank].append(action)
        made = self._clock.run_action(rank, action, now)
        if made is not None:
            self._announce(action, made)
        heapq.heappush(self._events, _Event(self._clock.ends[rank][-1], True, rank))

    def _announce(self, action: Action, arrival: float) -> None:
        """Schedule the arrival of an action's output on the rank of the next stage."""
        kind: MessageKind = "F" if action.kind == "F" else "B"
        stage = action.stage + (1 if kind == "F" else -1)
        target = self._schedule.placement.rank_of[stage]
        event = _Event(arrival, False, target, Message(kind, stage, action.microbatch))
        heapq.heappush(self._events, event)
