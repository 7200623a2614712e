"""What a dynamic order gains over the order of its table, by simulation."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.representation.split_backwards import split_backwards
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies, quiet
from megatron_ext.schedules.search.simulate import simulate

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Schedule

__all__ = ["Gains", "gains"]

_LATE = 0.5
"""Mean latency on links that are late at random (log-normal, sigma 1), in forwards."""
_DRAWS = 4
NOTABLE = 0.005
"""Times that differ by less count as equal."""


class Gains(NamedTuple):
    """Time of the table's own order over that of the dynamic one; above 1 the dynamic is faster."""

    quiet: float
    late: float

    @property
    def advice(self) -> str:
        """Which of both to take."""
        if self.quiet < 1 + NOTABLE:
            return "keep the table's order, unless messages are late"
        return "--use-dpp"


def gains(schedule: Schedule, costs: Costs = UNIT, extra_activations: int = 1) -> Gains:
    """Compare `--use-dpp` with a table as it is, on quiet and on late links.

    Args:
        schedule: The table.
        costs: Times of actions; its latency, if it has one, is that of quiet links.
        extra_activations: What the dynamic order may keep beyond the table's peak.
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
