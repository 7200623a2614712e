"""Simulates a table: action times, the step's makespan, and live activations.

Every rank runs its row in order. An action starts as soon as the rank is idle and the action's
inputs have arrived. On a device, the host must have launched it as well. A full backward pass sends
its input gradient when it ends, and a split backward pass when I ends. Activations are alive from
the start of F to the end of B or W. Times are in the unit of the costs, and activations are in Ma
(memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.schedules.table.costs import AHEAD, UNIT, Costs
from megatron_ext.schedules.table.memory import activation_peaks, measure, slots_needed
from megatron_ext.schedules.table.transforms import literal_rows, table_rank
from megatron_ext.schedules.table.walk import check_for_deadlock, walk

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Kind, Link, Schedule


Bar = tuple["Action", float, float]
"""(action, start, end)."""


class _PairExchanges(NamedTuple):
    """All-to-all time in a rank's pairs, in the unit of the costs."""

    total: float
    hidden: float
    """The part of `total` that computation hides."""

    @property
    def hidden_share(self) -> float:
        """The share of `total` that computation hides; 0 without pairs."""
        if not self.total:
            return 0.0
        return self.hidden / self.total


@dataclass(frozen=True)
class Timeline:
    """A simulation's result. The rows are the schedule's, which with twins cover one pipeline."""

    schedule: Schedule
    costs: Costs
    # By rank, in row order.
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one."""
        last_ends = [row[-1] for row in self.ends if row]
        return max(last_ends, default=0.0)

    @cached_property
    def ideal(self) -> float:
        """The work on the busiest rank, which is the makespan if no rank ever waits."""
        work_by_rank = []
        times = zip(self.starts, self.ends, strict=True)
        for rank, (starts, ends) in enumerate(times):
            # A pair's two actions span the same time, which must be counted only once.
            counted_twice = []
            for index in self.schedule.pairs_of(rank):
                counted_twice.append(ends[index] - starts[index])
            durations = map(sub, ends, starts)
            work = sum(durations, 0.0) - sum(counted_twice)
            work_by_rank.append(work)
        return max(work_by_rank)

    @cached_property
    def _exchanges_of_pairs(self) -> list[_PairExchanges]:
        """By rank: all-to-all time in its pairs."""
        clock = Clock(self.schedule, self.costs)
        by_rank = []
        for rank, row in enumerate(self.schedule.rows):
            starts = self.starts[rank]
            ends = self.ends[rank]
            total = 0.0
            hidden = 0.0
            for index in self.schedule.pairs_of(rank):
                pair = row[index : index + 2]
                total += sum(map(clock.all_to_all_of, pair))
                # The time that the pair saves over running its actions one by one.
                hidden += sum(map(clock.time_of, pair))
                hidden -= ends[index] - starts[index]
            by_rank.append(_PairExchanges(total, hidden))
        return by_rank

    @cached_property
    def hidden(self) -> float:
        """The share of all ranks' all-to-all that computation hides; 0 without all-to-all."""
        all_to_all_of = Clock(self.schedule, self.costs).all_to_all_of
        exchanges: list[float] = []
        for row in self.schedule.rows:
            exchanges += map(all_to_all_of, row)
        total = sum(exchanges)
        if not total:
            return 0.0
        hidden_time = sum(pairs.hidden for pairs in self._exchanges_of_pairs)
        return hidden_time / total

    @property
    def hidden_in_pairs(self) -> tuple[float, ...]:
        """By rank: hidden share of all-to-all in pairs, which `hidden` approaches in long steps."""
        return tuple(exchanges.hidden_share for exchanges in self._exchanges_of_pairs)

    @cached_property
    def bars(self) -> list[list[Bar]]:
        """By rank, for both twins: the actions to draw with their start and end times."""
        bars = []
        for rank, row in enumerate(literal_rows(self.schedule)):
            # The second twin's ranks have the same times as the ranks that they mirror.
            source = table_rank(self.schedule, rank)
            starts = self.starts[source]
            ends = self.ends[source]
            rank_bars = zip(row, starts, ends, strict=True)
            bars.append(list(rank_bars))
        return bars

    @property
    def bubble(self) -> float:
        """Makespan minus ideal."""
        return self.makespan - self.ideal

    @property
    def bubble_ratio(self) -> float:
        """The bubble as a fraction of the makespan."""
        if not self.makespan:
            return 0.0
        return self.bubble / self.makespan

    @cached_property
    def peak_activations_per_rank(self) -> tuple[float, ...]:
        """By rank, for both twins: peak activations, in Ma."""
        peaks = activation_peaks(self.schedule)
        if self.schedule.placement.twins == 1:
            return peaks
        # The second pipeline is the mirror image of the first.
        return peaks + peaks[::-1]

    @property
    def peak_activations(self) -> float:
        """Peak activations on any rank, in Ma."""
        return max(self.peak_activations_per_rank)

    @cached_property
    def keys_and_values(self) -> float:
        """Peak keys and values of sliced micro-batches on any rank, or 0 without slices."""
        memory = measure(self.schedule)
        return max(memory.keys_and_values, default=0.0)

    @property
    def messages(self) -> int:
        """Total number of activations and gradients sent between ranks per step."""
        schedule = self.schedule
        if schedule.disaggregated:
            # There is one slot per message, because all messages can be in flight at
            # once.
            slots = slots_needed(schedule)
            return sum(slots.values())
        hops = schedule.placement.hops
        num_crossing = sum(hop != "local" for hop in hops)
        num_passes = 0
        for microbatch in range(schedule.num_microbatches):
            num_passes += schedule.num_slices_of(microbatch)
        num_passes *= schedule.placement.twins
        # Activations go down, and gradients come back.
        return 2 * num_crossing * num_passes


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """Return a table's timeline.

    The table must contain every action exactly once (`validation.check_actions`).

    Raises:
        ScheduleError: The ranks deadlock.
    """
    clock = Clock(schedule, costs)
    rows = schedule.rows
    ends = clock.ends
    launch = costs.launch
    run = clock.run
    is_free = clock.is_free
    # By rank, if launches take time: the time of the last launch, and the end times of
    # the rank's actions. Each list starts with AHEAD zeros, so that the first launches
    # do not wait.
    launched = [0.0] * len(rows)
    ran = [[0.0] * AHEAD for _ in rows]

    def visit(
        rank: int,
        index: int,
        arrived: Any,
    ) -> float | list[float]:
        row = rows[rank]
        action = row[index]
        partner = None
        rank_ends = ends[rank]
        begin = rank_ends[-1] if index else 0.0
        # `walk` passes two values for a pair and one for a single action.
        if type(arrived) is tuple:
            partner = row[index + 1]
            # `filter` also drops times of 0.0, which is harmless because nothing starts earlier.
            times = filter(None, arrived)
            arrived = max(times, default=None)
        if arrived is not None and arrived > begin:
            begin = arrived
        if launch:
            # The host launches an action once at most AHEAD - 1 earlier actions are
            # still running.
            admitted_at = ran[rank][-AHEAD]
            launched[rank] = max(launched[rank], admitted_at) + launch
            begin = max(begin, launched[rank])
        end = run(rank, begin, action, partner)
        if launch:
            ran[rank].append(end)
        if partner is not None:
            return [
                _first_arrival(clock, action, end),
                _first_arrival(clock, partner, end),
            ]
        # This is the fast path for tables with millions of actions.
        if is_free:
            return end
        arrivals = clock.arrivals(action, end)
        return arrivals[0] if len(arrivals) == 1 else arrivals

    # `walk` does not say why it stopped. This check finds the cycle and shows it in its
    # error.
    if walk(schedule, visit):
        check_for_deadlock(schedule)
        raise AssertionError(f"{schedule.label} stopped, but no cycle was found")
    starts = tuple(clock.starts)
    return Timeline(schedule, costs, starts, tuple(ends))


