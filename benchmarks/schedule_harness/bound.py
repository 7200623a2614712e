"""A lower bound of the step time, for any order and unlimited memory."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from megatron_ext.schedules import Costs, Kind, Schedule


class _Job(NamedTuple):
    """An action for the rank that runs it; times in the unit of the costs."""

    release: float
    """No order can start it earlier: the chain of what it needs."""
    duration: float
    tail: float
    """How long the chain of what needs it takes at least."""


def shortest(schedule: Schedule, costs: Costs) -> float:
    """Return a time that no order of the actions of a table can beat.

    Each rank is a machine whose jobs have release times and tails. The shortest schedule of one
    machine that may interrupt its jobs always runs the released job of the longest tail (Jackson's
    rule), and is never longer than one that may not. The bound is the longest of the ranks'.

    Args:
        schedule: The table, whose backwards are all split.
        costs: Times of actions and links.
    """
    durations, factors = costs.durations(schedule), costs.action_factors(schedule)
    links, last = costs.link_factors(schedule), schedule.num_stages - 1
    jobs: dict[tuple[int, Kind, int], _Job] = {}

    def time(kind: Kind, stage: int, m: int) -> float:
        return durations[kind][stage] * factors[kind][stage * schedule.num_microbatches + m]

    def under_way(kind: Kind, stage: int, m: int) -> float:
        """Latency of what an action makes; none at the ends of the pipeline."""
        hop = stage if kind == "F" else stage - 1
        if not 0 <= hop < last or schedule.placement.hops[hop] == "local":
            return 0.0
        made = links["F" if kind == "F" else "B"]
        return costs.latency * made[stage * schedule.num_microbatches + m]

    for m in range(schedule.num_microbatches):
        # Down the stages, then back, with W beside.
        chain: list[tuple[Kind, int]] = [("F", stage) for stage in range(last + 1)]
        chain += [("I", stage) for stage in range(last, -1, -1)]
        release, releases = 0.0, []
        for kind, stage in chain:
            releases.append(release)
            release += time(kind, stage, m) + under_way(kind, stage, m)
        tail = 0.0
        for (kind, stage), release in zip(reversed(chain), reversed(releases), strict=True):
            duration = time(kind, stage, m)
            tail += under_way(kind, stage, m)
            if kind == "I":
                weight = time("W", stage, m)
                jobs[stage, "W", m] = _Job(release + duration, weight, 0.0)
                tail = max(tail, weight)
            jobs[stage, kind, m] = _Job(release, duration, tail)
            tail += duration
    return max(_machine([jobs[action[:3]] for action in row]) for row in schedule.rows)


def _machine(jobs: list[_Job]) -> float:
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []
    """(minus the tail, time left) of what is released."""
    now = end = 0.0
    position = 0
    while position < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[position].release)
        while position < len(jobs) and jobs[position].release <= now:
            heapq.heappush(waiting, (-jobs[position].tail, jobs[position].duration))
            position += 1
        minus_tail, left = heapq.heappop(waiting)
        next_release = jobs[position].release if position < len(jobs) else float("inf")
        if now + left > next_release:
            heapq.heappush(waiting, (minus_tail, now + left - next_release))
            now = next_release
        else:
            now += left
            end = max(end, now - minus_tail)
    return end
