"""A step in dynamic order, simulated event by event.

The counterpart of `simulate.py`, with the same costs: there the order is given and the times
follow; here policies choose the order as time advances.
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
    """An event on a rank. At equal times, arrivals come first."""

    time: float
    chooses: bool
    """Whether the rank chooses an action; else a message arrives."""
    rank: int
    arrival: Message | None = None
    """A tensor (F or B, stage that needs it, micro-batch), or the notice of its launch."""


def simulate_dynamic(
    schedule: Schedule, policies: Callable[[int], Policy], costs: Costs = UNIT
) -> Timeline:
    """Return the timeline of a step in which each rank's policy chooses the order.

    Returns:
        A timeline; its schedule has the rows in the order in which they ran.

    Raises:
        ScheduleError: The policies stopped before all actions had run.
    """
    ranks = range(len(schedule.rows))
    clock, chosen = Clock(schedule, costs), [policies(rank) for rank in ranks]
    starts, ends = clock.starts, clock.ends
    rows: list[list[Action]] = [[] for _ in ranks]
    pairs: list[set[int]] = [set() for _ in ranks]
    running: list[Sequence[int]] = [()] * len(ranks)
    # A launch that takes time is what tells a device that runs behind its host from one that does
    # not. The rule for it is that of `runtime/ordering.py`: an action is chosen while the last one
    # runs if the policy looks ahead, otherwise when it has ended. The next rank hears of a launch
    # at once, as between devices of one host (`transport/direct.py`).
    for policy in chosen:
        policy.progress.hears_launches = bool(costs.launch)
    # By rank: when its host may choose again.
    free = [0.0 for _ in ranks]
    # When tensors arrive, or have arrived.
    there: dict[Message, float] = {}
    events = [_RankEvent(0.0, True, rank) for rank in ranks]

    def wake(rank: int, now: float) -> None:
        """Let a rank choose, if its policy does not wait; start what it chooses."""
        policy, idle = chosen[rank], ends[rank][-1] if ends[rank] else 0.0
        for done in running[rank]:
            policy.progress.finished(done)
            policy.progress.began()  # its host is free again when the action before it has ended
        running[rank] = ()
        again = idle + policy.wait()
        if now < again and not (now < idle and policy.looks_ahead()):
            heapq.heappush(events, _RankEvent(again, True, rank))
            return
        index = policy.choose()
        if index is None:
            return
        running[rank] = policy.with_partner(index)
        actions = [policy.progress.row[each] for each in running[rank]]
        launched = now + costs.launch
        inputs = [there.get(tensor_of(action), 0.0) for action in actions if action.kind != "W"]
        begin = max(launched, idle, *inputs)
        end = clock.run(rank, begin, *actions)
        if len(actions) == 2:
            pairs[rank].add(len(rows[rank]))
        rows[rank] += actions
        for action in actions:
            fed = (to for to in schedule.feeds(action) if schedule.travels(action, to))
            for to, arrival in zip(fed, clock.arrivals(action, end), strict=True):
                message, target = tensor_of(to), schedule.placement.rank_of[to.stage]
                if costs.launch and target != rank:
                    there[message] = arrival
                    heapq.heappush(events, _RankEvent(launched, False, target, message.notice))
                # On its rank it is there for everything launched later.
                known = launched if costs.launch and target == rank else arrival
                heapq.heappush(events, _RankEvent(known, False, target, message))
        # Behind the host one more may be launched once what ran before it has ended.
        free[rank] = max(launched, idle if costs.launch else end)
        heapq.heappush(events, _RankEvent(free[rank], True, rank))

    while events:
        now, chooses, rank, arrival = heapq.heappop(events)
        if arrival is not None:
            chosen[rank].progress.arrived(arrival)
        if now >= free[rank] and chooses:
            wake(rank, now)
        elif now >= free[rank]:
            # At this time again, behind all arrivals: a rank chooses once it knows them all.
            heapq.heappush(events, _RankEvent(now, True, rank))
    left = sum(policy.progress.left for policy in chosen)
    if left:
        raise ScheduleError(f"the policies of {schedule.label} left {left} actions")
    ran = replace(
        schedule,
        rows=tuple(map(tuple, rows)),
        pairs=tuple(map(frozenset, pairs)) if any(pairs) else (),
    )
    return Timeline(ran, costs, tuple(starts), tuple(ends))
