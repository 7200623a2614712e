"""Log lines about a pipeline: its simulated makespan, bubble and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.schedules import commands
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import NOTABLE, quiet
from megatron_ext.schedules.search.policies import Hint
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.costs import Costs

__all__ = ["order_in_words", "running", "warning"]


def running(pipeline: Pipeline) -> str:
    """Return a line about the pipeline that runs, with its simulated bubble and memory."""
    if pipeline.dynamic is None:
        timeline = commands.evaluate(pipeline.full, pipeline.costs)
        order = ""
    else:
        timeline = _dynamic_timeline(pipeline, pipeline.costs)
        order = f"{order_in_words(pipeline)}; "
    schedule = timeline.schedule
    hosted = f" (two mirrored pipelines of {pipeline.pp // 2})" if pipeline.twins == 2 else ""
    peak = timeline.peak_activations
    config = pipeline.config
    if pipeline.dynamic is None:
        peak = max(activation_peaks(schedule, config.stash_ratio))
    at_once = ""
    if config.weights_at_once and schedule.splits_backward:
        at_once = (
            f"; W runs right after I: all layers are recomputed, and W needs "
            f"{config.stash_ratio:g} times what a micro-batch keeps before"
        )
    return (
        f"pipeline schedule: {schedule.label} on {pipeline.pp} ranks{hosted}, "
        f"{schedule.total_microbatches} micro-batches: {order}bubble {timeline.bubble:g} "
        f"({100 * timeline.bubble_ratio:.1f} %), peak {peak:g} activations, "
        f"simulated for costs {pipeline.costs}; messages over {pipeline.transport}{at_once}"
    )


def order_in_words(pipeline: Pipeline) -> str:
    """Describe the policy of a pipeline and its bound on memory, for the log."""
    assert pipeline.dynamic is not None
    policy = pipeline.policy(pipeline.num_microbatches, 0)
    schedule = pipeline.full
    share = schedule.pp / schedule.num_stages
    if isinstance(policy, Hint):
        most = share * policy.cap
        bound = f"at most {most:g} activations (+{pipeline.dynamic.margin})"
        if pipeline.config.stash_ratio > 1:
            bound += f", {pipeline.config.stash_ratio:g} between I and W"
    else:
        bound = f"no bound on activations, up to {schedule.num_microbatches}"
    split = "" if pipeline.splits else ", backwards whole"
    return f"dynamic order by {pipeline.dynamic.policy}, {bound}{split}"


def _dynamic_timeline(pipeline: Pipeline, costs: Costs) -> Timeline:
    """Simulate a dynamic pipeline."""
    m = pipeline.num_microbatches
    return simulate_dynamic(pipeline.schedule(m), lambda rank: pipeline.policy(m, rank), costs)


def warning(pipeline: Pipeline) -> str | None:
    """Return advice if the static order is as fast while nothing is late, else None."""
    calm = quiet(pipeline.costs)
    static = pipeline.static().full
    ratio = simulate(static, calm).makespan / _dynamic_timeline(pipeline, calm).makespan
    if ratio >= 1 + NOTABLE:
        return None
    less = 100 * (1 - ratio)
    takes = f"takes {less:.1f} % less time than" if ratio < 1 - NOTABLE else "is as fast as"
    return (
        f"while no message and no micro-batch is late, the order of {pipeline.name} itself {takes} "
        f"--use-dpp (simulated); leave --use-dpp out unless links or micro-batches vary"
    )
