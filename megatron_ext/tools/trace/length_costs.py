"""Cost of a length, from the measured durations of a traced run.

A micro-batch whose samples have L tokens each costs the sum of a*L + b*L^2. The trace has the
tokens of each micro-batch, the pairs of tokens of one sample (the sum of L^2), and how long each
stage took for it. For each stage, a and b are what comes closest to its durations by least squares;
those of the model are their sums. Slices of one length tell them too, because later ones attend to
more.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.schedules.search.length_balance import LengthCost
from megatron_ext.tools.trace.reader import load_schedule, open_run
from megatron_ext.tracing.records import ACTION_NAMES, sizes_in

__all__ = ["MeasuredCost", "Point", "fit", "measured_length_cost"]

_WORK = frozenset(ACTION_NAMES.values())
_OUTLIER = 5.0
"""Durations that are off by more than so many times the median error do not count."""


class Point(NamedTuple):
    """One micro-batch, or a slice of it: its size, and how long it took."""

    tokens: float
    pairs: float
    """Of tokens of one sample."""
    took_s: float


@dataclass(frozen=True)
class MeasuredCost:
    """Cost of a length over all stages, in seconds."""

    cost: LengthCost
    error: float
    """Median of the relative errors, of a micro-batch on a stage."""
    num_points: int
    """How many were measured."""


def measured_length_cost(directory: Path) -> MeasuredCost:
    """Return what a length costs, from the folder of a traced run.

    Raises:
        DataError: There is no trace, it has no lengths, or all are the same.
    """
    files, _ = open_run(directory)
    schedule = load_schedule(directory)
    if schedule is not None and schedule.placement.twin_hops:
        raise DataError(
            f"{directory}: under {schedule.name} stages run micro-batches that their twin has "
            "read; trace another schedule to measure what a length costs"
        )
    # By replica, iteration and micro-batch: its tokens and pairs, and what a stage took by slice.
    sizes: dict[tuple[int, int, int], tuple[int, int]] = {}
    took_ns: dict[int, dict[tuple[int, int, int, int], int]] = defaultdict(lambda: defaultdict(int))
    for file in files:
        if file.header.tensor:
            continue  # tensor-parallel ranks do the same as the first of them
        for position, iteration in enumerate(file.iterations()):
            if position == 0 and iteration.number <= 1:
                continue  # the first one warms up
            replica, step = file.header.data, iteration.number
            # Only ranks that read data know lengths; all stages of a replica have the same.
            for microbatch, size in sizes_in(iteration.end):
                sizes[replica, step, microbatch] = size
            for span in iteration.spans:
                stage, number = span.attributes.get("stage"), span.attributes.get("microbatch")
                if span.name in _WORK and type(stage) is int and type(number) is int:
                    part = span.attributes.get("slice", 0)
                    took_ns[stage][replica, step, number, part] += span.end_ns - span.begin_ns
    slices = (1.0,) if schedule is None else schedule.slices
    by_stage = [
        [
            Point(*_part(sizes[replica, step, number], slices, part), took / 1e9)
            for (replica, step, number, part), took in took_ns[stage].items()
            if (replica, step, number) in sizes
        ]
        for stage in sorted(took_ns)
    ]
    by_stage = [points for points in by_stage if points]
    if not by_stage:
        raise DataError(
            f"{directory} has no lengths of micro-batches; trace a schedule of this "
            "package, and data with tokens or cu_seqlens"
        )
    costs = [cost for cost in map(fit, by_stage) if cost is not None]
    if len(costs) < len(by_stage):
        raise DataError(
            f"{directory}: micro-batches of one length do not show what a length costs; trace more "
            "steps, or data of several lengths"
        )
    errors = [
        abs(_expected_s(cost, point) - point.took_s) / point.took_s
        for cost, points in zip(costs, by_stage, strict=True)
        for point in points
        if point.took_s
    ]
    together = LengthCost(sum(cost.linear for cost in costs), sum(cost.quadratic for cost in costs))
    return MeasuredCost(together, statistics.median(errors), len(errors))


def _part(size: tuple[int, int], slices: Sequence[float], part: int) -> tuple[float, float]:
    """Return tokens and pairs of a slice, whose tokens attend to all before them."""
    begin, end = sum(slices[:part]), sum(slices[: part + 1])
    return size[0] * (end - begin), size[1] * (end * end - begin * begin)


def _expected_s(cost: LengthCost, point: Point) -> float:
    return cost.linear * point.tokens + cost.quadratic * point.pairs


def fit(points: Sequence[Point]) -> LengthCost | None:
    """Return the cost that comes closest to durations, in seconds; None: they do not tell it.

    Outliers, such as a step in which the machine did something else, do not count.
    """
    found = _least_squares(points)
    if found is None:
        return None
    errors = [abs(_expected_s(found, point) - point.took_s) for point in points]
    most = _OUTLIER * statistics.median(errors)
    kept = [point for point, error in zip(points, errors, strict=True) if error <= most]
    return _least_squares(kept) or found


def _least_squares(points: Sequence[Point]) -> LengthCost | None:
    """Return the coefficients with the least squared errors, among those of 0 or more."""
    # In units of the largest values, so that the numbers below are of one size.
    most_tokens = max((point.tokens for point in points), default=0)
    most_pairs = max((point.pairs for point in points), default=0)
    if not (most_tokens and most_pairs):
        return None
    rows = [(tokens / most_tokens, pairs / most_pairs, took) for tokens, pairs, took in points]
    tt, pp = sum(t * t for t, _, _ in rows), sum(p * p for _, p, _ in rows)
    tp = sum(t * p for t, p, _ in rows)
    ty, py = sum(t * took for t, _, took in rows), sum(p * took for _, p, took in rows)
    # Lengths that are all alike leave the two coefficients undetermined.
    determinant = tt * pp - tp * tp
    if determinant <= 1e-9 * tt * pp:
        return None
    linear, quadratic = (ty * pp - py * tp) / determinant, (py * tt - ty * tp) / determinant
    # A negative cost would make a longer sample cheaper: the best fit of the other alone.
    if linear < 0:
        linear, quadratic = 0.0, py / pp
    elif quadratic < 0:
        linear, quadratic = ty / tt, 0.0
    return LengthCost(linear / most_tokens, quadratic / most_pairs) if ty + py else None
