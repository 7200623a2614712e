"""Computes how many waiting weight gradients (`--pipeline-waiting-weights`) fit in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from megatron_ext.planning.layout_forecast import forecast

if TYPE_CHECKING:
    from megatron_ext.planning.layout_forecast import Layout

MAX_WAITING = 8
"""In benchmarks/expert_imbalance.py, 16 waiting weight gradients are no faster than 8."""
_UNLIMITED_GIB = 1e9


@dataclass(frozen=True)
class WaitingWeights:
    """The maximum number of W actions that may wait in addition to those waiting in the table."""

    number: int
    rank: int
    """The pipeline rank whose memory is then the fullest."""
    needed_gib: float
    """Memory that this rank needs."""
    next_gib: float | None
    """Memory that the fullest rank would need for one more waiting W. None: `number` is already
    `MAX_WAITING`."""
    limit_gib: float

    def __str__(self) -> str:
        if not self.number:
            return (
                f"with one, a rank would need {self.next_gib:.1f} GiB of {self.limit_gib:.1f} by "
                "forecast"
            )
        text = (
            f"rank {self.rank} then needs {self.needed_gib:.1f} GiB of {self.limit_gib:.1f} by "
            "forecast"
        )
        if self.next_gib is None:
            return f"{text}, and more than {MAX_WAITING} gain little"
        return f"{text}, and with one more a rank would need {self.next_gib:.1f}"


def most_waiting(
    layout_with: Callable[[int], Layout], limit_gib: float
) -> WaitingWeights:
    """Return how many waiting W actions fit in memory on every rank.

    Args:
        layout_with: Returns the forecast for a given number of waiting W actions.
        limit_gib: Memory that a rank may use.
    """

    # Cache the results, which each require a forecast and are needed again for the
    # message.
    @cache
    def memory_gib(number: int) -> tuple[float, ...]:
        return layout_with(number).memory_gib

    # Every waiting W needs more memory, so bisect instead of trying all numbers.
    number = bisect_right(
        range(1, MAX_WAITING + 1),
        limit_gib,
        key=lambda count: max(memory_gib(count)),
    )
    needed_gib = max(memory_gib(number))
    next_gib = None
    if number < MAX_WAITING:
        next_gib = max(memory_gib(number + 1))
    rank = memory_gib(number).index(needed_gib)
    return WaitingWeights(number, rank, needed_gib, next_gib, limit_gib)


def room_in(plan: Layout) -> WaitingWeights | None:
    """Return how many W may wait in a layout.

    Return None if no W can wait in the layout.
    """
    device = plan.job.device
    # `forecast` returns None if a layout does not fit, but `most_waiting` needs its
    # memory.
    unlimited = replace(device, memory_gib=_UNLIMITED_GIB)

    def layout_with(number: int) -> Layout:
        job = replace(plan.job, device=unlimited, waiting_weights=number)
        layout = forecast(
            job,
            plan.sizes,
            plan.schedule,
            plan.chunks,
            plan.counts,
        )
        assert layout is not None, "this cut has a forecast; memory is unlimited"
        return layout

    # Try one W, because `has_waiting_weights` is always False if none may wait.
    if plan.sizes.pp == 1 or not layout_with(1).has_waiting_weights:
        return None
    return most_waiting(layout_with, device.memory_gib - device.reserve_gib)
