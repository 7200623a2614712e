"""Cuts a step's micro-batches into slices by length (docs/lengths.md).

A micro-batch of at most T tokens is one slice. A longer one has as many slices as it needs, all of
equal cost. Slices of equal length would not cost the same, because each slice's attention also
reads all earlier tokens in its sample. This module uses only the standard library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, sqrt
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.slices import MAX_SLICES

if TYPE_CHECKING:
    from megatron_ext.schedules.table.length_cost import LengthCost

SLICED_BY_LENGTH = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
"""Schedules that support slices by length. Their tables are fast to generate."""

# The maximum per rank, counting the slices of all micro-batches.
_MAX_SLICES_IN_STEP = 32


def slices_needed(
    tokens: int,
    slice_tokens: int,
    flag: str = "--pipeline-slice-tokens",
) -> int:
    """Return the number of slices that a micro-batch needs.

    Args:
        tokens: Number of tokens in the micro-batch.
        slice_tokens: Maximum number of tokens in a micro-batch that runs as a single slice.
        flag: The flag that sets `slice_tokens`, for the error message.

    Raises:
        ScheduleError: There are more than 64 slices.
    """
    count = max(1, ceil(tokens / slice_tokens))
    if count > MAX_SLICES:
        least_tokens = ceil(tokens / MAX_SLICES)
        raise ScheduleError(
            f"a micro-batch of {tokens} tokens would need {count} slices of {slice_tokens} "
            f"tokens, but can have only {MAX_SLICES}; use {flag} {least_tokens} or more"
        )
    return count


def automatic_slice_tokens(longest: int, tokens_in_step: int, pp: int) -> int:
    """Return the number of tokens per slice for `auto`.

    The longest micro-batch then has two slices per rank. While the pipeline fills, ranks wait for
    pp - 1 slices. In addition to the longest micro-batch, ranks keep at most that many slices,
    which amount to half its size. In a step with many long micro-batches, the longest one has fewer
    slices, so that the step has about 32 slices per rank. The wait is then at most 1/32 of the
    step, and smaller slices would cost more than they gain.

    Args:
        longest: Number of tokens in the longest micro-batch.
        tokens_in_step: Number of tokens in all of a replica's micro-batches.
        pp: Number of pipeline ranks.
    """
    slices_of_longest = min(2 * pp, MAX_SLICES)
    slices_of_step = _MAX_SLICES_IN_STEP * pp
    return max(
        1,
        ceil(longest / slices_of_longest),
        ceil(tokens_in_step / slices_of_step),
    )


def equal_cost_bounds(
    samples: Sequence[int],
    num_slices: int,
    length_cost: LengthCost,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Return the first token of each slice, followed by the micro-batch's number of tokens.

    If there are fewer tokens than slices, the last slices are empty.

    Args:
        samples: Number of tokens in each sample, in order. A sample attends only to its own tokens.
        num_slices: Number of slices.
        length_cost: Cost of a sample as a function of its length.
        multiple: The number of tokens in every slice is a multiple of this number.

    Raises:
        ScheduleError: The number of tokens in the micro-batch is not a multiple of `multiple`.
    """
    # Both lists have an entry for the start of each sample and one for the end of the
    # last.
    starts = list(accumulate(samples, initial=0))
    sample_costs = map(length_cost.of_length, samples)
    costs_before = list(accumulate(sample_costs, initial=0.0))
    num_tokens = starts[-1]
    if num_tokens % multiple:
        raise ScheduleError(
            f"a micro-batch of {num_tokens} tokens cannot be split across {multiple} "
            f"tensor-parallel ranks with --sequence-parallel; pad it to a multiple of {multiple}"
        )
    bounds = [0]
    for number in range(1, num_slices):
        cost = costs_before[-1] * number / num_slices
        # Find the sample in which the slice ends.
        index = max(0, bisect_left(costs_before, cost) - 1)
        cost_in_sample = cost - costs_before[index]
        end = starts[index] + _tokens_of_cost(cost_in_sample, length_cost)
        rounded_end = round(end / multiple) * multiple
        # Make sure that rounding leaves no slice empty, unless there are fewer tokens than needed.
        num_later_slices = num_slices - number
        first_end = bounds[-1] + multiple
        last_end = num_tokens - num_later_slices * multiple
        rounded_end = max(min(rounded_end, last_end), first_end)
        bounds.append(min(rounded_end, num_tokens))
    return (*bounds, num_tokens)


def _tokens_of_cost(cost: float, length_cost: LengthCost) -> float:
    """Return how many tokens at the start of a sample together have a given cost."""
    # Solve linear * tokens + quadratic * tokens^2 = cost.
    linear = length_cost.linear
    quadratic = length_cost.quadratic
    discriminant = linear * linear + 4 * quadratic * max(cost, 0.0)
    root = sqrt(discriminant)
    if cost > 0:
        # This form of the quadratic formula does not subtract nearly equal numbers.
        return 2 * cost / (linear + root)
    return 0.0


def rising(costs: Sequence[float]) -> tuple[int, ...]:
    """Return the micro-batch numbers in ascending order of cost.

    In this order, the first slice, for which all ranks wait, is the smallest. By the time the
    longest micro-batch arrives, all others have filled the pipeline.
    """
    numbers = range(len(costs))
    cheapest_first = sorted(numbers, key=lambda number: (costs[number], number))
    return tuple(cheapest_first)
