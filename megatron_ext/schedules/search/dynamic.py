"""Simulates a step with a dynamic order, event by event.

This is the counterpart to `simulate.py` and uses the same costs. In `simulate.py`, the table fixes
the order, whereas here, policies choose it as time advances.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import Clock, Timeline
from megatron_ext.schedules.table.communication import tensor_of
from megatron_ext.schedules.table.costs import UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.schedules.table.actions import Action, Schedule


class _RankEvent(NamedTuple):
    """An event on a rank. Arrivals sort before choices at the same time."""

    time: float
    chooses: bool
    """Whether the rank chooses an action. If not, a message arrives."""
    rank: int
    arrival: Message | None = None
    """A tensor (F or B, receiving stage, micro-batch) or its launch notice."""


def simulate_dynamic(
    schedule: Schedule, policies: Callable[[int], Policy], costs: Costs = UNIT
) -> Timeline:
    """Return the timeline of a step in which every rank's policy chooses the rank's order.

    Args:
        schedule: The table that contains the actions to run.
        policies: Creates a rank's policy for one step.
        costs: Durations of actions and latencies of links.

    Returns:
        The timeline. The rows of its schedule list the actions in the order in which they ran.

    Raises:
        ScheduleError: The policies stopped choosing before all actions had run.
    """
    step = _DynamicStep(
        schedule, [policies(rank) for rank in range(len(schedule.rows))], costs
    )
    step.run()
    return step.timeline()


class _DynamicStep:
    """A simulated step: the ranks, their policies and the pending events.

    If launches take time, a device runs behind its host. As in `runtime/ordering.py`, if the policy
    looks ahead, the host chooses the next action while the last one is still running. Otherwise, it
    chooses after the last one has finished. The next rank is notified of a launch immediately, as
    between devices on the same host (`transport/direct.py`).
    """

    def __init__(
        self, schedule: Schedule, policies: Sequence[Policy], costs: Costs
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._policies = policies
        self._clock = Clock(schedule, costs)
        ranks = range(len(schedule.rows))
        # By rank: the actions that have run so far, in order.
        self._rows: list[list[Action]] = [[] for _ in ranks]
        # By rank: the positions in that order where a pair starts.
        self._pairs: list[set[int]] = [set() for _ in ranks]
        # By rank: the table positions of the running action or pair.
        self._running: list[Sequence[int]] = [() for _ in ranks]
        # By rank: when its host may choose again.
        self._host_free = [0.0 for _ in ranks]
        # By tensor: its past or future arrival time.
        self._arrivals: dict[Message, float] = {}
        # Heap of pending events. Every rank starts by making a choice.
        self._events = [_RankEvent(0.0, True, rank) for rank in ranks]
        for policy in policies:
            policy.progress.hears_launches = bool(costs.launch)

    def run(self) -> None:
        """Process all events in chronological order."""
        while self._events:
            now, chooses, rank, arrival = heapq.heappop(self._events)
            if arrival is not None:
                self._policies[rank].progress.arrived(arrival)
            # Ignore events while the host is busy. A later event wakes the rank.
            if now < self._host_free[rank]:
                continue
            if chooses:
                self._wake(rank, now)
            else:
                # Process everything that arrives at this time before the rank makes a
                # choice.
                self._push(now, rank)

    def timeline(self) -> Timeline:
        """Return the step's timeline.

        Raises:
            ScheduleError: Some actions did not run.
        """
        num_left = sum(policy.progress.num_left for policy in self._policies)
        if num_left:
            raise ScheduleError(
                f"the policies for {self._schedule.label} never chose {num_left} actions"
            )
        pairs: tuple[frozenset[int], ...] = ()
        if any(self._pairs):
            pairs = tuple(map(frozenset, self._pairs))
        rows = tuple(map(tuple, self._rows))
        table = replace(self._schedule, rows=rows, pairs=pairs)
        return Timeline(
            table, self._costs, tuple(self._clock.starts), tuple(self._clock.ends)
        )

    def _push(self, time: float, rank: int, arrival: Message | None = None) -> None:
        """Queue a message's arrival or, without a message, a time when a rank may choose."""
        heapq.heappush(self._events, _RankEvent(time, arrival is None, rank, arrival))

    def _wake(self, rank: int, now: float) -> None:
        """Let a rank choose and start an action, unless its policy is still waiting."""
        policy = self._policies[rank]
        ends = self._clock.ends[rank]
        device_free = ends[-1] if ends else 0.0
        for position in self._running[rank]:
            policy.progress.finished(position)
            # The host becomes free when the previous action ends, which is when this action starts.
            policy.progress.began()
        self._running[rank] = ()
        # Wait for the head of the table as long as the policy requires, unless the
        # choice is already certain while the device is still busy.
        patient_until = device_free + policy.wait()
        if now < patient_until and not (now < device_free and policy.looks_ahead()):
            self._push(patient_until, rank)
            return
        chosen = policy.choose()
        if chosen is not None:
            self._running[rank] = policy.with_partner(chosen)
            self._start(rank, now, device_free)

    def _start(self, rank: int, now: float, device_free: float) -> None:
        """Start the action or pair that a rank has chosen."""
        row = self._policies[rank].progress.row
        actions = [row[position] for position in self._running[rank]]
        launched = now + self._costs.launch
        begin = max(launched, device_free)
        for action in actions:
            if action.kind != "W":
                # No entry means that the tensor arrived before the rank made its
                # choice.
                begin = max(begin, self._arrivals.get(tensor_of(action), 0.0))
        end = self._clock.run(rank, begin, *actions)
        if len(actions) == 2:
            self._pairs[rank].add(len(self._rows[rank]))
        self._rows[rank] += actions
        for action in actions:
            self._send(action, rank, launched, end)
        # If launches take time, the host may launch one action ahead as soon as the
        # previous one has finished.
        previous_end = device_free if self._costs.launch else end
        self._host_free[rank] = max(launched, previous_end)
        self._push(self._host_free[rank], rank)

    def _send(self, action: Action, rank: int, launched: float, end: float) -> None:
        """Queue the arrival of an action's results at the ranks that need them."""
        targets = []
        for target in self._schedule.feeds(action):
            if self._schedule.travels(action, target):
                targets.append(target)
        for target, arrival in zip(
            targets, self._clock.arrivals(action, end), strict=True
        ):
            message = tensor_of(target)
            target_rank = self._schedule.placement.rank_of[target.stage]
            noticed = arrival
            if self._costs.launch:
                if target_rank == rank:
                    # Every action that is launched later on the same rank can use the
                    # result.
                    noticed = launched
                else:
                    self._arrivals[message] = arrival
                    self._push(launched, target_rank, message.notice)
            self._push(noticed, target_rank, message)
