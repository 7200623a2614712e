"""Simulates a table: the time of each action, the makespan of the step, and the activations alive.

Every rank runs its list in order; an action starts as soon as the rank is idle and its inputs have
arrived, on a device once its host has launched it. A full backward sends its input gradient when it
ends, a split one at the end of I. Activations are alive from the start of F to the end of B or W.
Times are in the unit of the costs, activations in Ma (memory.py). Needs neither Megatron nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING

from megatron_ext.schedules.search.replay import Replay
from megatron_ext.schedules.table.communication import Transfer, lower
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Kind, Schedule

__all__ = ["Clock", "Links", "Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation. Rows match the schedule's: with twins, those of one pipeline."""

    schedule: Schedule
    costs: Costs
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end of the step."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def ideal(self) -> float:
        """The work of the busiest rank: the makespan without any wait."""
        return max(map(_total, self.starts, self.ends))

    @property
    def bubble(self) -> float:
        """Makespan minus ideal."""
        return self.makespan - self.ideal

    @property
    def bubble_ratio(self) -> float:
        """Bubble as a fraction of the makespan."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def span(self) -> float:
        """The longest time from first start to last end of one rank."""
        rows = zip(self.starts, self.ends, strict=True)
        return max((ends[-1] - starts[0] for starts, ends in rows if starts), default=0.0)

    @cached_property
    def peak_activations_per_rank(self) -> tuple[float, ...]:
        """Peak of activations on each rank of the world (both twins), in Ma."""
        peaks = activation_peaks(self.schedule)
        return peaks + peaks[::-1] if self.schedule.placement.twins == 2 else peaks

    @property
    def peak_activations(self) -> float:
        """Peak of activations on any rank, in Ma."""
        return max(self.peak_activations_per_rank)

    @property
    def messages(self) -> int:
        """Total number of activations and gradients that cross ranks in one step."""
        if self.schedule.disaggregated:
            return sum(
                isinstance(step, Transfer) and step.verb == "SEND"
                for program in lower(self.schedule)
                for step in program
            )
        crossing = sum(hop != "local" for hop in self.schedule.placement.hops)
        return 2 * crossing * self.schedule.total_microbatches


def _total(starts: list[float], ends: list[float]) -> float:
    """Return the total compute time of a rank."""
    return sum(map(sub, ends, starts), 0.0)


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """Return the timeline of a table.

    Args:
        schedule: A table that holds each action once (`validation.check_cover`).
        costs: Durations of actions and latencies of links.

    Raises:
        ScheduleError: The ranks deadlock.
    """
    clock = Clock(schedule, costs)
    Replay(clock).run()
    return Timeline(schedule, costs, tuple(clock.starts), tuple(clock.ends))


class Clock:
    """Start and end times of each rank's actions, and all durations."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        self.durations = costs.durations(schedule)
        self.factors = costs.action_factors(schedule) if costs.has_factors else None
        self.links = Links(schedule, costs)
        self.launch = costs.launch

    def run_action(self, rank: int, action: Action, now: float) -> float | None:
        """Run one action with its inputs present; return when its output reaches the next stage."""
        stage, kind, microbatch = action
        key = stage * self.schedule.num_microbatches + microbatch
        end = now + self._time(kind, stage, key)
        self.starts[rank].append(now)
        self.ends[rank].append(end)
        if kind == "F" and stage < self.schedule.num_stages - 1:
            return self.links.arrival(kind, stage, key, end)
        if kind in ("B", "I") and stage > 0:
            return self.links.arrival(kind, stage, key, end)
        return None

    def _time(self, kind: Kind, stage: int, key: int) -> float:
        time = self.durations[kind][stage]
        return time if self.factors is None else time * self.factors[kind][key]


class Links:
    """Arrival times of messages."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._placement = schedule.placement
        self._latency = costs.latency
        self._wire_time = 0.0 if costs.bandwidth is None else 1.0 / costs.bandwidth
        self._factors = costs.link_factors(schedule) if costs.link_jitter else None
        self._free: dict[tuple[int, int], float] = {}
        self.free_of_charge = not costs.latency and costs.bandwidth is None

    def arrival(self, kind: Kind, stage: int, key: int, end: float) -> float:
        """Return when the output of an action reaches the next (gradients: previous) stage.

        Args:
            kind: Kind of the action.
            stage: Stage of the action.
            key: `stage * num_microbatches + microbatch` of the action.
            end: Time at which it ended.
        """
        placement = self._placement
        target = stage + 1 if kind == "F" else stage - 1
        if self.free_of_charge or placement.hops[min(stage, target)] == "local":
            return end
        link = placement.rank_for(stage, kind), placement.rank_for(target, kind)
        return self._carried("F" if kind == "F" else "B", link, key, end)

    def to_backward_rank(self, stage: int, target: int, key: int, end: float) -> float:
        """Return when a message of a forward rank reaches the backward rank of a stage."""
        placement = self._placement
        link = placement.rank_for(stage, "F"), placement.rank_for(target, "R")
        return self._carried("F", link, key, end)

    def _carried(self, kind: Kind, link: tuple[int, int], key: int, end: float) -> float:
        if self._wire_time:
            end = max(end, self._free.get(link, 0.0)) + self._wire_time
            self._free[link] = end
        latency = self._latency
        return end + (latency if self._factors is None else latency * self._factors[kind][key])
