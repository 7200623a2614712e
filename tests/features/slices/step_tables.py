"""Tables of steps whose micro-batches are cut by length, without data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_ext.features.lengths.sliced_step import SlicedStep
from megatron_ext.runtime.program import Table, make_table_of_step

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.schedules.table.length_cost import LengthCost


def table_of_step(
    pipeline: Pipeline,
    slice_tokens: Sequence[Sequence[int]],
    length_cost: LengthCost,
    rank: int = 0,
) -> Table:
    """Return the table of a step whose micro-batches have slices of these numbers of tokens."""
    bounds = []
    for widths in slice_tokens:
        bounds.append(tuple(accumulate(widths, initial=0)))
    step = SlicedStep(
        iterators=(),
        order=tuple(range(len(slice_tokens))),
        slice_bounds=tuple(bounds),
        packed_bounds=(),
        slice_tokens=tuple(map(tuple, slice_tokens)),
        length_cost=length_cost,
    )
    return make_table_of_step(pipeline, step, rank)
