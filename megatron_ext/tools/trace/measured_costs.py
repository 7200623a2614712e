"""Extracts the costs of actions and messages from a run's traces."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import DataError
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.slices import attention_of
from megatron_ext.tools.trace.survey import ActionKey

if TYPE_CHECKING:
    from megatron_ext.planning.measured import StageTimes
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tools.trace.aggregate import Run

_MIN_SAMPLE = 8
"""Minimum number of durations needed to estimate jitter."""
_NORMAL_QUARTILES = 1.349
"""Interquartile range of a normal distribution, in standard deviations."""


def measured_costs(run: Run, schedule: Schedule) -> Costs:
    """Return the measured costs of a run's actions and messages, in seconds.

    Raises:
        DataError: A stage has no traced actions, slices depended on lengths, or W ran during other
            actions.
    """
    refuse_slices_by_length(run)
    if run.surveys and run.settings.get("waiting_weights"):
        raise DataError(
            f"{run.directory}: with --pipeline-waiting-weights, W ran during other actions, so the "
            "trace cannot tell their times apart; trace a run without this flag"
        )
    # Action -> each rank's median, in nanoseconds. Slices are kept separate, because
    # attention makes their durations differ, which would count as jitter: 12 % of a
    # step for zb-h1 with four slices.
    medians_ns: dict[ActionKey, list[float]] = defaultdict(list)
    # Stage -> each rank's median.
    exchanges_ns: dict[int, list[float]] = defaultdict(list)
    sigmas: list[float] = []
    for rank in run.surveys:
        for stage, sample_ns in rank.exchanges.items():
            exchanges_ns[stage].append(statistics.median(sample_ns))
        for action, sample_ns in rank.actions.items():
            medians_ns[action].append(statistics.median(sample_ns))
            sigma = _jitter(sample_ns)
            if sigma is not None:
                sigmas.append(sigma)

    stages: list[StageTimes] = []
    for stage in range(schedule.num_stages):
        times = _times_of_stage(medians_ns, stage, schedule.num_slices)
        if times is None:
            raise DataError(
                f"{run.directory}: the trace lacks forward or backward passes of stage {stage}; "
                "trace all pipeline ranks for more than one iteration"
            )
        stages.append(times)
    forwards_s, inputs_s, weights_s = zip(*stages, strict=True)
    forward_s = sum(forwards_s)
    input_s = sum(inputs_s)
    weight_s = sum(weights_s)
    # Only messages that the receiver waited for show the latency. Other messages
    # arrive before they are needed.
    delays_ns = [link.delay_ns for link in run.links if link.delay_ns is not None]
    exchanged_ns = sum(
        statistics.median(sample_ns) for sample_ns in exchanges_ns.values()
    )
    exchanged_share = exchanged_ns / 1e9 / forward_s
    return Costs(
        # The sums cover all stages, while `Costs` describes 1/pp of the model.
        forward_s / schedule.pp,
        input_s / schedule.pp,
        weight_s / schedule.pp,
        latency=statistics.median(delays_ns or [0]) / 1e9,
        stages=tuple(stages),
        jitter=statistics.median(sigmas or [0.0]),
        # `Costs` requires a share below 1, but a ratio of medians from
        # different samples may exceed 1.
        all_to_all=min(0.999, exchanged_share),
    )


def refuse_slices_by_length(run: Run) -> None:
    """Reject a run in which slices depended on lengths.

    Raises:
        DataError: The run used `--pipeline-slice-tokens`.
    """
    if run.surveys and run.settings.get("slice_tokens"):
        raise DataError(
            f"{run.directory}: with --pipeline-slice-tokens, micro-batches differ in length and in "
            "their slices, so the trace does not show how long a whole micro-batch takes; trace a "
            "run without this flag"
        )


def _jitter(sample_ns: Sequence[int]) -> float | None:
    """Return the standard deviation of log durations, or None if there are too few durations."""
    positive_ns = [time_ns for time_ns in sample_ns if time_ns > 0]
    if len(positive_ns) < _MIN_SAMPLE:
        return None
    # Use quartiles: a few steps disturbed by other programs hardly affect them.
    low_ns, _, high_ns = statistics.quantiles(positive_ns, n=4)
    return math.log(high_ns / low_ns) / _NORMAL_QUARTILES


def _times_of_stage(
    medians_ns: Mapping[ActionKey, Sequence[float]],
    stage: int,
    num_slices: int,
) -> StageTimes | None:
    """Return a micro-batch's forward, input-gradient and weight-gradient times on a stage.

    Each time is the sum over the micro-batch's slices. Return None if the stage was not traced.
    """

    def seconds(name: str) -> float:
        time_s = 0.0
        for slice_index in range(num_slices):
            action = ActionKey(name, stage, slice_index)
            medians_of_ranks_ns = medians_ns.get(action, [0.0])
            time_s += statistics.median(medians_of_ranks_ns) / 1e9
        return time_s

    forward_s = seconds("forward")
    input_s = seconds("input_gradient")
    weight_s = seconds("weight_gradient")
    if not (input_s and weight_s):
        # The backward pass was not split, so the trace only has the total.
        # Both halves compute matrix products of the same size, so assume that
        # they take the same time.
        input_s = seconds("backward") / 2
        weight_s = input_s
    if not (forward_s and weight_s):
        return None
    return forward_s, input_s, weight_s


def planned(run: Run, schedule: Schedule) -> Timeline:
    """Return a run's table simulated with the measured costs, in seconds."""
    attention = attention_of(schedule.slices)
    costs = measured_costs(run, schedule)
    without_jitter = replace(costs, jitter=0.0, attention=attention)
    return evaluate(schedule, without_jitter)
