"""Fits the cost of a sample, as a function of its length, to the durations in a traced run.

A sample of L tokens costs a*L + b*L^2, and a micro-batch costs the sum over its samples. For each
micro-batch, the trace contains the number of tokens, the sum of L^2 over its samples, and the time
on each stage. The cost per token, a + b * (sum of L^2 per token), is a straight line. A
least-squares fit yields a and b for each stage, and their sums over the stages are the values for
the model. Even if all samples have the same length, their slices are enough for a fit, because
later slices attend to more tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.tools.trace.measured_costs import refuse_slices_by_length

if TYPE_CHECKING:
    from megatron_ext.tools.trace.aggregate import Run
    from megatron_ext.tools.trace.survey import MicrobatchSize

_OUTLIER = 5.0
"""The second fit ignores durations with an error above this multiple of the median error."""
_ONE_LENGTH = 1e-4
"""Micro-batches have the same length if their squares per token differ by at most this fraction."""


class Point(NamedTuple):
    """The size of a micro-batch or slice and its duration on a stage."""

    tokens: float
    sum_of_squares: float
    """Sum of the squared lengths of its samples."""
    took_s: float


def measured_length_cost(run: Run) -> tuple[LengthCost, list[float]]:
    """Return a sample's cost by length, in seconds over all stages, from a run's traces.

    The second value holds the fit's relative error for each micro-batch on each stage.

    Raises:
        DataError: The traces contain no lengths or only one, or slices depended on lengths.
    """
    refuse_slices_by_length(run)
    schedule = run.schedule
    if schedule is not None and schedule.placement.twin_hops:
        raise DataError(
            f"{run.directory}: under {schedule.name}, stages run micro-batches that another rank "
            "read; trace another schedule to measure the cost per sample length"
        )
    slices: Sequence[float] = (1.0,)
    if schedule is not None:
        slices = schedule.slices
    points_of_stages = list(_points(run, slices).values())
    if not points_of_stages:
        raise DataError(
            f"{run.directory} contains no micro-batch lengths; trace one of this package's "
            "schedules, with data that has tokens or cu_seqlens"
        )
    # A micro-batch passes through all stages, so add up the stages' costs.
    errors: list[float] = []
    linear_s = 0.0
    quadratic_s = 0.0
    for points in points_of_stages:
        cost = fit(points)
        if cost is None:
            raise DataError(
                f"{run.directory}: all micro-batches have the same length, which is not enough to "
                "fit the cost per sample length; trace more steps, or data with several lengths"
            )
        linear_s += cost.linear
        quadratic_s += cost.quadratic
        for tokens, sum_of_squares, took_s in points:
            if took_s:
                fitted_s = cost.linear * tokens + cost.quadratic * sum_of_squares
                errors.append(abs(fitted_s - took_s) / took_s)
    return LengthCost(linear_s, quadratic_s), errors


def _points(run: Run, slices: Sequence[float]) -> dict[int, list[Point]]:
    """Return stage -> the micro-batches with known lengths."""
    # Only ranks that read data record lengths, which apply to all stages of the replica:
    # (replica, step, micro-batch) -> size
    sizes: dict[tuple[int, int, int], MicrobatchSize] = {}
    for rank in run.surveys:
        for (step, microbatch), size in rank.lengths.items():
            sizes[rank.header.data, step, microbatch] = size
    points: dict[int, list[Point]] = defaultdict(list)
    for rank in run.surveys:
        if rank.header.tensor:
            continue  # tensor-parallel ranks repeat the first one's work
        for place, took_ns in rank.microbatch_ns.items():
            stage, step, microbatch, slice_index = place
            microbatch_key = rank.header.data, step, microbatch
            microbatch_size = sizes.get(microbatch_key)
            if microbatch_size is None or not microbatch_size.tokens:
                continue
            # A slice's tokens also attend to the tokens of all earlier slices.
            begin = sum(slices[:slice_index])
            end = sum(slices[: slice_index + 1])
            attended = end * end - begin * begin
            point = Point(
                tokens=microbatch_size.tokens * (end - begin),
                sum_of_squares=microbatch_size.sum_of_squares * attended,
                took_s=took_ns / 1e9,
            )
            points[stage].append(point)
    return points


class _Rate(NamedTuple):
    """A point in the line fit."""

    squares_per_token: float
    s_per_token: float


def fit(points: Sequence[Point]) -> LengthCost | None:
    """Return the best fit to the durations, in seconds, or None if they do not determine one."""
    rates = []
    for point in points:
        squares_per_token = point.sum_of_squares / point.tokens
        s_per_token = point.took_s / point.tokens
        rates.append(_Rate(squares_per_token, s_per_token))
    cost = None
    # Fit twice. The second fit omits outliers, such as steps
    # disturbed by other programs.
    for _ in range(2):
        squares = [rate.squares_per_token for rate in rates]
        seconds = [rate.s_per_token for rate in rates]
        # Breaking in the second pass keeps the first fit.
        if not any(seconds):
            break
        longest = max(squares)
        has_one_length = longest - min(squares) <= _ONE_LENGTH * longest
        if has_one_length:
            break
        cost = _line(squares, seconds)
        errors = []
        for rate in rates:
            fitted_s = cost.linear + cost.quadratic * rate.squares_per_token
            errors.append(abs(fitted_s - rate.s_per_token))
        bound = _OUTLIER * statistics.median(errors)
        rates_within_bound = []
        for rate, error in zip(rates, errors, strict=True):
            if error <= bound:
                rates_within_bound.append(rate)
        rates = rates_within_bound
    return cost


def _line(squares: Sequence[float], seconds: Sequence[float]) -> LengthCost:
    """Return the least-squares line through the points that has no negative costs.

    `squares` and `seconds` hold each point's values per token.
    """
    quadratic, linear = statistics.linear_regression(squares, seconds)
    # A cost cannot be negative: set it to 0 and fit only the other one.
    if linear < 0:
        sum_of_xy = sum(x * y for x, y in zip(squares, seconds, strict=True))
        sum_of_xx = sum(x * x for x in squares)
        return LengthCost(0.0, sum_of_xy / sum_of_xx)
    if quadratic < 0:
        return LengthCost(statistics.fmean(seconds), 0.0)
    return LengthCost(linear, quadratic)
