"""Where to cut a micro-batch along its sequence, so that all slices cost the same.

With causal attention, the layers up to token x of a sequence cost a x + b x^2: a token attends to
all before it. Slices of equal length would therefore differ, and every rank would wait for the last
one of each micro-batch. With attention as a share of the whole, the end x of the j-th of k slices
of equal cost solves (1 - attention) x + attention x^2 = j/k, in shares of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt

from megatron_ext.errors import ScheduleError

MAX_SLICES = 64
"""Slices of one micro-batch: as many as names of messages distinguish (`native_transport.Tags`)."""
# Shares are multiples of 1/_STEPS, so that all sums of them are exact.
_STEPS = 1 << 30


def shares_of_equal_cost(num_slices: int, attention: float = 0.0) -> tuple[float, ...]:
    """Return the share of the tokens that each slice has.

    `attention` is the share of core attention in the cost of the whole sequence.

    Raises:
        ScheduleError: The number is not from 1 to 64.
    """
    if not 1 <= num_slices <= MAX_SLICES:
        raise ScheduleError(
            f"a micro-batch has 1 to {MAX_SLICES} slices, got {num_slices}; use 4 or 8"
        )
    linear = 1 - attention
    ends = [0]
    for number in range(1, num_slices + 1):
        cost = number / num_slices
        # The root of the quadratic in the form that subtracts no nearly equal numbers.
        end = 2 * cost / (linear + sqrt(linear * linear + 4 * attention * cost))
        ends.append(round(end * _STEPS))
    return tuple((end - start) / _STEPS for start, end in pairwise(ends))


def attention_of(shares: Sequence[float]) -> float:
    """Return the share of attention for which slices have equal cost (`shares_of_equal_cost`)."""
    if len(shares) == 1:
        return 0.0
    first = shares[0]
    return (first - 1 / len(shares)) / (first - first * first)


def token_bounds(shares: Sequence[float], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the first token of each slice, and the number of all tokens.

    Args:
        shares: Share of the tokens in each slice.
        length: Tokens of the sequence.
        multiple: Number that divides the length of each slice.

    Raises:
        ScheduleError: The sequence is too short for as many slices.
    """
    ends = [round(end * length / multiple) * multiple for end in accumulate(shares)]
    bounds = (0, *ends[:-1], length)
    has_empty_slice = any(end <= start for start, end in pairwise(bounds))
    if has_empty_slice or length % multiple:
        raise ScheduleError(
            f"a sequence of {length} tokens cannot be cut into {len(shares)} slices whose lengths "
            f"are multiples of {multiple}; use fewer (--pipeline-slices)"
        )
    return bounds
