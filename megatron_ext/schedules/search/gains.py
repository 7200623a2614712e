"""Simulates the gain of a dynamic order over the order of its table."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies, quiet
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.split_backwards import split_backwards

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["Gains", "gains"]

_LATE = 0.5
"""Mean of the random latency of late links (log-normal, sigma 1), in forwards."""
_DRAWS = 4
NOTABLE = 0.005
"""Relative difference below which two times count as equal."""


class Gains(NamedTuple):
    """Makespan of the static order over that of the dynamic order; above 1, dynamic is faster."""

    quiet: float
    late: float

    @property
    def advice(self) -> str:
        """Which of the two orders to use."""
        if self.quiet < 1 + NOTABLE:
            return "keep the table's order, unless messages are late"
        return "--use-dpp"


def gains(schedule: Schedule, costs: Costs = UNIT, extra_activations: int = 1) -> Gains:
    """Compare `--use-dpp` with the static order of a table, on quiet and on late links.

    Args:
        schedule: The table.
        costs: Durations of actions; its latency, if any, applies to quiet links.
        extra_activations: Micro-batches that the dynamic order may keep beyond the table's peak.
    """
    split = split_backwards(schedule)
    made = policies(
        "hint",
        split,
        extra_activations=extra_activations,
        weights_fill=not schedule.splits_backward,
        costs=costs,
    )

    def ratio(these: Costs) -> float:
        dynamic = simulate_dynamic(split, made, these)
        return simulate(schedule, these).makespan / dynamic.makespan

    late = replace(costs, latency=_LATE * costs.forward, link_jitter=1.0)
    return Gains(
        ratio(quiet(costs)), mean(ratio(replace(late, seed=seed)) for seed in range(_DRAWS))
    )
