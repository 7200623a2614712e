"""A lower bound of the step time, for any order and unlimited memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules import Costs, Kind, Schedule

__all__ = ["shortest"]


@dataclass(frozen=True)
class _Job:
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
    chains = _Chains(schedule, costs)
    return max(_machine([chains.job(*action[:3]) for action in row]) for row in schedule.rows)


def _machine(jobs: list[_Job]) -> float:
    jobs = sorted(jobs, key=lambda job: job.release)
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


class _Chains:
    """Work before and after each action in its own micro-batch."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._durations = costs.durations(schedule)
        self._factors, self._links = costs.action_factors(schedule), costs.link_factors(schedule)
        self._latency = costs.latency
        self._jobs: dict[tuple[int, Kind, int], _Job] = {}
        for microbatch in range(schedule.num_microbatches):
            self._follow(microbatch)

    def job(self, stage: int, kind: Kind, microbatch: int) -> _Job:
        """Return an action as a job."""
        return self._jobs[stage, kind, microbatch]

    def _follow(self, m: int) -> None:
        """Make the jobs of one micro-batch: down the stages, then back, with W beside."""
        stages = range(self._schedule.num_stages)
        chain: list[tuple[int, Kind]] = [(s, "F") for s in stages]
        chain += [(s, "I") for s in reversed(stages)]
        release, releases = 0.0, []
        for stage, kind in chain:
            releases.append(release)
            release += self._time(kind, stage, m) + self._under_way(kind, stage, m)
        tail = 0.0
        for (stage, kind), release in zip(reversed(chain), reversed(releases), strict=True):
            duration = self._time(kind, stage, m)
            tail += self._under_way(kind, stage, m)
            if kind == "I":
                weight = self._time("W", stage, m)
                self._jobs[stage, "W", m] = _Job(release + duration, weight, 0.0)
                tail = max(tail, weight)
            self._jobs[stage, kind, m] = _Job(release, duration, tail)
            tail += duration

    def _time(self, kind: Kind, stage: int, m: int) -> float:
        key = stage * self._schedule.num_microbatches + m
        return self._durations[kind][stage] * self._factors[kind][key]

    def _under_way(self, kind: Kind, stage: int, m: int) -> float:
        """Latency of what an action makes; none at the ends of the pipeline."""
        hop = stage if kind == "F" else stage - 1
        if not 0 <= hop < self._schedule.num_stages - 1:
            return 0.0
        if self._schedule.placement.hops[hop] == "local":
            return 0.0
        key = stage * self._schedule.num_microbatches + m
        return self._latency * self._links["F" if kind == "F" else "B"][key]
