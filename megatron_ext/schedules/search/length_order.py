"""Chooses the order in which unequal micro-batches enter a pipeline, by simulation.

While a pipeline fills and drains, its ranks wait for each other's micro-batches; in between they
hardly do. So small ones belong to both ends. Which order is best depends on the table, so a few of
them are simulated, that of the file included: an order never takes longer than that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["best_order", "makespan_of"]

_FEW = 3
"""Small micro-batches that fill the pipeline before the largest come."""


def best_order(schedule: Schedule, scales: Sequence[float], costs: Costs = UNIT) -> tuple[int, ...]:
    """Return which micro-batch of the file runs in each place of a table.

    Equal micro-batches stay in the order of the file.

    Args:
        schedule: The table.
        scales: Cost of each micro-batch of the file, in any unit.
        costs: Durations of a micro-batch of scale 1, and latencies.

    Raises:
        ScheduleError: There is not one scale for each micro-batch of the table.
    """
    in_file_order = tuple(range(len(scales)))
    if len(set(scales)) <= 1:
        return in_file_order
    largest = max(scales)
    shares = [scale / largest for scale in scales]
    orders = dict.fromkeys((in_file_order, *_candidates(shares)))
    return min(orders, key=lambda order: makespan_of(schedule, shares, order, costs))


def makespan_of(
    schedule: Schedule, scales: Sequence[float], order: Sequence[int], costs: Costs = UNIT
) -> float:
    """Return the time of a step whose micro-batches enter in an order.

    Args:
        schedule: The table.
        scales: Factor on the durations of each micro-batch of the file.
        order: Which of them runs in each place of the table.
        costs: Durations of a micro-batch of scale 1, and latencies.
    """
    placed = tuple(scales[number] for number in order)
    return simulate(schedule, replace(costs, microbatch_scale=placed)).makespan


def _candidates(scales: Sequence[float]) -> Iterator[tuple[int, ...]]:
    rising = sorted(range(len(scales)), key=lambda number: (scales[number], number))
    yield tuple(rising[::2] + rising[1::2][::-1])  # small at both ends, the largest in the middle
    yield tuple(rising)
    yield tuple(rising[:1] + rising[:0:-1])
    yield tuple(rising[:_FEW] + rising[: _FEW - 1 : -1])
