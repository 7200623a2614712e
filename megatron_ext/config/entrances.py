"""Entry points for a training command line: `prepare` and `check`. Hosts use them too.

Both hook into Megatron's argument handling. `prepare` runs between parsing and Megatron's
validation: it translates the flags, computes the arguments that Megatron needs to host the
pipeline, and activates the configuration. `check` runs after the validation: it compares Megatron's
results with the prepared arguments and logs the pipeline that runs, with its simulated bubble and
memory.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import (
    Active,
    Pipeline,
    activate_configuration,
    clear_configuration,
    required,
)
from megatron_ext.config.batches import batches_of
from megatron_ext.config.completion import with_stash
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.flags import in_flags
from megatron_ext.config.hosting import inspect
from megatron_ext.config.roles import roles_in_words
from megatron_ext.errors import ArgumentsError, reworded
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import NOTABLE, quiet
from megatron_ext.schedules.search.policies import Hint
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.errors import Wording
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.costs import Costs

_LOG = logging.getLogger(__name__)

# The attribute in which `prepare` saves (old, new) for each argument that it changes.
_REWRITTEN = "megatron_ext_rewritten"


def prepare(
    args: Namespace,
    requested: PipelineConfig | None = None,
    *,
    script_defaults: Mapping[str, Any] | None = None,
    wording: Wording = in_flags,
) -> dict[str, Any]:
    """Activate a configuration and set the arguments that Megatron needs to host it.

    Some upstream tools call this twice. A second call with the same arguments changes nothing.

    Args:
        args: Megatron's arguments before its validation. They are changed in place.
        requested: The argument to `configure`. If None, flags among the arguments choose the
            pipeline.
        script_defaults: A training script's values for missing arguments. If None, arguments that
            Megatron needs may be missing.
        wording: Renders settings for the reader of errors and log lines.

    Returns:
        The changed arguments by name.

    Raises:
        ArgumentsError: The flags contradict each other or Megatron's own flags.
        ScheduleError: The schedule does not exist, or cannot run with these sizes.
    """
    # Clear first, so that no earlier configuration stays active if the flags are rejected.
    clear_configuration()
    # Upstream may validate twice, and both validations must start from the user's
    # arguments. Undo our earlier changes, but keep values that other code has set since
    # then.
    user_args = Namespace(**vars(args))
    rewritten_earlier = vars(user_args).pop(_REWRITTEN, {})
    for dest, (before, after) in rewritten_earlier.items():
        if getattr(user_args, dest, None) == after:
            setattr(user_args, dest, before)
    preflight = inspect(user_args, requested, script_defaults=script_defaults)
    preflight.raise_refusals(wording)
    # Undo the changes from an earlier call even if this call changes nothing.
    vars(args).pop(_REWRITTEN, None)
    vars(args).update(vars(user_args))
    rewritten = {}
    for dest, value in preflight.arguments.items():
        rewritten[dest] = (getattr(user_args, dest, None), value)
        setattr(args, dest, value)
    if rewritten:
        setattr(args, _REWRITTEN, rewritten)
    # Read the user's arguments: `args.rank` is now the rank within a role, so several ranks have 0.
    if getattr(user_args, "rank", 0) == 0:
        lines = preflight.changes + preflight.notices
        log(*[reworded(line, wording) for line in lines])
    seed = getattr(user_args, "seed", None)
    replicas_differ = getattr(user_args, "data_parallel_random_init", None)
    put_in_force(preflight, requested, seed, replicas_differ=bool(replicas_differ))
    return preflight.arguments


def put_in_force(
    preflight: Preflight,
    requested: PipelineConfig | None,
    seed: int | None,
    *,
    replicas_differ: bool = False,
) -> None:
    """Activate a checked configuration."""
    config = preflight.config or requested
    assert config is not None
    in_force = Active(
        config,
        preflight.pipeline,
        transport_only=preflight.transport_only,
        job=preflight.job,
        choice=preflight.choice,
        seed=seed if config.draws_by_microbatch else None,
        replicas_differ=replicas_differ,
        requested=requested,
    )
    activate_configuration(in_force)


def check(args: Namespace) -> None:
    """Compare Megatron's completed arguments with the prepared ones and log what runs.

    Raises:
        ArgumentsError: The arguments differ.
    """
    in_force = required()
    # Set it here, because Megatron's validation clears it: it is not one of Megatron's flags.
    if in_force.config.variable_seq_lengths:
        args.variable_seq_lengths = True
    if in_force.pipeline is not None:
        _check_pipeline(args, in_force.pipeline)
    if getattr(args, "rank", 0) == 0:
        log(*_what_runs(args, in_force))


def _check_pipeline(args: Namespace, pipeline: Pipeline) -> None:
    """Raise an error if sizes that Megatron computed differ from the sizes in the tables."""
    placement = pipeline.placement
    prepared = {
        "pipeline ranks": placement.num_ranks,
        "chunks": placement.num_stages // placement.num_ranks,
    }
    computed = {
        "pipeline ranks": args.pipeline_model_parallel_size,
        "chunks": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
    }
    # With --step-batch-size-schedule, Megatron sets the global batch size to one micro-batch per
    # replica, so there is nothing to compare.
    if getattr(args, "step_batch_size_schedule", None) is None:
        samples = args.micro_batch_size * args.data_parallel_size
        prepared["micro-batches"] = pipeline.num_microbatches
        computed["micro-batches"] = args.global_batch_size // samples
    # A later flag, a checkpoint's arguments or another program's patch may have changed the sizes.
    for size, count in prepared.items():
        if computed[size] != count:
            # The program may catch this error, so do not leave a pipeline active that
            # does not fit the model.
            clear_configuration()
            raise ArgumentsError(
                f"--pipeline-schedule {pipeline.name} was prepared for {count} {size}, but "
                f"Megatron computed {computed[size]}; remove the flag that changes this number"
            )


def _what_runs(args: Namespace, in_force: Active) -> Iterator[str]:
    """Yield log lines about the pipeline or roles that run, and their limitations."""
    # `args.rank` is 0 on one rank of each role, but `job.rank` is the rank in the whole job.
    job = in_force.job
    if job is not None:
        if job.rank == 0:
            batches = batches_of(args, job.ranks.pp, 1)
            yield roles_in_words(args, job, batches.num_microbatches)
        return
    if in_force.config.tracing is not None and getattr(args, "skip_train", False):
        yield "--trace records nothing with --skip-train: it only records training steps"
    if in_force.transport_only is not None:
        wires = _wires_in_words(in_force.transport_only.transport)
        yield f"pipeline schedule: Megatron's own; messages over {wires}"
    pipeline = in_force.pipeline
    if pipeline is None:
        return
    yield running(pipeline)
    if pipeline.dynamic is not None:
        advice = warning(pipeline)
        if advice is not None:
            yield advice
    num_between = pipeline.placement.num_stages - 2
    if num_between > 0 and _reads_mask(args):
        yield (
            "--reset-attention-mask: Megatron passes the mask only to the first and last stages, "
            f"so the layers of the {num_between} stages between them attend across documents"
        )


def _reads_mask(args: Namespace) -> bool:
    """Return whether layers use the data loader's attention mask, which separates documents."""
    # Transformer Engine ignores the mask. Megatron's own attention is causal without a mask.
    if getattr(args, "transformer_impl", None) != "local":
        return False
    settings = ("reset_attention_mask", "create_attention_mask_in_dataloader")
    return all(getattr(args, dest, False) for dest in settings)


