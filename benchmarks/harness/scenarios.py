"""Measures and simulates systems in disturbed steps, and computes what no order can beat."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from megatron_ext.schedules import Kind, Schedule, Timeline
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.actions import KINDS
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.transforms import split_backwards

from . import ranks
from .metrics import Figures, evaluate
from .ops import SCENARIOS, NoisyTimes, OpTimes, Sizes
from .systems import Own, System

_LATENCY = 0.01
"""Latency of every message on top of the scenario's: that of shared memory, in forwards."""


def noisy(system: System, sizes: Sizes, name: str) -> list[NoisyTimes]:
    """Return a scenario's draws for a system's stages: one for each of `sizes.steps`."""
    share = system.share(sizes.pp)
    rank_of = system.placement(sizes.pp).rank_of
    return [
        NoisyTimes(sizes.forward_s, share, SCENARIOS[name], rank_of, 0, draw)
        for draw in range(sizes.steps)
    ]


def measure(
    system: System,
    sizes: Sizes,
    names: Sequence[str],
    repetitions: int = 1,
    **where: Any,
) -> dict[str, Figures]:
    """Run a system in these scenarios, with `sizes.steps` draws each.

    Scenarios with late messages run separately, because stages or transports wait in them. `where`
    specifies the ranks' device and environment, see `ranks.run`.

    Raises:
        ScheduleError: The schedule does not exist for this size.
        RanksFailed: A rank failed.
    """
    system.check(sizes.pp, sizes.num_microbatches)
    figures_by_name: dict[str, Figures] = {}
    for waits in (False, True):
        together = [name for name in names if SCENARIOS[name].delays_messages == waits]
        if not together:
            continue
        print(f"pp {sizes.pp}: {system.name}: {', '.join(together)}", file=sys.stderr)
        # Repeat all draws in turn, so a busy moment of the machine
        # affects each draw only once.
        draws: dict[str, Sequence[OpTimes]] = {}
        for name in together:
            if name == "quiet":
                draws[name] = [system.times(sizes)] * sizes.steps  # including slices
            else:
                draws[name] = noisy(system, sizes, name)
        times: list[OpTimes] = []
        for draws_of_name in draws.values():
            times += [*draws_of_name] * repetitions
        repeats = 2 * repetitions * len(together)  # late messages lengthen steps
        by_rank = ranks.run(
            ranks.measure, system, sizes, times, waits, repeats=repeats, **where
        )
        count = repetitions * sizes.steps
        for index, name in enumerate(together):
            steps = [
                records[index * count : (index + 1) * count] for records in by_rank
            ]
            figures_by_name[name] = evaluate(
                steps, system.placement(sizes.pp), draws[name]
            )
    return figures_by_name


def expect(system: System, sizes: Sizes, names: Sequence[str]) -> dict[str, Figures]:
    """Simulate a system in these scenarios without machine overhead. Times are in forwards."""
    assert isinstance(system, Own), "other runtimes are not simulated"
    figures_by_name = {}
    for name in names:
        lines = [
            simulated(system, sizes.pp, sizes.num_microbatches, _Drawn(times=times))
            for times in noisy(system, replace(sizes, forward_s=1.0), name)
        ]
        peak = max(line.peak_activations for line in lines)
        figures_by_name[name] = Figures([line.makespan for line in lines], peak)
    return figures_by_name


def limits(system: Own, sizes: Sizes, name: str) -> list[float]:
    """Return, draw by draw, how much faster than a fixed order any order can be at most.

    The bound allows unlimited memory and split backwards.
    """
    size = sizes.pp, sizes.num_microbatches
    split = split_backwards(system.pipeline(*size).full)
    draws = [
        _Drawn(times=times)
        for times in noisy(system, replace(sizes, forward_s=1.0), name)
    ]
    return [
        simulated(system, *size, costs).makespan / shortest(split, costs)
        for costs in draws
    ]


def simulated(system: Own, pp: int, num_microbatches: int, costs: Costs) -> Timeline:
    """Return a simulated step."""
    pipeline = system.pipeline(pp, num_microbatches)
    if pipeline.dynamic is None:
        return simulate(pipeline.full, costs)
    return simulate_dynamic(
        pipeline.full,
        lambda rank: pipeline.policy(pipeline.num_microbatches, rank),
        costs,
    )


