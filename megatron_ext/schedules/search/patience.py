"""Decides how long a rank waits for the head of its table before it runs a later action.

If a rank runs a later action while the head's input is in flight, and the input arrives before that
action ends, the head is delayed. In tables optimised for quiet links, such as zb-v, ranks wait only
briefly, often for one message latency, so running ahead immediately makes the step slower. Two
strategies avoid this loss: fill idle time only with W, or wait as long as in the static order.
Among the strategies that cause no loss, a simulation selects the one that is fastest when durations
vary a little.

With pairs, if only the head's partner is missing, a rank waits for the partner, but no longer than
the pair would save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.policies import (
    Greedy,
    Hint,
    Patience,
    Policy,
    PolicyFactory,
    PolicyName,
    activation_cap,
)
from megatron_ext.schedules.search.simulate import Clock, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs, exchanging
from megatron_ext.schedules.table.transforms import split_backwards
from megatron_ext.schedules.table.validation import is_ascending

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule

# Message latency on a quiet link, in units of a forward pass.
_QUIET_LATENCY = 0.05
# How long after its simulated arrival time a message counts as late, in units of a
# forward pass.
_MARGIN = 0.05
# Standard deviation of the logarithm of the durations.
_JITTER = 0.1
# Number of random seeds to simulate.
_DRAWS = 4


def quiet(costs: Costs = UNIT) -> Costs:
    """Return the costs with a latency and without jitter."""
    latency = costs.latency or _QUIET_LATENCY * costs.forward
    return replace(
        costs,
        latency=latency,
        jitter=0.0,
        link_jitter=0.0,
    )


def _copied(make: PolicyFactory) -> PolicyFactory:
    """Return a factory that builds every rank's policy once and copies it for each step."""
    # Building a policy for 96 actions would add 0.2 ms to every step. Copying it takes
    # 0.01 ms.
    originals = cache(make)

    def policy_of_step(rank: int) -> Policy:
        return originals(rank).for_next_step()

    return policy_of_step


def policies(
    name: PolicyName,
    schedule: Schedule,
    *,
    extra_activations: int = 0,
    weights_fill: bool = False,
    costs: Costs = UNIT,
    stash_ratio: float = 1.0,
) -> PolicyFactory:
    """Return a factory that creates a rank's policy for one step.

    Args:
        name: The policy's name.
        schedule: The table.
        extra_activations: See `activation_cap`.
        weights_fill: Whether W may leave its position in the table to fill gaps.
        costs: Costs for the simulations that select a strategy.
        stash_ratio: See `activation_cap`.

    Raises:
        ScheduleError: The table sums gradients in an order that policies cannot preserve
            (`progress.py`), or runs forward and backward passes on different ranks.
    """
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} runs forward and backward passes on different ranks, so the ranks "
            "cannot choose their own order; remove --use-dpp"
        )
    # `Progress` sums gradients in micro-batch order, so the table must do the same.
    if not is_ascending(schedule):
        raise ScheduleError(
            f"{schedule.label}: a stage's backward passes are not in micro-batch order, but a "
            "dynamic order sums gradients in that order; sort the passes, or remove --use-dpp"
        )
    if schedule.pairs:
        # Without all-to-all in the costs, a simulation would show no benefit from
        # pairs.
        costs = exchanging(costs)
    cap = activation_cap(schedule, extra_activations, stash_ratio)
    if name != "hint":
        depth_first = name == "depth-first"
        return _copied(lambda rank: Greedy(schedule, rank, depth_first=depth_first))

    def hint(
        rank: int,
        *,
        weights_fill: bool,
        patience: Patience | None = None,
    ) -> Hint:
        return Hint(
            schedule,
            rank,
            cap,
            weights_fill=weights_fill,
            patience=patience,
            stash_ratio=stash_ratio,
        )

    return _best_hint(schedule, hint, costs, weights_fill=weights_fill)