def running(pipeline: Pipeline) -> str:
    """Return a log line about the pipeline that runs, with its simulated bubble and memory."""
    config = pipeline.config
    # The figures are for a full batch.
    if config.dynamic is None:
        timeline = evaluate(pipeline.full, pipeline.costs)
        peak = max(activation_peaks(timeline.schedule, config.stash_ratio))
        order = ""
    else:
        timeline = _dynamic_timeline(pipeline, pipeline.costs)
        peak = timeline.peak_activations
        order = f"{order_in_words(pipeline)}; "
    schedule = timeline.schedule
    hosted = ""
    if config.twins == 2:
        hosted = f" (two mirrored pipelines of {pipeline.pp // 2})"
    at_once = ""
    if config.weights_at_once and schedule.splits_backward:
        at_once = "; W runs right after I"
        if config.stash_ratio > 1:
            at_once += (
                f": all layers are recomputed, and W needs {config.stash_ratio:g} times the memory "
                "that a micro-batch keeps before I"
            )
    remarks = ""
    for feature in feature_rules():
        for remark in feature.remarks(pipeline, schedule):
            remarks += f"; {remark}"
    return (
        f"pipeline schedule: {schedule.label} on {pipeline.pp} ranks{hosted}, "
        f"{schedule.total_microbatches} micro-batches: {order}bubble {timeline.bubble:g} "
        f"({100 * timeline.bubble_ratio:.1f} %), peak {peak:g} activations, "
        f"simulated for costs {pipeline.costs}; messages over "
        f"{_wires_in_words(pipeline.transport)}{at_once}{remarks}"
    )


