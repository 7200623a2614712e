"""Cost of a length, from the measured durations of a traced run.

A micro-batch whose samples have L tokens each costs the sum of a*L + b*L^2. The trace has the
tokens of each micro-batch, the pairs of tokens of one sample (the sum of L^2), and how long each
stage took for it. A token then costs a + b * (pairs for a token), which is a line: for each stage,
a and b are those of the line through its durations by least squares; those of the model are their
sums. Slices of one length tell them too, because later ones attend to more.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.schedules.search.length_balance import LengthCost

if TYPE_CHECKING:
    from megatron_ext.tools.trace.aggregate import Run

_OUTLIER = 5.0
"""Durations that are off by more than so many times the median error do not count."""
_ONE_LENGTH = 1e-4
"""Micro-batches whose pairs for a token differ by less than this part are of one length."""


class Point(NamedTuple):
    """A micro-batch, or a slice of it: its size, and how long it took."""

    tokens: float
    pairs: float
    """Of tokens of one sample."""
    took_s: float


def measured_length_cost(run: Run) -> tuple[LengthCost, list[float]]:
    """Return what a length costs all stages, in seconds, from the traces of a run.

    With it come the relative errors, of each micro-batch on each stage.

    Raises:
        DataError: They have no lengths, or all are the same.
    """
    if (schedule := run.schedule) is not None and schedule.placement.twin_hops:
        raise DataError(
            f"{run.directory}: under {schedule.name} stages run micro-batches that their twin has "
            "read; trace another schedule to measure what a length costs"
        )
    slices = (1.0,) if schedule is None else schedule.slices
    # Only ranks that read data know lengths; all stages of a replica have the same.
    lengths = {(s.header.data, *of): size for s in run.surveys for of, size in s.lengths.items()}
    points: dict[int, list[Point]] = defaultdict(list)
    for survey in run.surveys:
        if survey.header.tensor:
            continue  # tensor-parallel ranks do the same as the first of them
        for (stage, step, microbatch, part), took in survey.microbatch_ns.items():
            tokens, pairs = lengths.get((survey.header.data, step, microbatch), (0, 0))
            if tokens:
                # The tokens of a slice attend to all before them, too.
                begin, end = sum(slices[:part]), sum(slices[: part + 1])
                share, attended = end - begin, end * end - begin * begin
                points[stage].append(Point(tokens * share, pairs * attended, took / 1e9))
    by_stage = list(points.values())
    if not by_stage:
        raise DataError(
            f"{run.directory} has no lengths of micro-batches; trace a schedule of this "
            "package, and data with tokens or cu_seqlens"
        )
    costs = [cost for cost in map(fit, by_stage) if cost is not None]
    if len(costs) < len(by_stage):
        raise DataError(
            f"{run.directory}: micro-batches of one length do not show what a length costs; trace "
            "more steps, or data of several lengths"
        )
    errors = [
        abs(cost.linear * tokens + cost.quadratic * pairs - took_s) / took_s
        for cost, of_cost in zip(costs, by_stage, strict=True)
        for tokens, pairs, took_s in of_cost
        if took_s
    ]
    together = LengthCost(sum(cost.linear for cost in costs), sum(cost.quadratic for cost in costs))
    return together, errors


def fit(points: Sequence[Point]) -> LengthCost | None:
    """Return the cost that comes closest to durations, in seconds; None: they do not tell it."""
    rates = [(pairs / tokens, took_s / tokens) for tokens, pairs, took_s in points]
    cost = None
    # Once more without outliers, such as a step in which the machine did something else.
    for _ in range(2):
        of_token, took = [x for x, _ in rates], [y for _, y in rates]
        most = max(of_token, default=0.0)
        if not any(took) or most - min(of_token) <= _ONE_LENGTH * most:
            break
        quadratic, linear = statistics.linear_regression(of_token, took)
        # A negative cost would make a longer sample cheaper: the best fit of the other alone.
        if linear < 0:
            linear, quadratic = 0.0, sum(x * y for x, y in rates) / sum(x * x for x in of_token)
        elif quadratic < 0:
            linear, quadratic = statistics.fmean(took), 0.0
        cost = LengthCost(linear, quadratic)
        errors = [abs(linear + quadratic * x - y) for x, y in rates]
        bound = _OUTLIER * statistics.median(errors)
        rates = [rate for rate, error in zip(rates, errors, strict=True) if error <= bound]
    return cost
