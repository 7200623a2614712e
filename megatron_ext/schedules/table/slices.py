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
    linear, ends = 1 - attention, [0]
    for number in range(1, num_slices + 1):
        part = number / num_slices
        # The root of the quadratic in the form that has no difference of equals.
        end = 2 * part / (linear + sqrt(linear * linear + 4 * attention * part))
        ends.append(round(end * _STEPS))
    return tuple((after - before) / _STEPS for before, after in pairwise(ends))


def attention_of(shares: Sequence[float]) -> float:
    """Return the share of attention for which slices have equal cost (`shares_of_equal_cost`)."""
    first = shares[0]
    return (first - 1 / len(shares)) / (first - first * first) if len(shares) > 1 else 0.0


def token_bounds(shares: Sequence[float], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the first token of each slice, and the number of all tokens.

    The length of each slice is a multiple of `multiple`.

    Raises:
        ScheduleError: The sequence is too short for as many slices.
    """
    ends = [round(end * length / multiple) * multiple for end in accumulate(shares)]
    bounds = (0, *ends[:-1], length)
    if any(after <= before for before, after in pairwise(bounds)) or length % multiple:
        raise ScheduleError(
            f"a sequence of {length} tokens cannot be cut into {len(shares)} slices whose lengths "
            f"are multiples of {multiple}; use fewer (--pipeline-slices)"
        )
    return bounds