def _wires_in_words(transport: str) -> str:
    """Return the transport's name for the log."""
    # `auto` is resolved whenever two ranks connect.
    if transport == "auto":
        return "the fastest transport between any two ranks (auto)"
    return transport


def order_in_words(pipeline: Pipeline) -> str:
    """Describe a dynamic pipeline's policy and its memory bound, for the log."""
    assert pipeline.dynamic is not None
    # All ranks have the same bound, so rank 0 stands for all of them.
    policy = pipeline.policy(pipeline.num_microbatches, 0)
    schedule = pipeline.full
    # Convert from activations for one stage to activations for the part of the model on one rank.
    share = schedule.pp / schedule.num_stages
    if isinstance(policy, Hint) and pipeline.config.has_table_per_step:
        longest = pipeline.margin_by_length
        bound = f"at most the peak of each step's table (+{longest} of its longest micro-batches)"
    elif isinstance(policy, Hint):
        max_activations = share * policy.cap
        bound = f"at most {max_activations:g} activations (+{pipeline.dynamic.margin})"
        if pipeline.config.stash_ratio > 1:
            bound += f", {pipeline.config.stash_ratio:g} between I and W"
    else:
        bound = f"no bound on activations, up to {schedule.num_microbatches}"
    split = "" if pipeline.splits else ", whole backward passes"
    return f"dynamic order by {pipeline.dynamic.policy}, {bound}{split}"


def _dynamic_timeline(pipeline: Pipeline, costs: Costs) -> Timeline:
    """Simulate a dynamic pipeline."""
    count = pipeline.num_microbatches
    table = pipeline.schedule(count)
    return simulate_dynamic(table, lambda rank: pipeline.policy(count, rank), costs)


def warning(pipeline: Pipeline) -> str | None:
    """Return advice if the static order is at least as fast when no message is late, else None."""
    # Without jitter, nothing arrives late.
    calm = quiet(pipeline.costs)
    static = simulate(pipeline.static().full, calm)
    dynamic = _dynamic_timeline(pipeline, calm)
    ratio = static.makespan / dynamic.makespan
    if ratio >= 1 + NOTABLE:
        return None
    comparison = "is as fast as"
    if ratio < 1 - NOTABLE:
        comparison = f"takes {100 * (1 - ratio):.1f} % less time than"
    return (
        f"as long as no message or micro-batch is late, the static order of {pipeline.name} "
        f"{comparison} --use-dpp (simulated); remove --use-dpp unless links or micro-batches "
        "vary"
    )


def log(*lines: str) -> None:
    """Log notices as warnings, because scripts that do not configure logging hide lower levels."""
    for line in lines:
        _LOG.warning("%s", line)


def count_recomputation(built: Any) -> None:
    """Update the memory that tables count between I and W to match the recomputation settings.

    `configure` runs before the model's settings exist, so the memory is computed when they are
    created. With flags, it is known in advance.

    Args:
        built: Megatron's `TransformerConfig` or `DistributedDataParallelConfig`.
    """
    in_force = required()
    # Only `TransformerConfig` has recomputation settings.
    is_model = hasattr(built, "recompute_granularity")
    if in_force.requested is None or in_force.pipeline is None or not is_model:
        return
    config = with_stash(in_force.pipeline.config, vars(built))
    # A program may create several configurations for one model. Only the first one changes
    # anything.
    if config == in_force.pipeline.config:
        return
    pipeline = replace(in_force.pipeline, config=config)
    # Generate the table now, so that an impossible table fails here instead of in the first step.
    pipeline.schedule(pipeline.num_microbatches)
    in_force.config = config
    in_force.pipeline = pipeline
    if in_force.environment.local_rank == 0:
        log(running(pipeline))


def await_host(config: PipelineConfig) -> None:
    """Keep a configuration until a host (`megatron_ext/hosts/`) provides the job's sizes."""
    clear_configuration()
    unsized = Active(config, requested=config, is_sized=False)
    activate_configuration(unsized)
