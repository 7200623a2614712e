"""The entrance of a command line: `prepare` and `check`. Hosts enter by it, too.

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
from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import (
    Active,
    Pipeline,
    activate_configuration,
    clear_configuration,
    required,
)
from megatron_ext.config.batches import batches_of
from megatron_ext.config.hosting import inspect
from megatron_ext.config.roles import roles_in_words
from megatron_ext.config.stages import with_stash
from megatron_ext.errors import ArgumentsError
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
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.costs import Costs

_LOG = logging.getLogger(__name__)

# The attribute in which `prepare` keeps (old, new) of the arguments that it changed.
_REWRITTEN = "megatron_ext_rewritten"


def prepare(
    args: Namespace,
    requested: PipelineConfig | None = None,
    *,
    script_defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Activate a configuration; set and return the arguments that let Megatron host it.

    The configuration is the argument of `configure`; None: flags among the arguments choose it. A
    second call with the same arguments changes nothing; upstream's tools may make one.
    `script_defaults` are what a training script brings for arguments that were not given; None:
    they may lack what Megatron needs.

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
    found = inspect(given, requested, script_defaults=script_defaults)
    found.raise_refusals()
    # What an earlier call had changed is taken back even where this one changes nothing.
    changes = {dest: (vars(given).get(dest), value) for dest, value in found.arguments.items()}
    vars(args).pop(_REWRITTEN, None)
    vars(args).update(vars(given) | found.arguments | ({_REWRITTEN: changes} if changes else {}))
    if getattr(given, "rank", 0) == 0:  # of the job, not of a role
        log(*found.changes, *found.notices)
    put_in_force(found, requested, getattr(given, "seed", None))
    return found.arguments


def put_in_force(found: Preflight, requested: PipelineConfig | None, seed: int | None) -> None:
    """Put a checked configuration in force."""
    config = found.config or requested
    assert config is not None
    activate_configuration(
        Active(
            config,
            found.pipeline,
            transport_only=found.transport_only,
            job=found.job,
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
        _check_pipeline(args, found.pipeline)
    if getattr(args, "rank", 0) == 0:
        log(*_what_runs(args, found))


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
            clear_configuration()
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
        wires = _wires_in_words(found.transport_only.transport)
        yield f"pipeline schedule: Megatron's own; messages over {wires}"
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
        timeline = evaluate(pipeline.full, pipeline.costs)
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
        f"simulated for costs {pipeline.costs}; messages over "
        f"{_wires_in_words(pipeline.transport)}{at_once}"
    )


def _wires_in_words(transport: str) -> str:
    """Return what carries messages; `auto` is decided when ranks connect, pair by pair."""
    if transport == "auto":
        return "the fastest wire of each pair of ranks (auto)"
    return transport


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


def log(*lines: str) -> None:
    """Log notices, as warnings: scripts without logging set-up hide lower levels."""
    for line in lines:
        _LOG.warning("%s", line)


def count_recomputation(built: Any) -> None:
    """Count what a program's model recomputes in the memory that a table keeps between I and W.

    `configure` comes before the model's settings, so it cannot; flags say it in advance. The object
    is a `TransformerConfig` or `DistributedDataParallelConfig` of Megatron.
    """
    found = required()
    is_model = hasattr(built, "recompute_granularity")
    if found.requested is None or found.pipeline is None or not is_model:
        return
    counted = with_stash(found.pipeline.config, built)
    if counted == found.pipeline.config:
        return
    pipeline = replace(found.pipeline, config=counted)
    # Made now, so that a table that cannot be ends here and not in the first step.
    pipeline.schedule(pipeline.num_microbatches)
    found.config, found.pipeline = counted, pipeline
    if found.environment.local_rank == 0:
        log(running(pipeline))


def await_host(config: PipelineConfig) -> None:
    """Keep a configuration until a host (`megatron_ext/hosts/`) gives the sizes of its job."""
    clear_configuration()
    activate_configuration(Active(config, requested=config, is_sized=False))