@dataclass(frozen=True)
class _Drawn(Costs):
    """The costs of one draw. Forward, input gradient and weight gradient are 1."""

    times: NoisyTimes = field(kw_only=True)
    latency: float = 1.0
    # A nonzero jitter makes the simulator use the factors.
    jitter: float = 1.0
    link_jitter: float = 1.0

    def action_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        return _factors(self.times, schedule.num_stages, schedule.num_microbatches)[0]

    def link_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        return _factors(self.times, schedule.num_stages, schedule.num_microbatches)[1]


# Cached, because every policy and table in a comparison needs the same draws.
@cache
def _factors(
    times: NoisyTimes, num_stages: int, num_microbatches: int
) -> tuple[dict[Kind, list[float]], dict[Kind, list[float]]]:
    """Return the factors of actions, and the latencies of messages by sending stage."""

    def latency(kind: Kind, target: int, m: int) -> float:
        inside = 0 <= target < num_stages
        return _LATENCY + times.latency_s(kind, target, m) if inside else 0.0

    places = [
        (stage, m) for stage in range(num_stages) for m in range(num_microbatches)
    ]
    actions: dict[Kind, list[float]] = {}
    for kind in KINDS:
        nominal = times.share * (2 if kind == "B" else 1)
        actions[kind] = [times.seconds(kind, *place) / nominal for place in places]
    return actions, {
        "F": [latency("F", stage + 1, m) for stage, m in places],
        "B": [latency("B", stage - 1, m) for stage, m in places],
    }


class _Job(NamedTuple):
    """An action as a job for its rank. Times use the unit of the costs."""

    release: float
    """Earliest start in any order: the length of the chain of inputs."""
    duration: float
    tail: float
    """Minimum time of the chain of actions that depend on it."""


def shortest(schedule: Schedule, costs: Costs) -> float:
    """Return a time that no order of a table's actions can beat.

    Each rank is a machine whose jobs have release times and tails. If a single machine may
    interrupt its jobs, its shortest schedule always runs the released job with the longest tail
    (Jackson's rule), and is never longer than without interruptions. The bound is the maximum over
    the ranks.

    Args:
        schedule: The table, in which all backwards are split.
        costs: Times of actions and links.
    """
    durations = costs.durations(schedule)
    factors = costs.action_factors(schedule)
    links = costs.link_factors(schedule)
    last = schedule.num_stages - 1
    jobs: dict[tuple[int, Kind, int], _Job] = {}

    def time(kind: Kind, stage: int, m: int) -> float:
        return (
            durations[kind][stage]
            * factors[kind][stage * schedule.num_microbatches + m]
        )

    def under_way(kind: Kind, stage: int, m: int) -> float:
        """Return the latency of an action's result, which is 0 at the ends of the pipeline."""
        hop = stage if kind == "F" else stage - 1
        if not 0 <= hop < last or schedule.placement.hops[hop] == "local":
            return 0.0
        latencies = links["F" if kind == "F" else "B"]
        return costs.latency * latencies[stage * schedule.num_microbatches + m]

    for m in range(schedule.num_microbatches):
        # Forward through the stages, then back, with each W as a side branch.
        chain: list[tuple[Kind, int]] = [("F", stage) for stage in range(last + 1)]
        chain += [("I", stage) for stage in range(last, -1, -1)]
        release = 0.0
        releases = []
        for kind, stage in chain:
            releases.append(release)
            release += time(kind, stage, m) + under_way(kind, stage, m)
        tail = 0.0
        for (kind, stage), release in zip(
            reversed(chain), reversed(releases), strict=True
        ):
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
    """(negative tail, remaining time) of released jobs."""
    now = end = 0.0
    position = 0
    while position < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[position].release)
        while position < len(jobs) and jobs[position].release <= now:
            heapq.heappush(waiting, (-jobs[position].tail, jobs[position].duration))
            position += 1
        minus_tail, remaining = heapq.heappop(waiting)
        next_release = jobs[position].release if position < len(jobs) else float("inf")
        if now + remaining > next_release:
            heapq.heappush(waiting, (minus_tail, now + remaining - next_release))
            now = next_release
        else:
            now += remaining
            end = max(end, now - minus_tail)
    return end
