"""Generates the table for one step whose micro-batches are cut into slices by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.schedules.table.costs import MAX_ATTENTION, Costs

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.length_cost import LengthCost


def schedule_by_length(
    pipeline: Pipeline,
    slice_tokens: Sequence[Sequence[int]],
    length_cost: LengthCost,
) -> tuple[Schedule, Costs]:
    """Return the table for a step, and the durations that it was generated for.

    The caller validates the table. The durations are those of the step's longest micro-batch.

    Args:
        pipeline: The pipeline that runs the step.
        slice_tokens: For each micro-batch, the number of tokens in each slice.
        length_cost: Sample length -> cost.

    Raises:
        ScheduleError: No order was found.
    """
    # Avoid dividing by 0 if all micro-batches in the step are empty.
    longest = max(map(sum, slice_tokens)) or 1
    slice_sizes = []
    for widths in slice_tokens:
        sizes = tuple(tokens / longest for tokens in widths)
        slice_sizes.append(sizes)
    attention_share = length_cost.attention_share(longest)
    attention = min(attention_share, MAX_ATTENTION)
    costs = replace(pipeline.costs, attention=attention)
    schedule = pipeline.generated(
        len(slice_sizes),
        costs,
        slice_sizes=tuple(slice_sizes),
    )
    return schedule, costs
