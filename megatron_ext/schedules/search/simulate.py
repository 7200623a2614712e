"""Simulates a table: when each action runs, how long the step takes, what is alive when.

Every rank runs its list in order; an action starts as soon as the rank is free and everything that
it needs has arrived. A full backward hands its input gradient on at its end, a split one at the end
of I. Activations are held from the start of F to the end of B or W. Times are in the unit of the
costs, activations in Ma (memory.py). Megatron and torch are not involved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.representation.memory import live_counts, measure
from megatron_ext.schedules.representation.messages import Transfer, lower
from megatron_ext.schedules.representation.topological import Run, execution_order

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Action, Kind, Schedule

__all__ = ["Clock", "Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """The outcome of a simulation. Rows are those of the schedule: with twins, of one pipeline."""

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
        """The work of the busiest rank: the makespan if it never waited."""
        return max(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Makespan minus ideal."""
        return self.makespan - self.ideal

    @property
    def bubble_ratio(self) -> float:
        """Share of the makespan that is bubble."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def span(self) -> float:
        """The longest time from first start to last end of one rank."""
        rows = zip(self.starts, self.ends, strict=True)
        return max((ends[-1] - starts[0] for starts, ends in rows if starts), default=0.0)

    @cached_property
    def peak_activations_per_rank(self) -> tuple[float, ...]:
        """Most activations alive on each rank of the world (both twins), in Ma."""
        peaks = measure(self.schedule).activations
        return peaks + peaks[::-1] if self.schedule.placement.twins == 2 else peaks

    @property
    def peak_activations(self) -> float:
        """Most activations alive on any rank, in Ma."""
        return max(self.peak_activations_per_rank)

    @property
    def messages(self) -> int:
        """Tensors that cross ranks in one step, activations and gradients, all ranks together."""
        if self.schedule.disaggregated:
            return sum(
                isinstance(step, Transfer) and step.verb == "SEND"
                for program in lower(self.schedule)
                for step in program
            )
        crossing = sum(hop != "local" for hop in self.schedule.placement.hops)
        return 2 * crossing * self.schedule.total_microbatches

    def live_activations(self, rank: int) -> list[tuple[float, float]]:
        """Return a rank's curve as (time, Ma alive from then on), one point for each change."""
        share = self.schedule.pp / self.schedule.num_stages
        points: list[tuple[float, float]] = [(0.0, 0.0)]
        row = self.schedule.rows[rank]
        for index, count in enumerate(live_counts(row)):
            kind = row[index].kind
            if kind == "R" or (kind == "F" and not self.schedule.disaggregated):
                points.append((self.starts[rank][index], share * count))
            elif kind in ("B", "W"):
                points.append((self.ends[rank][index], share * (count - 1)))
        return points


def simulate(
    schedule: Schedule, costs: Costs = UNIT, runs: Sequence[Run] | None = None
) -> Timeline:
    """Return when each action of a validated schedule runs.

    Args:
        schedule: The table; see `validate.validate`.
        costs: Times of actions and links.
        runs: `Report.runs` of its validation, which saves finding them again.

    Raises:
        ScheduleError: If the ranks wait for each other in a circle.
    """
    clock = Clock(schedule, costs)
    for run in execution_order(schedule) if runs is None else runs:
        clock.run(*run)
    return Timeline(schedule, costs, tuple(clock.starts), tuple(clock.ends))