def _first_arrival(clock: Clock, action: Action, end: float) -> float:
    """Return when a paired action's result arrives at the only rank that needs it."""
    arrivals = clock.arrivals(action, end)
    return arrivals[0] if arrivals else end


def fastest(tables: Iterable[Schedule], costs: Costs) -> Schedule:
    """Return the table with the shortest step, or on ties the one that uses the least memory."""

    def time_and_memory(table: Schedule) -> tuple[float, float]:
        timeline = simulate(table, costs)
        # Rounding errors may make equal times differ. Round them so that memory breaks
        # ties.
        time = round(timeline.makespan, 9)
        return time, timeline.peak_activations

    return min(tables, key=time_and_memory)


class Clock:
    """Tracks the start and end times of all ranks' actions and computes arrival times."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        self._num_slices = schedule.num_slices
        self._places_per_stage = schedule.places_per_stage
        # By kind and stage: the duration without jitter.
        self._durations = costs.durations(schedule)
        # By kind and action (`Costs.action_factors`). None means that all factors are 1.
        self._factors = None
        if costs.jitter or costs.microbatch_scale or schedule.num_slices > 1:
            self._factors = costs.action_factors(schedule)
        self._hides = costs.hides
        # By stage: the share of all-to-all.
        self._exchanges = costs.exchanges
        if not self._exchanges:
            self._exchanges = (costs.all_to_all,) * schedule.num_stages
        self._latency = costs.latency
        # By direction and message. None means that all factors are 1.
        self._link_factors = None
        if costs.link_jitter:
            self._link_factors = costs.link_factors(schedule)
        self.is_free = not (costs.latency or schedule.disaggregated)
        """Whether every message arrives when its action ends."""
        # By an action's kind and stage: the links to all receivers. None: links have no
        # latency.
        self._links: dict[Kind, list[list[Link | None]]] = {}
        for kind, outputs_by_stage in schedule.links.items():
            links_by_stage = []
            for outputs in outputs_by_stage:
                links: list[Link | None] = [None] * len(outputs)
                if costs.latency:
                    links = [output.link for output in outputs]
                links_by_stage.append(links)
            self._links[kind] = links_by_stage

    def time_of(self, action: Action) -> float:
        """Return how long an action takes when it runs alone."""
        stage, kind, microbatch, slice_index = action
        time = self._durations[kind][stage]
        if self._factors is not None:
            number = microbatch * self._num_slices + slice_index
            index = stage * self._places_per_stage + number
            time *= self._factors[kind][index]
        return time

    def all_to_all_of(self, action: Action) -> float:
        """Return how much of an action's time is all-to-all, which weight gradients do not need."""
        stage = action.stage
        exchange = self._exchanges[stage]
        if not exchange or action.kind == "W":
            return 0.0
        share = 1.0
        # In B, only the I part includes all-to-all.
        if action.kind == "B":
            input_time = self._durations["I"][stage]
            share = input_time / self._durations["B"][stage]
        return exchange * share * self.time_of(action)

    def run(
        self,
        rank: int,
        now: float,
        action: Action,
        partner: Action | None = None,
    ) -> float:
        """Run an action or a pair starting at `now` and return when it ends."""
        if partner is not None:
            return self._run_pair(rank, now, action, partner)
        end = now + self.time_of(action)
        self.starts[rank].append(now)
        self.ends[rank].append(end)
        return end

    def _run_pair(
        self,
        rank: int,
        now: float,
        forward: Action,
        backward: Action,
    ) -> float:
        """Run a pair starting at `now` and return when its two actions end.

        Layers are paired one to one, and the larger stage's surplus layers run alone.
        """
        # `time` covers all layers, the other two only paired layers.
        time = 0.0
        exchange = 0.0
        compute = 0.0
        # A stage's forward time is proportional to its number of layers.
        layers = self._durations["F"]
        paired_layers = min(layers[forward.stage], layers[backward.stage])
        for action in (forward, backward):
            paired_share = paired_layers / layers[action.stage]
            action_time = self.time_of(action)
            action_exchange = self.all_to_all_of(action)
            time += action_time
            exchange += paired_share * action_exchange
            compute += paired_share * (action_time - action_exchange)
        # Whichever takes longer, communication or computation, hides the other.
        hidden = self._hides * min(exchange, compute)
        end = now + time - hidden
        self.starts[rank] += (now, now)
        self.ends[rank] += (end, end)
        return end

    def arrivals(self, action: Action, end: float) -> list[float]:
        """Return when an action's result arrives at every action that needs it."""
        stage, kind, microbatch, slice_index = action
        arrivals = []
        for link in self._links[kind][stage]:
            arrival = end
            if link is not None:
                latency = self._latency
                if self._link_factors is not None:
                    number = microbatch * self._num_slices + slice_index
                    key = stage * self._places_per_stage + number
                    # I sends the gradient that B would send, so both have the same latency.
                    direction: Kind = "F" if kind == "F" else "B"
                    latency *= self._link_factors[direction][key]
                arrival += latency
            arrivals.append(arrival)
        return arrivals
