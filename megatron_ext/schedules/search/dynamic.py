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
from megatron_ext.message import Message
from megatron_ext.schedules.search.simulate import Clock, Timeline
from megatron_ext.schedules.table.costs import AHEAD, UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.message import MessageKind
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.schedules.table.actions import Action, Schedule

__all__ = ["simulate_dynamic"]


class _Event(NamedTuple):
    """An event on a rank. At equal times, arrivals come first."""

    time: float
    chooses: bool
    """Whether the rank chooses an action; else a message arrives."""
    rank: int
    arrival: Message | None = None
    """A tensor (F or B, stage that needs it, micro-batch), or the news of its launch."""


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
    run = _DeviceRun if costs.launch else _Run
    return run(schedule, policies, costs).timeline()


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
                self._note(event.rank, event.arrival)
            self._wake(event)
        left = sum(policy.progress.left for policy in self._policies)
        if left:
            raise ScheduleError(f"the policies of {self._schedule.label} left {left} actions")
        done = replace(self._schedule, rows=tuple(map(tuple, self._rows)))
        starts, ends = self._clock.starts, self._clock.ends
        return Timeline(done, self._costs, tuple(starts), tuple(ends))

    def _note(self, rank: int, message: Message) -> None:
        progress = self._policies[rank].progress
        if message.is_launch:
            progress.launched(message.launched)
        else:
            progress.arrived(message)

    def _wake(self, event: _Event) -> None:
        """Let an idle rank choose, after all arrivals at this time."""
        rank, ends = event.rank, self._clock.ends[event.rank]
        if ends and ends[-1] > event.time:
            return
        if not event.chooses:
            heapq.heappush(self._events, _Event(event.time, True, rank))
            return
        policy = self._after_last(rank)
        again = (ends[-1] if ends else 0.0) + policy.wait()
        if event.time < again:
            heapq.heappush(self._events, _Event(again, True, rank))
            return
        index = self._running[rank] = policy.choose()
        if index is not None:
            self._run(rank, policy.progress.row[index], event.time)

    def _after_last(self, rank: int) -> Policy:
        """Return the policy of a rank, which knows that the last action has run."""
        policy = self._policies[rank]
        running, self._running[rank] = self._running[rank], None
        if running is not None:
            policy.progress.finished(running)
        return policy

    def _run(self, rank: int, action: Action, now: float) -> None:
        self._rows[rank].append(action)
        made = self._clock.run_action(rank, action, now)
        if made is not None:
            self._announce(_output(action), made)
        heapq.heappush(self._events, _Event(self._clock.ends[rank][-1], True, rank))

    def _announce(self, message: Message, arrival: float) -> None:
        """Schedule the arrival of a message on the rank of its stage."""
        target = self._schedule.placement.rank_of[message.stage]
        heapq.heappush(self._events, _Event(arrival, False, target, message))


def _output(action: Action) -> Message:
    """Return what an action makes for the next stage, or the gradient for the one before."""
    kind: MessageKind = "F" if action.kind == "F" else "B"
    return Message(kind, action.stage + (1 if kind == "F" else -1), action.microbatch)


def _input(action: Action) -> Message:
    """Return the tensor of another stage that an F, B or I needs."""
    return Message("F" if action.kind == "F" else "B", action.stage, action.microbatch)


class _DeviceRun(_Run):
    """The state of one simulated step on devices that run behind their hosts.

    The rule is that of `runtime/ordering.py`: an action is chosen while the last one runs if the
    policy looks ahead, otherwise when it has ended. Its launch takes time of the host, and the next
    rank hears of it at once, as between devices of one host (`transport/direct.py`).
    """

    def __init__(self, schedule: Schedule, policies: Callable[[int], Policy], costs: Costs) -> None:
        super().__init__(schedule, policies, costs)
        self._launched = [0.0] * len(schedule.rows)
        """By rank: when its last launch was done."""
        self._arrivals: dict[Message, float] = {}
        """When tensors of other ranks arrive, or have arrived."""
        for policy in self._policies:
            policy.progress.hears_launches = True

    def _wake(self, event: _Event) -> None:
        """Let a rank choose, after all arrivals at this time, if its host and its policy may."""
        rank, ends = event.rank, self._clock.ends[event.rank]
        idle = ends[-1] if ends else 0.0
        free = max(self._launched[rank], ends[-AHEAD] if len(ends) >= AHEAD else 0.0)
        if not event.chooses or event.time < free:
            heapq.heappush(self._events, _Event(max(event.time, free), True, rank))
            return
        policy = self._after_last(rank)
        again = idle + policy.wait()
        if event.time < again and not (event.time < idle and policy.looks_ahead()):
            heapq.heappush(self._events, _Event(again, True, rank))
            return
        index = self._running[rank] = policy.choose()
        if index is not None:
            self._launch(rank, policy.progress.row[index], event.time, idle)

    def _launch(self, rank: int, action: Action, now: float, idle: float) -> None:
        """Run an action once it is launched, its input is there and the device is idle."""
        launched = self._launched[rank] = now + self._costs.launch
        self._rows[rank].append(action)
        there = 0.0 if action.kind == "W" else self._arrivals.get(_input(action), 0.0)
        made = self._clock.run_action(rank, action, max(launched, idle, there))
        if made is not None:
            self._tell(rank, _output(action), launched, made)
        heapq.heappush(self._events, _Event(launched, True, rank))

    def _tell(self, rank: int, message: Message, launched: float, made: float) -> None:
        """Announce an output that is launched."""
        if self._schedule.placement.rank_of[message.stage] == rank:
            self._announce(message, launched)  # it is there for everything launched later
            return
        self._arrivals[message] = made
        self._announce(message.launch, launched)
        self._announce(message, made)
