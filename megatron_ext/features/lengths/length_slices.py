"""Cuts the micro-batches of a step into slices by their lengths (docs/lengths.md).

A micro-batch of at most T tokens is one slice. A longer one has as many slices as it needs, all of
equal cost: attention is quadratic in the length of a sample, so equal lengths would cost more and
more. This module uses only the standard library.
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


def slices_needed(
    tokens: int, slice_tokens: int, flag: str = "--pipeline-slice-tokens"
) -> int:
    """Return the number of slices of a micro-batch. `flag` is the one that sets `slice_tokens`.

    Raises:
        ScheduleError: There are more than 64.
    """
    count = max(1, ceil(tokens / slice_tokens))
    if count > MAX_SLICES:
        raise ScheduleError(
            f"a micro-batch of {tokens} tokens would have {count} slices of {slice_tokens} "
            f"tokens, and can have {MAX_SLICES}; use {flag} {ceil(tokens / MAX_SLICES)} or more"
        )
    return count


def automatic_slice_tokens(longest: int, pp: int) -> int:
    """Return the tokens of a slice for `--slice-tokens auto`.

    The longest micro-batch then has two slices for each rank. Ranks wait for (pp - 1) slices while
    the pipeline fills, and keep as many beyond the longest micro-batch: at most half of it.
    """
    return max(1, ceil(longest / min(2 * pp, MAX_SLICES)))


def equal_cost_bounds(
    samples: Sequence[int], num_slices: int, length_cost: LengthCost, multiple: int = 1
) -> tuple[int, ...]:
    """Return the first token of each slice of a micro-batch, followed by its number of tokens.

    If there are fewer tokens than slices, the last slices are empty.

    Args:
        samples: Tokens of each sample, in order. A sample attends to its own tokens only.
        num_slices: Number of slices.
        length_cost: Cost of a sample by length.
        multiple: Each slice has a multiple of this many tokens.

    Raises:
        ScheduleError: The micro-batch does not have a multiple of that many tokens.
    """
    starts = list(accumulate(samples, initial=0))
    costs_before = list(accumulate(map(length_cost.of_length, samples), initial=0.0))
    num_tokens = starts[-1]
    if num_tokens % multiple:
        raise ScheduleError(
            f"a micro-batch of {num_tokens} tokens cannot be divided over {multiple} "
            f"tensor-parallel ranks with --sequence-parallel; pad it to a multiple of {multiple}"
        )
    bounds = [0]
    for number in range(1, num_slices):
        cost = costs_before[-1] * number / num_slices
        # The sample in which the slice ends.
        index = max(0, bisect_left(costs_before, cost) - 1)
        end = starts[index] + _tokens_of_cost(cost - costs_before[index], length_cost)
        rounded_end = round(end / multiple) * multiple
        # Rounding leaves no slice empty, unless there are too few tokens for all of them.
        last_end = num_tokens - (num_slices - number) * multiple
        rounded_end = max(min(rounded_end, last_end), bounds[-1] + multiple)
        bounds.append(min(rounded_end, num_tokens))
    return (*bounds, num_tokens)


def _tokens_of_cost(cost: float, length_cost: LengthCost) -> float:
    """Return how many tokens from the start of a sample cost this much."""
    linear, quadratic = length_cost.linear, length_cost.quadratic
    root = sqrt(linear * linear + 4 * quadratic * max(cost, 0.0))
    # The quadratic formula in the form that avoids subtracting nearly equal numbers.
    return 2 * cost / (linear + root) if cost > 0 else 0.0


def rising(costs: Sequence[float]) -> tuple[int, ...]:
    """Return the numbers of micro-batches in the order of their costs, the cheapest first.

    Then the first slice, for which all ranks wait, is the smallest, and the longest micro-batch has
    all others before it to fill the pipeline.
    """
    return tuple(sorted(range(len(costs)), key=lambda number: (costs[number], number)))
