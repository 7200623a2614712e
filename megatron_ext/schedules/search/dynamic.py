"""Simulates a step with a dynamic order, event by event.

This is the counterpart to `simulate.py` and uses the same costs. In `simulate.py`, the table fixes
the order, whereas here, policies choose it as time advances.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import Clock, Timeline
from megatron_ext.schedules.table.communication import tensor_of
from megatron_ext.schedules.table.costs import UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.schedules.search.policies import Policy, PolicyFactory
    from megatron_ext.schedules.table.actions import Action, Schedule


class _RankEvent(NamedTuple):
    """An event on a rank. Arrivals sort before choices at the same time."""

    time: float
    chooses: bool
    """Whether the rank chooses an action. If not, a message arrives."""
    rank: int
    arrival: Message | None = None
    """A tensor (F or B, receiving stage, micro-batch) or its launch notice."""


@dataclass
class _RankState:
    """What a rank has run so far and what it runs now."""

    policy: Policy
    actions: list[Action] = field(default_factory=list)
    """The actions that have run so far, in order."""
    pairs: set[int] = field(default_factory=set)
    """The positions in `actions` where a pair starts."""
    running: Sequence[int] = ()
    """The table positions of the running action or pair."""
    host_free: float = 0.0
    """When the host may choose again."""


def simulate_dynamic(
    schedule: Schedule,
    policies: PolicyFactory,
    costs: Costs = UNIT,
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
    num_ranks = len(schedule.rows)
    policy_by_rank = [policies(rank) for rank in range(num_ranks)]
    step = _DynamicStep(schedule, policy_by_rank, costs)
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
        self,
        schedule: Schedule,
        policies: Sequence[Policy],
        costs: Costs,
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._clock = Clock(schedule, costs)
        self._states = [_RankState(policy) for policy in policies]
        # By tensor: its past or future arrival time.
        self._arrivals: dict[Message, float] = {}
        # Heap of pending events. Every rank starts by making a choice.
        self._events: list[_RankEvent] = []
        for rank, policy in enumerate(policies):
            self._events.append(_RankEvent(0.0, True, rank))
            policy.progress.hears_launches = bool(costs.launch)

    def run(self) -> None:
        """Process all events in chronological order."""
        while self._events:
            now, chooses, rank, arrival = heapq.heappop(self._events)
            state = self._states[rank]
            if arrival is not None:
                state.policy.progress.arrived(arrival)
            # Ignore events while the host is busy. A later event wakes the rank.
            if now < state.host_free:
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
        num_left = 0
        for state in self._states:
            num_left += state.policy.progress.num_left
        if num_left:
            raise ScheduleError(
                f"the policies for {self._schedule.label} never chose {num_left} actions"
            )
        rows = tuple(tuple(state.actions) for state in self._states)
        pairs = tuple(frozenset(state.pairs) for state in self._states)
        if not any(pairs):
            pairs = ()
        table = replace(self._schedule, rows=rows, pairs=pairs)
        starts = tuple(self._clock.starts)
        ends = tuple(self._clock.ends)
        return Timeline(table, self._costs, starts, ends)

    def _push(
        self,
        time: float,
        rank: int,
        arrival: Message | None = None,
    ) -> None:
        """Queue a message's arrival or, without a message, a time when a rank may choose."""
        chooses = arrival is None
        event = _RankEvent(time, chooses, rank, arrival)
        heapq.heappush(self._events, event)

    def _wake(self, rank: int, now: float) -> None:
        """Let a rank choose and start an action, unless its policy is still waiting."""
        state = self._states[rank]
        policy = state.policy
        progress = policy.progress
        ends = self._clock.ends[rank]
        device_free = ends[-1] if ends else 0.0
        for position in state.running:
            progress.finished(position)
            # The host becomes free when the previous action ends, which is when this action starts.
            progress.began()
        state.running = ()
        # Wait for the head of the table as long as the policy requires, unless the
        # choice is already certain while the device is still busy.
        patient_until = device_free + policy.wait()
        if now < patient_until:
            is_certain = now < device_free and policy.looks_ahead()
            if not is_certain:
                self._push(patient_until, rank)
                return
        chosen = policy.choose()
        if chosen is not None:
            state.running = policy.with_partner(chosen)
            self._start(rank, now, device_free)

    def _start(
        self,
        rank: int,
        now: float,
        device_free: float,
    ) -> None:
        """Start the action or pair that a rank has chosen."""
        state = self._states[rank]
        row = state.policy.progress.row
        actions = [row[position] for position in state.running]
        launched = now + self._costs.launch
        begin = max(launched, device_free)
        for action in actions:
            if action.kind != "W":
                needed = tensor_of(action)
                # No entry means that the tensor arrived before the rank made its
                # choice.
                arrival = self._arrivals.get(needed, 0.0)
                begin = max(begin, arrival)
        end = self._clock.run(rank, begin, *actions)
        if len(actions) == 2:
            state.pairs.add(len(state.actions))
        state.actions += actions
        for action in actions:
            self._send(action, rank, launched, end)
        # If launches take time, the host may launch one action ahead as soon as the
        # previous one has finished.
        previous_end = device_free if self._costs.launch else end
        state.host_free = max(launched, previous_end)
        self._push(state.host_free, rank)

    def _send(
        self,
        action: Action,
        rank: int,
        launched: float,
        end: float,
    ) -> None:
        """Queue the arrival of an action's results at the ranks that need them."""
        targets: list[Action] = []
        for target in self._schedule.feeds(action):
            if self._schedule.travels(action, target):
                targets.append(target)
        arrivals = self._clock.arrivals(action, end)
        for target, arrival in zip(targets, arrivals, strict=True):
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