class Clock:
    """Arrival times of everything that stages wait for, and what each rank did when."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        count = schedule.num_stages * schedule.num_microbatches
        self.schedule = schedule
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        # By stage * num_microbatches + microbatch: when the stage's input or gradient is there.
        self._inputs = [0.0] * count
        self._gradients = [0.0] * count
        self._again = [0.0] * count if schedule.disaggregated else self._inputs
        self._durations = costs.durations(schedule)
        self._factors = costs.action_factors(schedule) if costs.jitter else None
        self._links = _Links(schedule, costs)

    def run(self, rank: int, first: int, end: int) -> None:
        """Give a stretch of a rank's actions their times."""
        m, last = self.schedule.num_microbatches, self.schedule.num_stages - 1
        inputs, gradients = self._inputs, self._gradients
        starts, ends, arrival = self.starts[rank], self.ends[rank], self._links.arrival
        again, sends = self._again, self.schedule.disaggregated
        now = ends[-1] if ends else 0.0
        for stage, kind, microbatch in self.schedule.rows[rank][first:end]:
            key = stage * m + microbatch
            if kind == "F":
                now = max(now, inputs[key])
            elif kind == "R":
                now = max(now, again[key])
            elif kind != "W":
                now = max(now, gradients[key])
            starts.append(now)
            now += self._time(kind, stage, key)
            ends.append(now)
            if kind == "F" and stage < last:
                inputs[key + m] = arrival("F", stage, stage, key, now)
            if kind == "F" and sends:
                self._to_backward_rank(stage, key, now)
            elif kind in ("B", "I") and stage > 0:
                gradients[key - m] = arrival("B", stage - 1, stage, key, now)

    def _to_backward_rank(self, stage: int, key: int, end: float) -> None:
        """Note when what R needs is there: the input of the next stage, or what was shipped."""
        if self.schedule.ships_activations:
            self._again[key] = self._links.to_backward_rank(stage, stage, key, end)
        elif stage < self.schedule.num_stages - 1:
            next_key = key + self.schedule.num_microbatches
            self._again[next_key] = self._links.to_backward_rank(stage, stage + 1, key, end)

    def run_action(self, rank: int, action: Action, now: float) -> float | None:
        """Run one action whose inputs are there; return when the next stage has what it makes."""
        stage, kind, microbatch = action
        key = stage * self.schedule.num_microbatches + microbatch
        end = now + self._time(kind, stage, key)
        self.starts[rank].append(now)
        self.ends[rank].append(end)
        if kind == "F" and stage < self.schedule.num_stages - 1:
            return self._links.arrival("F", stage, stage, key, end)
        if kind in ("B", "I") and stage > 0:
            return self._links.arrival("B", stage - 1, stage, key, end)
        return None

    def _time(self, kind: Kind, stage: int, key: int) -> float:
        time = self._durations[kind][stage]
        return time if self._factors is None else time * self._factors[kind][key]


class _Links:
    """When what leaves a stage is there, by hop: `hop` is the lower of its two stages."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._placement = schedule.placement
        self._latency = costs.latency
        self._wire_time = 0.0 if costs.bandwidth is None else 1.0 / costs.bandwidth
        self._factors = costs.link_factors(schedule) if costs.link_jitter else None
        self._free: dict[tuple[int, int], float] = {}
        free_of_charge = not costs.latency and costs.bandwidth is None
        self.arrival: Callable[[Kind, int, int, int, float], float]
        """(kind, hop, sending stage, key of the sending action, its end) -> time of arrival."""
        self.arrival = self._immediate if free_of_charge else self._charged

    @staticmethod
    def _immediate(_kind: Kind, _hop: int, _stage: int, _key: int, end: float) -> float:
        return end

    def to_backward_rank(self, stage: int, target: int, key: int, end: float) -> float:
        """Return when what a forward rank sends is at the backward rank of a stage."""
        placement = self._placement
        return self._carried(
            "F", (placement.rank_for(stage, "F"), placement.rank_for(target, "R")), key, end
        )

    def _charged(self, kind: Kind, hop: int, stage: int, key: int, end: float) -> float:
        if self._placement.hops[hop] == "local":
            return end
        target = hop + 1 if stage == hop else hop
        placement = self._placement
        link = placement.rank_for(stage, kind), placement.rank_for(target, kind)
        return self._carried(kind, link, key, end)

    def _carried(self, kind: Kind, link: tuple[int, int], key: int, end: float) -> float:
        if self._wire_time:
            end = max(end, self._free.get(link, 0.0)) + self._wire_time
            self._free[link] = end
        latency = self._latency
        return end + (latency if self._factors is None else latency * self._factors[kind][key])
