"""The two entrances: `prepare` and `check` for a command line, `configure` for a program.

Megatron's training loop allows two points. `prepare` runs between parsing and Megatron's own
validation: it translates the flags, works out the arguments that Megatron needs to host the
pipeline, and activates the configuration. `check` runs after the validation, compares what Megatron
computed with what was prepared, and logs what runs: the pipeline with its simulated makespan,
bubble and memory.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import megatron_ext
from megatron_ext import devices, hosts
from megatron_ext.config.active import (
    Active,
    Pipeline,
    activate_configuration,
    clear_configuration,
    required,
)
from megatron_ext.config.flags import in_fields
from megatron_ext.config.hosting import Preflight, inspect
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.roles import roles_in_words
from megatron_ext.config.stages import ModelBuild, batches_of, flags_for, with_stash
from megatron_ext.errors import ArgumentsError, DeviceError, ScheduleError
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.schedules import commands
from megatron_ext.schedules.generators.catalog import base_table
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import NOTABLE, quiet
from megatron_ext.schedules.search.policies import Hint
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.costs import Costs

_LOG = logging.getLogger(__name__)

# The attribute in which `prepare` keeps (old, new) of the arguments that it changed.
_REWRITTEN = "megatron_ext_rewritten"


def prepare(args: Namespace, requested: PipelineConfig | None = None) -> dict[str, Any]:
    """Activate a configuration; set and return the arguments that let Megatron host it.

    The configuration is the argument of `configure`; None: flags among the arguments choose it. A
    second call with the same arguments changes nothing; upstream's tools may make one.

    Raises:
        ArgumentsError: The flags contradict each other, or Megatron's own flags.
        ScheduleError: The schedule does not exist, or not for these sizes.
    """
    # First: if the flags are refused, nothing of a former training stays in force.
    clear_configuration()
    # Both runs of upstream's validation start from what the user gave. Nothing else changes
    # arguments, so keeping (old, new) is enough to undo it; later changes by others stay.
    given = Namespace(**vars(args))
    for dest, (before, after) in vars(given).pop(_REWRITTEN, {}).items():
        if getattr(given, dest, None) == after:
            setattr(given, dest, before)
    found = inspect(given, requested)
    found.raise_refusals()
    # What an earlier call had changed is taken back even where this one changes nothing.
    changes = {dest: (vars(given).get(dest), value) for dest, value in found.arguments.items()}
    vars(args).pop(_REWRITTEN, None)
    vars(args).update(vars(given) | found.arguments | ({_REWRITTEN: changes} if changes else {}))
    if getattr(given, "rank", 0) == 0:  # of the job, not of a role
        _log(*found.changes, *found.notices)
    size, seed = int(getattr(given, "world_size", None) or 1), getattr(given, "seed", None)
    _activate(found, requested, size, seed)
    return found.arguments


def _activate(
    found: Preflight, requested: PipelineConfig | None, world_size: int, seed: int | None
) -> None:
    """Put a checked configuration in force."""
    config = found.config or requested
    assert config is not None
    activate_configuration(
        Active(
            config,
            found.pipeline,
            transport_only=found.transport_only,
            job=found.job,
            world_size=world_size,
            seed=seed if config.draws_by_microbatch else None,
            requested=requested,
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
    if found.pipeline is not None:
        try:
            _check_pipeline(args, found.pipeline)
        except ArgumentsError:
            clear_configuration()
            raise
    if getattr(args, "rank", 0) == 0:
        _log(*_what_runs(args, found))


def _check_pipeline(args: Namespace, pipeline: Pipeline) -> None:
    """Refuse sizes that Megatron computed and that differ from those of the tables."""
    placement = pipeline.placement
    found = {
        "pipeline ranks": (args.pipeline_model_parallel_size, placement.num_ranks),
        "chunks": (
            getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            placement.num_stages // placement.num_ranks,
        ),
    }
    # Beside a schedule of batch sizes Megatron takes no --global-batch-size, and fills in one
    # micro-batch for each replica: nothing to compare.
    if getattr(args, "step_batch_size_schedule", None) is None:
        size = args.micro_batch_size * args.data_parallel_size
        found["micro-batches"] = (args.global_batch_size // size, pipeline.num_microbatches)
    # A later flag, a checkpoint's arguments or another program's patch may have changed them since.
    for what, (megatrons, ours) in found.items():
        if megatrons != ours:
            raise ArgumentsError(
                f"--pipeline-schedule {pipeline.name} was prepared for {ours} {what}, but Megatron "
                f"made {megatrons} of the flags; leave out the flag that changes it"
            )


def _what_runs(args: Namespace, found: Active) -> Iterator[str]:
    """Yield lines about what runs, and what it lacks."""
    job, pipeline = found.job, found.pipeline
    if job is not None:
        if job.rank == 0:
            count = batches_of(args, job.ranks.pp, 1).num_microbatches
            yield roles_in_words(args, job, count)
        return
    if found.config.tracing is not None and getattr(args, "skip_train", False):
        yield "--trace records training steps; --skip-train leaves none to record"
    if found.transport_only is not None:
        over = found.transport_only.transport
        yield f"pipeline schedule: Megatron's own; messages over {over}"
    if pipeline is None:
        return
    yield running(pipeline)
    if pipeline.dynamic is not None and (slower := warning(pipeline)) is not None:
        yield slower
    between = pipeline.placement.num_stages - 2
    # Transformer Engine reads no mask; Megatron's own attention takes a causal one without it.
    masks = ("reset_attention_mask", "create_attention_mask_in_dataloader")
    has_mask = all(getattr(args, dest, False) for dest in masks)
    if has_mask and between > 0 and getattr(args, "transformer_impl", None) == "local":
        yield (
            "--reset-attention-mask: Megatron gives the mask to the first and the last stage only, "
            f"so layers of the {between} stages between attend across documents"
        )


def running(pipeline: Pipeline) -> str:
    """Return a line about the pipeline that runs, with its simulated bubble and memory."""
    config = pipeline.config
    if config.dynamic is None:
        timeline = commands.evaluate(pipeline.full, pipeline.costs)
        order, peak = "", max(activation_peaks(timeline.schedule, config.stash_ratio))
    else:
        timeline = _dynamic_timeline(pipeline, pipeline.costs)
        order, peak = f"{order_in_words(pipeline)}; ", timeline.peak_activations
    schedule = timeline.schedule
    hosted = f" (two mirrored pipelines of {pipeline.pp // 2})" if config.twins == 2 else ""
    at_once = ""
    if config.weights_at_once and schedule.splits_backward:
        at_once = "; W runs right after I"
        if config.stash_ratio > 1:
            at_once += (
                f": all layers are recomputed, and W needs {config.stash_ratio:g} times what a "
                "micro-batch keeps before"
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


def _log(*lines: str) -> None:
    """Log notices, as warnings: scripts without logging set-up hide lower levels."""
    for line in lines:
        _LOG.warning("%s", line)


@overload
def configure(config: PipelineConfig) -> None: ...


@overload
def configure(
    config: PipelineConfig,
    *,
    pipeline_ranks: int,
    num_microbatches: int,
    num_layers: int,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
    world_size: int | None = None,
    seed: int | None = None,
) -> ModelBuild: ...


def configure(
    config: PipelineConfig,
    *,
    pipeline_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_layers: int | None = None,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
    world_size: int | None = None,
    seed: int | None = None,
) -> ModelBuild | None:
    """Activate a configuration, and return what to build the model with.

    For programs that do not parse Megatron's command line. Call it in every process of the job,
    with the same arguments, before you create process groups and the model. `megatron.core` may be
    imported earlier unless `config.device` is given. From then on
    `megatron.core.pipeline_parallel.get_forward_backward_func` returns the schedule. Another call,
    or `deconfigure`, ends this configuration.

    Without any size it waits for a host that knows them, `pretrain` or `finetune` of
    Megatron-Bridge, which then builds the model accordingly; it returns None.

    Args:
        config: The settings.
        pipeline_ranks: Ranks of one pipeline, of both where a schedule mirrors two.
        num_microbatches: Of one step of these ranks, both mirrored pipelines together.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Layers of multi-token prediction.
        layout: Which layers each stage has, in Megatron's notation; None: the same number in each.
        world_size: Ranks of the job; None: one pipeline.
        seed: Of the run; needed where random numbers are drawn by micro-batch, as with `dynamic`.

    Raises:
        UserError: A size is missing or impossible, the sizes do not fit the configuration, the
            device was named too late, or no host is installed.
        UpstreamMismatch: Active patches do not fit the installed Megatron.
    """
    if not isinstance(config, PipelineConfig):
        raise ArgumentsError(
            f"configure takes a PipelineConfig, not a {type(config).__name__}; for example "
            'configure(PipelineConfig(schedule="zb-v"), pipeline_ranks=4, ...)'
        )
    has_sizes = _check_sizes(
        pipeline_ranks=pipeline_ranks,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        world_size=world_size,
        mtp_num_layers=mtp_num_layers,
        seed=seed,
        layout=layout,
    )
    clear_configuration()
    if config.device != "auto":
        # Before the patches are armed: they import Megatron for the device that is chosen then.
        taken = devices.take(config.device).name
        if taken != config.device:
            raise DeviceError(
                f"device {config.device} came after the {taken} backend was armed (megatron.core "
                "was imported before); call configure first, or set "
                f"MEGATRON_EXT_DEVICE={config.device}"
            )
    megatron_ext.activate()
    REGISTRY.raise_mismatches()
    if config.disaggregation is not None:
        raise ArgumentsError(
            "disaggregation needs a training loop that supports both roles; start Megatron's own "
            "with --forward-backward-disaggregating"
        )
    if not has_sizes:
        hosts.check_some_host()
        await_host(config)
        return None
    if config.draws_by_microbatch and seed is None:
        raise ConfigurationError(
            "--microbatch-rng and --use-dpp need a seed; pass seed, the same on all ranks"
        )
    assert pipeline_ranks is not None
    assert num_microbatches is not None
    assert num_layers is not None
    name = config.schedule or base_table(config.chunks)
    if num_microbatches % config.twins:
        raise ConfigurationError(
            f"num_microbatches {num_microbatches} must be even for the two mirrored pipelines of "
            f"{name}; use {num_microbatches - 1} or {num_microbatches + 1}"
        )
    world_size = world_size or pipeline_ranks
    given = Namespace(
        world_size=world_size,
        tensor_model_parallel_size=1,  # Megatron's other sizes are replicas here
        pipeline_model_parallel_size=pipeline_ranks,
        num_virtual_stages_per_pipeline_rank=None if layout else config.chunks,
        pipeline_model_parallel_layout=layout,
        num_layers=num_layers,
        mtp_num_layers=mtp_num_layers,
        micro_batch_size=1,
        global_batch_size=num_microbatches * max(1, world_size // pipeline_ranks),
    )
    # One rank under Megatron's own schedule sends nothing: there is no transport to check.
    has_work = config.schedule or config.dynamic or pipeline_ranks > 1
    found = inspect(given, config) if has_work else Preflight()
    try:
        found.raise_refusals()
        hosted = found.pipeline or found.transport_only
        if hosted is None:
            hosted = Pipeline(replace(config, schedule=name), pipeline_ranks, num_microbatches)
        cut = found.arguments
        if found.pipeline is None:  # Megatron's own schedule, whose model is cut by the same rules
            cut, _ = flags_for(given, hosted.placement, name)
    except (ArgumentsError, ScheduleError) as error:
        raise type(error)(in_fields(str(error))) from None
    _activate(found, config, world_size, seed)
    if required().environment.local_rank == 0:
        _log(*map(in_fields, found.changes + found.notices))
    placement = hosted.placement
    chunks = placement.num_stages // placement.num_ranks
    return ModelBuild(
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=cut.get("pipeline_model_parallel_layout", layout),
        replicas=config.twins,
        num_microbatches=hosted.num_microbatches,
        variable_seq_lengths=config.variable_seq_lengths,
        stages_of=placement.stages_of,
    )


def _check_sizes(**given: object) -> bool:
    """Check the sizes and the layout that `configure` gets; return whether there are any."""
    sizes = {name: value for name, value in given.items() if value is not None}
    for name, value in sizes.items():
        least = 0 if name in ("mtp_num_layers", "seed") else 1
        if name == "layout":
            if not isinstance(value, str):
                raise ArgumentsError(f"layout {value!r} must be a string in Megatron's notation")
        elif not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentsError(f"{name} {value!r} must be a whole number of at least {least}")
    needed = ("pipeline_ranks", "num_microbatches", "num_layers")
    missing = [name for name in needed if name not in sizes]
    if missing and sizes:
        raise ArgumentsError(f"configure needs all sizes; give {', '.join(missing)} too")
    return bool(sizes)


def count_recomputation(built: Any) -> None:
    """Count what a program's model recomputes in the memory that a table keeps between I and W.

    `configure` comes before the model's settings, so it cannot; flags say it in advance. The object
    is a `TransformerConfig` or `DistributedDataParallelConfig` of Megatron.
    """
    found = required()
    if found.requested is None or found.pipeline is None:
        return
    if not hasattr(built, "recompute_granularity"):
        return
    counted = with_stash(found.pipeline.config, built)
    if counted == found.pipeline.config:
        return
    pipeline = replace(found.pipeline, config=counted)
    # Made now, so that a table that cannot be ends here and not in the first step.
    pipeline.schedule(pipeline.num_microbatches)
    found.config, found.pipeline = counted, pipeline
    if found.environment.local_rank == 0:
        _log(running(pipeline))


def await_host(config: PipelineConfig) -> None:
    """Keep a configuration until a host (`megatron_ext/hosts/`) gives the sizes of its job."""
    clear_configuration()
    activate_configuration(Active(config, requested=config, is_sized=False))
