"""Prepares a training job for a configuration, at the two points where Megatron allows it.

`prepare` runs between parsing and Megatron's own validation: it translates the flags, works out the
arguments that Megatron needs to host the pipeline, and activates the configuration. `check` runs
after the validation, compares what Megatron computed with what was prepared, and logs what runs:
the pipeline with its simulated makespan, bubble and memory.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext.config import hosting, roles
from megatron_ext.config.active import (
    Active,
    activate_configuration,
    clear_configuration,
    required,
)
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules import commands
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import NOTABLE, quiet
from megatron_ext.schedules.search.policies import Hint
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.costs import Costs

__all__ = ["check", "order_in_words", "prepare", "rewritten", "running", "warning"]

_REWRITTEN = "megatron_ext_rewritten"
"""The attribute in which `_rewrite` keeps (old, new) of the arguments that it changed."""


def prepare(args: Namespace, asked: PipelineConfig | None = None) -> None:
    """Activate a configuration, and set the arguments that let Megatron host it.

    A second call with the same arguments changes nothing; upstream's tools may make one.

    Args:
        args: Parsed arguments with upstream's names; changed in place.
        asked: The argument of `configure`; None: the flags say what to run.

    Raises:
        ArgumentsError: The flags contradict each other, or Megatron's own flags.
        ScheduleError: The schedule does not exist, or not for these sizes.
    """
    clear_configuration()
    given = _as_given(args)
    found = hosting.inspect(given, asked)
    found.raise_refusals()
    _rewrite(args, found.arguments)
    for line in (*found.changes, *found.notices):
        hosting.tell(given, "%s", line)
    assert found.config is not None
    activate_configuration(
        Active(
            found.config,
            found.pipeline,
            transport_only=found.transport_only,
            job=found.job,
            world_size=int(getattr(given, "world_size", None) or 1),
            seed=given.seed if found.config.draws_by_microbatch else None,
            asked=asked,
        )
    )


def check(args: Namespace) -> None:
    """Compare Megatron's completed arguments with the prepared ones; log what runs.

    Raises:
        ArgumentsError: They differ.
    """
    found = required()
    if found.config.variable_seq_lengths:
        args.variable_seq_lengths = True  # no flag of Megatron's; its validation clears it
    try:
        if found.pipeline is not None:
            hosting.check_pipeline(args, found.pipeline)
    except ArgumentsError:
        clear_configuration()
        raise
    _tell_what_runs(args)


def _tell_what_runs(args: Namespace) -> None:
    found = required()
    job = found.job
    if job is not None:
        if job.rank == 0:
            hosting.tell(args, "%s", roles.roles_in_words(args, job))
        return
    if getattr(args, "rank", 0) != 0:
        return
    if found.config.tracing is not None and getattr(args, "skip_train", False):
        hosting.tell(args, "--trace records training steps; --skip-train leaves none to record")
    if found.transport_only is not None:
        over = found.transport_only.transport
        hosting.tell(args, "pipeline schedule: Megatron's own; messages over %s", over)
    if found.pipeline is not None:
        hosting.tell(args, "%s", running(found.pipeline))
        slower = None
        if found.config.dynamic is not None:
            slower = warning(found.pipeline)
        if slower is not None:
            hosting.tell(args, "%s", slower)
        between = found.pipeline.placement.num_stages - 2
        # Transformer Engine reads no mask; Megatron's own attention takes a causal one without it.
        has_mask = getattr(args, "reset_attention_mask", False) and getattr(
            args, "create_attention_mask_in_dataloader", False
        )
        if has_mask and between > 0 and getattr(args, "transformer_impl", None) == "local":
            hosting.tell(
                args,
                "--reset-attention-mask: Megatron gives the mask to the first and the last stage "
                "only, so layers of the %d stages between attend across documents",
                between,
            )


def _as_given(args: Namespace) -> Namespace:
    """Return the arguments as they were before `_rewrite`; later changes by others stay."""
    given = Namespace(**vars(args))
    for dest, (old, new) in vars(given).pop(_REWRITTEN, {}).items():
        if getattr(given, dest, None) == new:
            setattr(given, dest, old)
    return given


def rewritten(args: Namespace) -> dict[str, Any]:
    """Return the arguments that `prepare` changed, with their new values."""
    return {dest: new for dest, (_old, new) in getattr(args, _REWRITTEN, {}).items()}


def _rewrite(args: Namespace, wanted: dict[str, Any]) -> None:
    """Set arguments for Megatron and remember the old values. Nothing else changes arguments."""
    given = _as_given(args)
    vars(args).update(vars(given))
    vars(args).pop(_REWRITTEN, None)
    if wanted:
        changes = {dest: (getattr(args, dest, None), value) for dest, value in wanted.items()}
        vars(args).update({**wanted, _REWRITTEN: changes})


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
