"""Chooses where to cut a micro-batch along its sequence so that all slices cost the same.

With causal attention, the first x tokens in a sequence cost a x + b x^2, because a token attends to
all tokens before it. Slices of equal length would therefore differ in cost, and every rank would
wait for every micro-batch's last slice. Let `attention` be attention's share of the entire
sequence's cost. Then the j-th of k slices with equal costs ends at the fraction x of the sequence
that solves (1 - attention) x + attention x^2 = j/k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt

from megatron_ext.errors import ScheduleError

MAX_SLICES = 64
"""Maximum number of slices per micro-batch, limited by message tags (`native_transport.Tags`)."""
# Shares are multiples of 1/_STEPS, so that all of their sums are exact.
_STEPS = 1 << 30


def shares_of_equal_cost(num_slices: int, attention: float = 0.0) -> tuple[float, ...]:
    """Return every slice's share of the tokens.

    `attention` is core attention's share of the entire sequence's cost.

    Raises:
        ScheduleError: The number is not between 1 and 64.
    """
    if not 1 <= num_slices <= MAX_SLICES:
        raise ScheduleError(
            f"a micro-batch has 1 to {MAX_SLICES} slices, got {num_slices}; use 4 or 8"
        )
    linear = 1 - attention
    ends = [0]
    for number in range(1, num_slices + 1):
        cost = number / num_slices
        # This form of the quadratic formula avoids subtracting nearly equal numbers.
        root = sqrt(linear * linear + 4 * attention * cost)
        end = 2 * cost / (linear + root)
        ends.append(round(end * _STEPS))
    shares = []
    for start, end in pairwise(ends):
        shares.append((end - start) / _STEPS)
    return tuple(shares)


def attention_of(shares: Sequence[float]) -> float:
    """Return the attention share for which these slices have equal costs."""
    if len(shares) == 1:
        return 0.0
    first = shares[0]
    slice_cost = 1 / len(shares)
    # The first of k slices, with share x, costs (1 - a) x + a x^2 = 1/k. Solve for a.
    return (first - slice_cost) / (first - first * first)


def token_bounds(
    shares: Sequence[float],
    length: int,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Return every slice's first token, followed by the total number of tokens.

    Args:
        shares: Every slice's share of the tokens.
        length: Number of tokens in the sequence.
        multiple: The length of every slice must be a multiple of this number.

    Raises:
        ScheduleError: The sequence is too short for this many slices, or its length is not a
            multiple.
    """
    ends = []
    for end in accumulate(shares):
        num_multiples = round(end * length / multiple)
        ends.append(num_multiples * multiple)
    # The last slice ends with the sequence, however its end was rounded.
    bounds = (0, *ends[:-1], length)
    has_empty_slice = any(end <= start for start, end in pairwise(bounds))
    if has_empty_slice or length % multiple:
        raise ScheduleError(
            f"a sequence of {length} tokens cannot be cut into {len(shares)} slices whose lengths "
            f"are multiples of {multiple}; use fewer (--pipeline-slices)"
        )
    return bounds