def _best_hint(
    schedule: Schedule,
    hint: Callable[..., Hint],
    costs: Costs,
    *,
    weights_fill: bool,
) -> PolicyFactory:
    """Return a factory for the fastest strategy that is not slower on quiet links."""
    at_once = _copied(lambda rank: hint(rank, weights_fill=weights_fill))
    calm = quiet(costs)
    # A table built for one step's sample lengths is used for that step only, so
    # comparing strategies would not pay off.
    if schedule.is_for_one_step and weights_fill:
        return at_once
    static = simulate(schedule, calm)

    # A rank waits as long as in the simulated static order, plus a small margin. It
    # therefore runs ahead only if a message is late. Otherwise, the step takes as long
    # as in the static order. In total, a rank waits no longer than its bubble in the
    # table plus one margin per action.
    def patient_hint(rank: int) -> Hint:
        patience = waits_of(static, rank)
        return hint(rank, weights_fill=False, patience=patience)

    patiently = _copied(patient_hint)
    # A rank that never waits finds few partners for pairs.
    if schedule.pairs or schedule.is_for_one_step:
        return patiently
    if simulate_dynamic(schedule, at_once, calm).makespan <= static.makespan:
        return at_once
    # W may leave its position and run if nothing else can. In some tables (v-half,
    # bitpipe), this saves more time than running ahead costs.
    filling = _copied(lambda rank: hint(rank, weights_fill=True))

    def loses_nothing(policy: PolicyFactory) -> bool:
        # The tolerance absorbs rounding errors, because durations are summed in a
        # different order.
        longest = static.makespan * (1 + 1e-9)
        return simulate_dynamic(schedule, policy, calm).makespan <= longest

    def time_with_jitter(policy: PolicyFactory) -> float:
        total = 0.0
        for seed in range(_DRAWS):
            jittery = replace(calm, jitter=_JITTER, seed=seed)
            total += simulate_dynamic(schedule, policy, jittery).makespan
        return total

    candidates = [policy for policy in (filling, patiently) if loses_nothing(policy)]
    return min(candidates, key=time_with_jitter, default=at_once)


def waits_of(static: Timeline, rank: int) -> Patience:
    """Return how long a rank waits for every action in the static order, plus a small margin."""
    starts = static.starts[rank]
    ends = static.ends[rank]
    margin = _MARGIN * static.costs.forward
    row = static.schedule.rows[rank]
    pairs = static.schedule.pairs_of(rank)
    clock = Clock(static.schedule, static.costs)
    # A pair saves the difference between the time of its two actions run separately and
    # the time of the pair.
    durations = list(map(clock.time_of, row))
    gains: list[float] = []
    if pairs:
        gains = [0.0] * len(row)
    for index in pairs:
        alone = durations[index] + durations[index + 1]
        together = ends[index] - starts[index]
        gains[index] = alone - together
    waits = []
    free = 0.0
    for start, end in zip(starts, ends, strict=True):
        waits.append(start - free + margin)
        free = end
    return Patience(waits, durations, gains)


# Mean latency on late links, in units of a forward pass. The latency is log-normal with sigma 1.
_LATE = 0.5
NOTABLE = 0.005
"""Two times count as equal if their relative difference is below this value."""


class Gains(NamedTuple):
    """Static makespan / dynamic makespan, by kind of link. Above 1, the dynamic order is faster."""

    quiet: float
    late: float

    @property
    def advice(self) -> str:
        """Which of the two orders to use, in words."""
        if self.quiet < 1 + NOTABLE:
            return "keep the table's order, unless messages are late"
        return "--use-dpp"


def gains(schedule: Schedule, costs: Costs = UNIT) -> Gains:
    """Compare `--use-dpp` with a table's static order on quiet and on late links.

    A latency in the costs applies only to quiet links.
    """
    simulate_hint = _hint_simulator(schedule, costs)

    def ratio(link_costs: Costs) -> float:
        static = simulate(schedule, link_costs)
        dynamic = simulate_hint(link_costs)
        return static.makespan / dynamic.makespan

    ratios_of_late_links = []
    for seed in range(_DRAWS):
        link_costs = _late(costs, seed)
        ratios_of_late_links.append(ratio(link_costs))
    ratio_of_quiet_links = ratio(quiet(costs))
    return Gains(ratio_of_quiet_links, mean(ratios_of_late_links))


def while_late(timeline: Timeline) -> tuple[Timeline, Timeline]:
    """Return the timelines with late messages, first in static order, then in dynamic order."""
    schedule = timeline.schedule
    costs = _late(timeline.costs, 0)
    static = simulate(schedule, costs)
    simulate_hint = _hint_simulator(schedule, timeline.costs)
    dynamic = simulate_hint(costs)
    named = replace(dynamic.schedule, name=f"{schedule.name} --use-dpp")
    return static, replace(dynamic, schedule=named)


def _late(costs: Costs, seed: int) -> Costs:
    return replace(
        costs,
        latency=_LATE * costs.forward,
        link_jitter=1.0,
        seed=seed,
    )


def _hint_simulator(
    schedule: Schedule,
    costs: Costs,
) -> Callable[[Costs], Timeline]:
    """Return a function that simulates a table under `--use-dpp`, with a policy for these costs."""
    # As in training, a dynamic order splits backward passes so that W can fill gaps.
    split = split_backwards(schedule)
    hints = policies(
        "hint",
        split,
        extra_activations=1,
        weights_fill=not schedule.splits_backward,
        costs=costs,
    )
    return partial(simulate_dynamic, split, hints)
