"""The one check of a configuration: what a pipeline accepts, changes and refuses.

`preflight` answers for any settings, on any machine and without torch. `inspect` is the same check
in a process of the job, which knows its device and its Transformer Engine; it also returns the
pipeline, and the arguments with which Megatron hosts it: two mirrored pipelines on D ranks are to
Megatron one of D/2 ranks with twice as many data-parallel replicas, and stages placed as a V or W
have a layout.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config import flags, incompatible, stages
from megatron_ext.config.active import Environment, Pipeline
from megatron_ext.config.batches import batches_of, check_file
from megatron_ext.config.command_line import CommandLine, read_command_line
from megatron_ext.config.incompatible import MEGATRON_FIELDS, RULES
from megatron_ext.config.refusals import Preflight
from megatron_ext.config.required_flags import missing_flags
from megatron_ext.config.roles import job_of, rank_map, role_arguments
from megatron_ext.config.sizes import JobSizes, layout_text
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, base_table
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.slices import shares_of_equal_cost, token_bounds
from megatron_ext.upstream.flag_list import megatron_flags
from megatron_ext.upstream.tree import setting_names

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import Disaggregation, PipelineConfig

_LOG = logging.getLogger(__name__)

# Megatron's defaults of what the checks read, where a missing argument does not mean the same.
_USUAL = {
    "add_bias_linear": True,
    "attention_dropout": 0.1,
    "ckpt_format": "torch_dist",
    "context_parallel_size": 1,
    "fp8_recipe": "delayed",
    "gradient_accumulation_fusion": True,
    "hidden_dropout": 0.1,
    "masked_softmax_fusion": True,
    "moe_token_dispatcher_type": "allgather",
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "transformer_impl": "transformer_engine",
}

# Arguments of `megatron.training` that checks read: megatron-core alone does not know them.
_OF_TRAINING = {
    "decrease_batch_size_if_needed", "dist_ckpt_optim_fully_reshardable",
    "distributed_timeout_minutes", "encoder_num_layers", "global_batch_size", "load",
    "micro_batch_size", "num_layers_per_virtual_pipeline_stage", "rampup_batch_size", "rank",
    "save", "seq_length", "step_batch_size_schedule", "world_size",
}  # fmt: skip


def preflight(
    arguments: Sequence[str] | Mapping[str, Any] | Namespace,
    config: PipelineConfig | None = None,
    *,
    world_size: int | None = None,
    device: str | None = None,
) -> Preflight:
    """Return what a configuration takes, changes and refuses; imports neither torch nor Megatron.

    The job may run on another machine: devices are taken to be GPUs that reach each other if the
    arguments name none, and Transformer Engine to be installed where its layers are chosen.

    Args:
        arguments: A command line or its words, parsed arguments, or settings by the names of
            Megatron's arguments, of its configuration objects or of Megatron-Bridge's. Missing
            ones have Megatron's defaults. What follows from missing sizes of the model or of the
            batch is not checked.
        config: The pipeline, as for `configure`; None: flags among the arguments choose it.
        world_size: Ranks of the job; None: `world_size` of the arguments, or one replica.
        device: Kind of the job's devices, one of `megatron_ext.devices.CHOICES`; None: that of the
            configuration or the arguments.
    """
    line: CommandLine | None = None
    found = Preflight()
    if isinstance(arguments, Namespace):
        given = vars(arguments)
    elif isinstance(arguments, Mapping):
        given = dict(arguments)
    else:
        # A string is a sequence too: of letters, of which none is a flag.
        if isinstance(arguments, str):
            arguments = flags.split_words(arguments, "the command line")
        with found.collecting("flags"):
            line = read_command_line(arguments)
        given = {} if line is None else line.settings
    with found.collecting("settings"):
        if device is None:
            device = config.device if config else given.get("device_backend")
        settings = _settings_of(given, device)
        settings["world_size"] = given.get("world_size") if world_size is None else world_size
    if found.refusals:
        return found
    script_defaults = line.defaults if line is not None and line.is_pretraining else None
    found = inspect(Namespace(**settings), config, here=False, script_defaults=script_defaults)
    found.given = Namespace(**settings)
    if line is not None:
        found.alike = line.unknown
        found.ignored = sorted(flag[2:].replace("-", "_") for flag in line.unknown)
    elif megatrons := setting_names():
        # What nobody knows is not approved: the caller gets its name.
        known = megatrons | _NAMES | flags.DESTINATIONS | _OF_TRAINING | _USUAL.keys()
        # Some switches exist only to turn off what no other flag names: --no-position-embedding.
        found.ignored = sorted(n for n in given.keys() - known if f"no_{n}" not in known)
    return found


_RENAMED = {field: dest for dest, field in MEGATRON_FIELDS.items()}
_READ = {dest for rules in RULES.values() for rule in rules for dest in rule.reads}
_NAMES = _READ | _RENAMED.keys()


def _settings_of(given: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Return given settings by the names of Megatron's arguments, with its defaults for others.

    Raises:
        ArgumentsError: One holds settings of its own, or is no number where Megatron takes one.
    """
    for name, value in given.items():
        # Our own notes among the arguments of a running job are no settings.
        if isinstance(value, Mapping) and not name.startswith("megatron_ext") and _READ & {*value}:
            raise ArgumentsError(
                f"{name} holds settings, which are not read; give each by its name"
            )
    _check_numbers(given)
    settings = dict(_USUAL)
    if device not in (None, "auto"):
        needed = devices.named(device).argument_defaults
        settings |= {dest: value for dest, (value, _) in needed.items()}
    settings |= {_RENAMED.get(name, name): value for name, value in given.items()}
    layout = layout_text(given.get("pipeline_model_parallel_layout"))
    if layout and "virtual_pipeline_model_parallel_size" in given:
        # Configuration objects hold both; Megatron derives this one from the layout.
        settings["num_virtual_stages_per_pipeline_rank"] = None
    settings["pipeline_model_parallel_layout"] = layout
    return settings


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse values that are no number where the flag of their name takes a single number."""
    for flag in megatron_flags():
        kind, value = flag.keywords.get("type"), given.get(flag.dest)
        if value is None or kind not in (int, float) or "nargs" in flag.keywords:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            words = "a whole number" if kind is int else "a number"
            raise ArgumentsError(f"{flag.dest} is {value!r}; it must be {words}")


def inspect(
    args: Namespace,
    requested: PipelineConfig | None = None,
    *,
    here: bool = True,
    script_defaults: Mapping[str, Any] | None = None,
) -> Preflight:
    """Check a configuration: what it takes, changes and refuses, and what follows for Megatron.

    Megatron has not validated the arguments yet. Without a request their flags choose the pipeline.
    `here` in a process of the job, with its device and its software. `script_defaults` are values
    of arguments that were not given, where these are all arguments of a training script; None: they
    may lack what Megatron needs.
    """
    found = Preflight()
    with found.collecting("flags"):
        sizes = JobSizes.of(vars(args))
        found.config = config = stages.completed(args, requested or flags.pipeline_config(args))
        ranks = sizes.ranks
    found.refusals += missing_flags(args, script_defaults)
    # Without a configuration there is nothing to compare the rest with.
    if found.refusals:
        return found
    name, roles = config.schedule, config.disaggregation
    if roles is not None:  # rules know it by its flags
        args = copy(args)
        args.fbd_activations, args.ignore_forward_tensor_parallel = roles.activations, roles.merged
    over_torch = roles is None and _torch_is_best(config, ranks, here=here)
    carries = name is None and roles is None and not over_torch and config.wire != "torch"

    # The sizes first: what ends one of these checks leaves the rest of it without a subject.
    table, placement = None, None if roles is None else linear(args.pipeline_model_parallel_size)
    if carries or name is not None:
        with found.collecting("pipeline_transport" if carries else "pipeline_schedule"):
            pipeline = _pipeline(found, config, args, over_torch=over_torch, here=here)
            table = pipeline.full
            found.pipeline, found.transport_only = (None, pipeline) if carries else (pipeline, None)
    if found.pipeline is not None:
        placement = found.pipeline.placement
    with found.collecting("num_layers"):
        layers = (getattr(args, dest, None) for dest in ("num_layers", "hybrid_layer_pattern"))
        if placement is not None and (here or any(layers)):
            brought_by = "schedule" if roles is None else "disaggregation"
            subject = incompatible.flag_of(args, config, brought_by)
            found.arguments, found.changes = stages.flags_for(args, placement, subject)
        elif found.pipeline is not None:
            found.notices.append("the cut into stages is not checked: there is no --num-layers")

    # Then Megatron's own settings, against the configuration and its table. What the job does
    # without leaves nothing for the rules to refuse, but for what needs it.
    if found.pipeline is not None and found.pipeline.full.splits_backward:
        subject, unfused = incompatible.flag_of(args, config, "schedule"), RULES["unfused"]
        found.refusals += incompatible.refusals(subject, args, unfused)
    unused = () if found.pipeline is None else incompatible.dropped(found.pipeline.full)
    args = copy(args)
    vars(args).update(
        incompatible.drop(found, args, unused if roles is None else incompatible.DROPPED_BY_ROLES)
    )
    incompatible.imply(found, config, args)
    for subject, rules in incompatible.rules_of(config, table, args):
        found.refusals += incompatible.refusals(subject, args, rules)
    length = getattr(args, "seq_length", None)
    if table is not None and table.num_slices > 1 and length:
        with found.collecting("slices"):
            # Where even slices are too short, the last of those that attention makes uneven is too.
            even = shares_of_equal_cost(table.num_slices)
            is_shared = getattr(args, "sequence_parallel", False)
            token_bounds(even, length, args.tensor_model_parallel_size if is_shared else 1)
    if found.pipeline is not None:
        with found.collecting("transformer_impl"):
            incompatible.suit_layers(found, found.pipeline, args, here=here)
    # A job that is refused already has no roles to give out.
    if roles is not None and args.world_size and not (here and found.refusals):
        _give_roles(found, config, args, roles, here=here)
    if here:
        with found.collecting("device"):
            found.arguments |= devices.arguments_for(args, config.device)
    for flag, reason in flags.DROPPED.items():
        if (value := getattr(args, flag[2:].replace("-", "_"), None)) is not None:
            found.changes.append(f"{flag} {value} is ignored: Megatron-LM has dropped it, {reason}")
    return found


def _give_roles(
    found: Preflight, config: PipelineConfig, args: Namespace, roles: Disaggregation, *, here: bool
) -> None:
    """Check that both roles can share out the ranks; find that of this process, if `here`."""
    with found.collecting("disaggregation"):
        ranks = rank_map(
            args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            merged=roles.merged,
            cp=getattr(args, "context_parallel_size", 1),
        )
        if here:
            found.job = job_of(args, config, ranks)
            found.arguments |= role_arguments(args, found.job)


def _torch_is_best(config: PipelineConfig, world_size: int, *, here: bool) -> bool:
    """Return whether `auto` selects torch.distributed: a static order between devices.

    torch.distributed offers all that a schedule with a fixed order needs. Tables take it for every
    pair of ranks that does not share device memory, on one host or several; Megatron's own
    schedules only on one host, where nothing of them has to be replaced.
    """
    if config.wire != "auto" or config.dynamic is not None:
        return False
    if config.device_path == "ipc" or config.checksums:  # torch.distributed has neither
        return False
    local_world_size = Environment.read().local_world_size or world_size
    if config.schedule is None and local_world_size < world_size:
        return False
    if here and devices.current().is_host:
        return False
    _LOG.info(
        "--pipeline-transport auto: torch.distributed, which moves tensors between devices without "
        "the host's memory%s",
        ", for pairs of ranks that do not share device memory"
        if config.tries_ipc and config.schedule is not None
        else "",
    )
    return True


def _pipeline(
    found: Preflight, config: PipelineConfig, args: Namespace, *, over_torch: bool, here: bool
) -> Pipeline:
    """Return the pipeline that runs, or Megatron's own if our transport carries its messages.

    Megatron's own table is never executed; it announces the messages in advance.
    """
    pp, sends_groups = args.pipeline_model_parallel_size, False
    subject = f"--pipeline-schedule {config.schedule}"
    if config.schedule is None:
        subject = f"--pipeline-transport {config.wire}"
        if pp < 2:
            raise ArgumentsError(
                f"{subject} carries tensors between pipeline ranks, --pipeline-model-parallel-size "
                f"{pp} has no second rank; leave it out"
            )
        # Megatron would run without us too, so its own number of stages is taken as it is.
        chunks = stages.chunks_of_megatron(args)
        sends_groups = chunks > 1
        config = replace(
            config, schedule=base_table(chunks), chunks=chunks if sends_groups else None
        )
    else:
        stages.check_ranks(args, config)
    batches = None
    sizes = ("global_batch_size", "step_batch_size_schedule")
    has_batch = any(getattr(args, size, None) for size in sizes)
    if here or (has_batch and getattr(args, "micro_batch_size", None)):
        # Collected here: the table of a wrong batch is checked nevertheless, for another number.
        with found.collecting("global_batch_size"):
            batches = batches_of(args, pp, config.twins)
    else:
        found.notices.append(
            "the number of micro-batches is not checked: there is no --micro-batch-size or no "
            "--global-batch-size"
        )
    pipeline = Pipeline(
        config,
        pp,
        # Placement, splits and pairs do not depend on it: any that fills the pipeline will do.
        2 * pp if batches is None else batches.num_microbatches,
        # A dynamic order splits only to gain time, so what excludes W leaves its backwards whole.
        splits=not any(rule.refuses(args) for rule in RULES["whole"]),
        over_torch=over_torch,
    )
    if batches is None:
        return pipeline
    if pipeline.name.startswith(CSV_PREFIX):
        check_file(pipeline.name, pp, batches)
    # All of them here: a batch size of a ramp-up without a table would fail hours later.
    for global_batch, count in batches.counts.items():
        derived = f"{subject} with {batches.explained(global_batch)}"
        if sends_groups and count % pp:
            # The groups in which Megatron sends micro-batches around must be full.
            lower = count // pp * pp
            fitting = [str(batches.global_batch(some)) for some in (lower, lower + pp) if some]
            raise ArgumentsError(
                f"{derived}: Megatron's interleaved schedule sends micro-batches in groups of pp = "
                f"{pp}, so their number must be a multiple of it; use --global-batch-size "
                f"{' or '.join(fitting)}, or --pipeline-schedule interleaved, which takes any "
                "number"
            )
        try:
            pipeline.schedule(count)
        except ScheduleError as error:
            raise ScheduleError(f"{derived}: {error}") from error
    return pipeline
