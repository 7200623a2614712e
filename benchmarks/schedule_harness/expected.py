"""Simulates this package's systems in scenarios, as on a machine without overhead.

The draws are those of the measurement, so the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.actions import KINDS
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.transforms import split_backwards

from .bound import shortest
from .noise import SCENARIOS, NoisyTimes
from .scenarios import Cell, Measured
from .systems import Own

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind, Schedule, Timeline

    from .ops import Sizes
    from .systems import System

__all__ = ["add", "costs_of", "expect", "limits"]

_LATENCY = 0.01
"""Of every message, on top of the scenario's: that of shared memory, in forwards."""


@dataclass(frozen=True)
class _Drawn(Costs):
    """The costs of one draw; forward, input and weight gradient are 1."""

    times: NoisyTimes | None = None

    def action_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return what the scenario makes of the time of each action."""
        assert self.times is not None
        share = schedule.pp / schedule.num_stages
        return _action_factors(self.times, share, schedule.num_stages, schedule.num_microbatches)

    def link_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return the latency of each message, by the stage that makes it."""
        assert self.times is not None
        return _latencies(self.times, schedule.num_stages, schedule.num_microbatches)


@cache
def _action_factors(
    times: NoisyTimes, share: float, num_stages: int, num_microbatches: int
) -> dict[Kind, list[float]]:
    return {
        kind: [
            times.seconds(kind, stage, m) / (share * (2 if kind == "B" else 1))
            for stage in range(num_stages)
            for m in range(num_microbatches)
        ]
        for kind in KINDS
    }


@cache
def _latencies(
    times: NoisyTimes, num_stages: int, num_microbatches: int
) -> dict[Kind, list[float]]:
    def latency(kind: Literal["F", "B"], target: int, m: int) -> float:
        inside = 0 <= target < num_stages
        return _LATENCY + times.latency_s(kind, target, m) if inside else 0.0

    stages, numbers = range(num_stages), range(num_microbatches)
    return {
        "F": [latency("F", stage + 1, m) for stage in stages for m in numbers],
        "B": [latency("B", stage - 1, m) for stage in stages for m in numbers],
    }


def expect(systems: Sequence[System], sizes: Sizes, names: Sequence[str]) -> Measured:
    """Simulate the systems of this package; peers are left out."""
    found = Measured(3 * sizes.num_microbatches)
    add(found, systems, sizes, names)
    return found


def add(found: Measured, systems: Sequence[System], sizes: Sizes, names: Sequence[str]) -> None:
    """Add systems of this package in some scenarios."""
    for name in names:
        cells = found.cells.setdefault(name, {})
        for system in systems:
            if not isinstance(system, Own):
                continue
            try:
                cells[system.name] = _cell(system, sizes, name)
            except ScheduleError as error:
                found.failures[system.name] = str(error)


def limits(system: Own, sizes: Sizes, name: str) -> list[float]:
    """Return how much faster than a fixed order any order can be at most, draw by draw.

    With whatever memory, and with split backwards: see `bound.py`.
    """
    pipeline = system.pipeline(sizes.pp, sizes.num_microbatches)
    split = split_backwards(pipeline.full)
    return [
        _simulated(system, sizes, name, number).makespan
        / shortest(split, costs_of(system, sizes, name, number))
        for number in range(sizes.steps)
    ]


def _cell(system: Own, sizes: Sizes, name: str) -> Cell:
    system.check(sizes.pp, sizes.num_microbatches)
    cell = Cell([])
    for number in range(sizes.steps):
        timeline = _simulated(system, sizes, name, number)
        cell.seconds.append([timeline.makespan])
        cell.peak_live = max(cell.peak_live, timeline.peak_activations)
    return cell


def _simulated(system: Own, sizes: Sizes, name: str, number: int) -> Timeline:
    pipeline = system.pipeline(sizes.pp, sizes.num_microbatches)
    schedule = pipeline.full
    costs = costs_of(system, sizes, name, number)
    if pipeline.dynamic is None:
        return simulate(schedule, costs)
    return simulate_dynamic(
        schedule, lambda rank: pipeline.policy(pipeline.num_microbatches, rank), costs
    )


def costs_of(system: Own, sizes: Sizes, name: str, number: int) -> Costs:
    """Return what everything costs in one draw of a scenario."""
    rank_of = system.placement(sizes.pp).rank_of
    times = NoisyTimes(1.0, system.share(sizes.pp), SCENARIOS[name], rank_of, 0, number)
    # Jitter other than 0 makes the simulator ask for factors.
    return _Drawn(latency=1.0, jitter=1.0, link_jitter=1.0, times=times)
