"""How long a rank waits for the head of its table before it jumps over it.

A jump that fills a wait delays the head if that comes before the jump is over. Tables made for
quiet links, such as zb-v, leave short waits only, often of a message's time, so that jumping at
once makes them slower than they are. Two ways lose nothing:

- W leaves its places and runs where nothing else can, as over tables whose backwards were split
  afterwards. Over some tables (v-half, bitpipe) that gains more than the jumps lose.
- A rank waits as long as it does in its table while nothing is late, and a little longer. Then
  nothing is jumped over while nothing is late, and the step takes the time of the table. All waits
  of a rank together are as long as its bubble in the table, and that little for each action.

The second loses nothing whatever the table. Of those that do not, the one is taken that is faster
if actions take a little more or less than they are said to. All of that is found by simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.representation.validation import validate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.policies import (
    Hint,
    Patience,
    Policy,
    PolicyName,
    activation_cap,
    make_policy,
)
from megatron_ext.schedules.search.simulate import simulate

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Schedule
    from megatron_ext.schedules.search.simulate import Timeline

__all__ = ["policies", "quiet", "waits_of"]

_QUIET_LATENCY = 0.05
"""Of a message on a link that is never late, in forwards."""
_MARGIN = 0.05
"""By so much a message may be later than simulated before it counts as late, in forwards."""
_JITTER = 0.1
"""Sigma of how much longer or shorter actions take than they are said to."""
_DRAWS = 3


def quiet(costs: Costs = UNIT) -> Costs:
    """Return the same costs where nothing is late; a latency, if they have one, stays."""
    latency = costs.latency or _QUIET_LATENCY * costs.forward
    return replace(costs, latency=latency, jitter=0.0, link_jitter=0.0)


def policies(
    name: PolicyName,
    schedule: Schedule,
    *,
    extra_activations: int = 0,
    weights_fill: bool = False,
    costs: Costs = UNIT,
) -> Callable[[int], Policy]:
    """Return what makes the policy of a rank, for one step.

    Args:
        name: Of the policy.
        schedule: The table.
        extra_activations: Of `activation_cap`.
        weights_fill: Whether W has no place of its own in the table: it runs where nothing else
            can.
        costs: What the table is said to cost.

    Raises:
        ScheduleError: The table has another order of gradients than policies have (`readiness.py`).
    """
    if not validate(schedule).ascending:
        raise ScheduleError(
            f"{schedule.label}: backwards of a stage are not in the order of micro-batches, in "
            "which a dynamic order adds gradients; sort them, or leave --use-dpp out"
        )
    cap = activation_cap(schedule, extra_activations)

    def at_once(rank: int) -> Policy:
        return make_policy(name, schedule, rank, cap, weights_fill=weights_fill)

    def filling(rank: int) -> Policy:
        return make_policy(name, schedule, rank, cap, weights_fill=True)

    if name != "hint":
        return at_once
    calm = quiet(costs)
    static = simulate(schedule, calm)
    if simulate_dynamic(schedule, at_once, calm).makespan <= static.makespan:
        return at_once
    patience = [waits_of(static, rank) for rank in range(len(schedule.rows))]

    def patiently(rank: int) -> Policy:
        return Hint(schedule, rank, cap, weights_fill=False, patience=patience[rank])

    def loses_nothing(policy: Callable[[int], Policy]) -> bool:
        return simulate_dynamic(schedule, policy, calm).makespan <= static.makespan * (1 + 1e-9)

    def time_if_varied(policy: Callable[[int], Policy]) -> float:
        draws = (replace(calm, jitter=_JITTER, seed=seed) for seed in range(_DRAWS))
        return sum(simulate_dynamic(schedule, policy, these).makespan for these in draws)

    kept = filter(loses_nothing, (filling, patiently))
    return min(kept, key=time_if_varied, default=at_once)


def waits_of(static: Timeline, rank: int) -> Patience:
    """Return how long a rank waits in its table, and a little longer.

    Args:
        static: The table while nothing is late.
        rank: Of the pipeline.
    """
    starts, ends = static.starts[rank], static.ends[rank]
    margin = _MARGIN * static.costs.forward
    return Patience(
        waits=[start - free + margin for start, free in zip(starts, [0.0, *ends], strict=False)],
        durations=[end - start for start, end in zip(starts, ends, strict=True)],
    )
