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
from megatron_ext.config.completion import completed
from megatron_ext.config.cut import UserCut
from megatron_ext.config.flags import MEGATRON_FIELDS
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.refusals import Preflight
from megatron_ext.config.required_flags import missing_flags
from megatron_ext.config.restarts import check_restart, place_local_checkpoints
from megatron_ext.config.roles import job_of, rank_map, role_arguments
from megatron_ext.config.sizes import layout_text
from megatron_ext.errors import ArgumentsError, ScheduleError, reworded
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, base_table
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.slices import shares_of_equal_cost, token_bounds
from megatron_ext.upstream.flag_list import megatron_flags
from megatron_ext.upstream.tree import setting_names

if TYPE_CHECKING:
    from megatron_ext.config.batches import Batches
    from megatron_ext.config.pipeline_config import Disaggregation, PipelineConfig
    from megatron_ext.planning.choice import Candidate
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.rules import Rule
    from megatron_ext.schedules.table.actions import Schedule

_LOG = logging.getLogger(__name__)

# Megatron's defaults of what the checks read, where a missing argument does not mean the same.
_MEGATRON_DEFAULTS = {
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
    device_kind: DeviceKind | None = None,
    num_candidates: int = 2,
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
        device_kind: The planner's description of the devices, for `--pipeline-schedule auto`; None:
            it is not known.
        num_candidates: How many schedules to check under `auto`, the best that are accepted.
    """
    line: CommandLine | None = None
    answer = Preflight()
    if isinstance(arguments, Namespace):
        user_args = vars(arguments)
    elif isinstance(arguments, Mapping):
        user_args = dict(arguments)
    else:
        # A string is a sequence too: of letters, of which none is a flag.
        if isinstance(arguments, str):
            arguments = flags.split_words(arguments, "the command line")
        with answer.collecting("flags"):
            line = read_command_line(arguments)
        user_args = {} if line is None else line.settings
    with answer.collecting("settings"):
        if device is None:
            device = config.device if config else user_args.get("device_backend")
        settings = _settings_of(user_args, device)
        settings["world_size"] = world_size
        if world_size is None:
            settings["world_size"] = user_args.get("world_size")
    if answer.refusals:
        return answer
    script_defaults = None
    if line is not None and line.is_pretraining:
        script_defaults = line.defaults
    checked_args = Namespace(**settings)
    answer = inspect(
        checked_args,
        config,
        in_job=False,
        script_defaults=script_defaults,
        device_kind=device_kind,
        num_candidates=num_candidates,
    )
    answer.checked_args = checked_args
    if line is not None:
        answer.suggestions = line.unknown
        answer.ignored = sorted(flag[2:].replace("-", "_") for flag in line.unknown)
    else:
        answer.ignored = _unknown_names(user_args)
    return answer


_RENAMED = {field: dest for dest, field in MEGATRON_FIELDS.items()}
_READ = {dest for rules in RULES.values() for rule in rules for dest in rule.reads}
_NAMES = _READ | _RENAMED.keys()


def _unknown_names(user_args: Mapping[str, Any]) -> list[str]:
    """Return settings that neither Megatron nor we recognise; the caller reports them."""
    megatron_names = setting_names()
    if not megatron_names:
        return []
    known_names = (
        megatron_names | _NAMES | flags.DESTINATIONS | _OF_TRAINING | _MEGATRON_DEFAULTS.keys()
    )
    unknown_names = []
    for name in sorted(user_args.keys() - known_names):
        # Some switches exist only to turn off what no other flag names: --no-position-embedding.
        if f"no_{name}" not in known_names:
            unknown_names.append(name)
    return unknown_names


def _settings_of(user_args: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Return the user's settings by the names of Megatron's arguments, with its defaults.

    Raises:
        ArgumentsError: One holds settings of its own, or is no number where Megatron takes one.
    """
    for name, value in user_args.items():
        # Our own notes among the arguments of a running job are no settings.
        if isinstance(value, Mapping) and not name.startswith("megatron_ext") and _READ & {*value}:
            raise ArgumentsError(
                f"{name} holds settings, which are not read; give each by its name"
            )
    _check_numbers(user_args)
    settings = dict(_MEGATRON_DEFAULTS)
    if device not in (None, "auto"):
        for dest, (value, _reason) in devices.named(device).argument_defaults.items():
            settings[dest] = value
    for name, value in user_args.items():
        settings[_RENAMED.get(name, name)] = value
    layout = layout_text(user_args.get("pipeline_model_parallel_layout"))
    if layout and "virtual_pipeline_model_parallel_size" in user_args:
        # Configuration objects hold both; Megatron derives this one from the layout.
        settings["num_virtual_stages_per_pipeline_rank"] = None
    settings["pipeline_model_parallel_layout"] = layout
    return settings


def _check_numbers(user_args: Mapping[str, Any]) -> None:
    """Refuse values that are no number where the flag of their name takes a single number."""
    for flag in megatron_flags():
        kind = flag.keywords.get("type")
        value = user_args.get(flag.dest)
        if value is None or kind not in (int, float) or "nargs" in flag.keywords:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            words = "a whole number" if kind is int else "a number"
            raise ArgumentsError(f"{flag.dest} is {value!r}; it must be {words}")


def inspect(
    args: Namespace,
    requested: PipelineConfig | None = None,
    *,
    in_job: bool = True,
    script_defaults: Mapping[str, Any] | None = None,
    device_kind: DeviceKind | None = None,
    num_candidates: int = 2,
) -> Preflight:
    """Check a configuration: what it takes, changes and refuses, and what follows for Megatron.

    Args:
        args: Megatron's arguments, which it has not validated yet.
        requested: The pipeline; None: flags among the arguments choose it.
        in_job: Whether this is a process of the job, with its device and its software.
        script_defaults: Values of arguments that were not given, where these are all arguments of a
            training script; None: they may lack what Megatron needs.
        device_kind: As in `preflight`; a process of the job knows its device.
        num_candidates: As in `preflight`.
    """
    answer = Preflight()
    with answer.collecting("flags"):
        cut = UserCut.of(vars(args))
        config = requested or flags.pipeline_config(args)
        if config.is_automatic:
            return _choose(
                args,
                config,
                in_job=in_job,
                script_defaults=script_defaults,
                device_kind=device_kind,
                num_candidates=num_candidates,
            )
        answer.config = config = completed(vars(args), cut, config)
    answer.refusals += missing_flags(args, script_defaults)
    # Without a configuration there is nothing to compare the rest with.
    if answer.refusals:
        return answer
    roles = config.disaggregation
    if roles is not None:  # rules know it by its flags
        args = copy(args)
        args.fbd_activations = roles.activations
        args.ignore_forward_tensor_parallel = roles.merged

    # The sizes first: an error there leaves the later checks without a subject.
    table = _add_pipeline(answer, args, cut, config, in_job=in_job)
    _add_stages(answer, args, cut, config, in_job=in_job)

    # Then Megatron's own settings, against the configuration and its table.
    args = _check_settings(answer, args, config, table)
    if answer.pipeline is not None:
        with answer.collecting("transformer_impl"):
            incompatible.suit_layers(answer, answer.pipeline, args, in_job=in_job)
    # A job that is refused already has no roles to give out.
    if roles is not None and args.world_size and not (in_job and answer.refusals):
        _give_roles(answer, args, config, roles, in_job=in_job)
    if in_job:
        with answer.collecting("device"):
            answer.arguments |= devices.arguments_for(args, config.device)
    place_local_checkpoints(answer, args)
    check_restart(answer, args, in_job=in_job)
    for flag, reason in flags.DROPPED.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            answer.changes.append(
                f"{flag} {value} is ignored: Megatron-LM has dropped it, {reason}"
            )
    return answer


def _choose(
    args: Namespace,
    requested: PipelineConfig,
    *,
    in_job: bool,
    script_defaults: Mapping[str, Any] | None,
    device_kind: DeviceKind | None,
    num_candidates: int,
) -> Preflight:
    """Check the best schedules that the planner names, and return the answer for the first.

    Raises:
        ArgumentsError: The planner cannot rank any.
    """
    # Only here: the planner takes time to import, and other trainings need it not at start.
    from megatron_ext.config import automatic

    if in_job:
        device_kind = automatic.device_here()
    ranking = automatic.ranking(args, requested, device_kind)
    accepted: list[Candidate] = []
    refused: list[str] = []
    first = None
    for candidate in ranking.candidates:
        config = automatic.configured(requested, candidate)
        answer = inspect(args, config, in_job=in_job, script_defaults=script_defaults)
        if not answer.accepted:
            refused.append(candidate.schedule)
            continue
        first = first or answer
        accepted.append(candidate)
        if len(accepted) == num_candidates:
            break
    if first is None:
        # What refuses all schedules refuses this one, too.
        config = replace(requested, schedule=automatic.REFERENCE)
        return inspect(args, config, in_job=in_job, script_defaults=script_defaults)
    first.candidates = accepted
    first.changes.insert(0, ranking.sentence(accepted[:2], refused))
    return first


def _add_pipeline(
    answer: Preflight, args: Namespace, cut: UserCut, config: PipelineConfig, *, in_job: bool
) -> Schedule | None:
    """Add the pipeline that runs, or Megatron's own if our transport carries its messages.

    Returns its table, which is never executed where it is Megatron's own: it announces the messages
    in advance. None: there is none.
    """
    if config.disaggregation is not None:
        return None
    over_torch = _torch_is_best(config, cut.sizes.ranks, in_job=in_job)
    if config.schedule is None and (over_torch or config.wire == "torch"):
        return None
    carries_stock = config.schedule is None
    table = None
    with answer.collecting("pipeline_transport" if carries_stock else "pipeline_schedule"):
        if carries_stock:
            config = _stock_config(config, cut)
            subject = f"--pipeline-transport {config.wire}"
        else:
            stages.check_ranks(args, config)
            subject = f"--pipeline-schedule {config.schedule}"
        pp = cut.sizes.pipeline_model_parallel_size
        batches = None
        if in_job or _has_batch(args):
            # Collected here: the table of a wrong batch is checked nevertheless, with another one.
            with answer.collecting("global_batch_size"):
                batches = batches_of(args, pp, config.twins)
        else:
            answer.notices.append(
                "the number of micro-batches is not checked: there is no --micro-batch-size or no "
                "--global-batch-size"
            )
        pipeline = Pipeline(
            config,
            pp,
            # Placement, splits and pairs do not depend on it: any that fills the pipeline will do.
            2 * pp if batches is None else batches.num_microbatches,
            # A dynamic order splits only to gain time, so what excludes W leaves its backwards
            # whole.
            splits=not any(rule.refuses(args) for rule in RULES["whole"]),
            over_torch=over_torch,
        )
        if batches is not None:
            fills_groups = carries_stock and config.chunks is not None
            _make_tables(pipeline, batches, subject, fills_groups=fills_groups)
        table = pipeline.full
        if carries_stock:
            answer.transport_only = pipeline
        else:
            answer.pipeline = pipeline
    return table


def _torch_is_best(config: PipelineConfig, world_size: int, *, in_job: bool) -> bool:
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
    if in_job and devices.current().is_host:
        return False
    scope = ""
    if config.tries_ipc and config.schedule is not None:
        scope = ", for pairs of ranks that do not share device memory"
    _LOG.info(
        "--pipeline-transport auto: torch.distributed, which moves tensors between devices without "
        "the host's memory%s",
        scope,
    )
    return True


def _stock_config(config: PipelineConfig, cut: UserCut) -> PipelineConfig:
    """Return the configuration of Megatron's own schedule, with its table and stages."""
    pp = cut.sizes.pipeline_model_parallel_size
    if pp < 2:
        raise ArgumentsError(
            f"--pipeline-transport {config.wire} carries tensors between pipeline ranks, "
            f"--pipeline-model-parallel-size {pp} has no second rank; leave it out"
        )
    # Megatron would run without us too, so its own number of stages is taken as it is.
    chunks = cut.chunks
    return replace(config, schedule=base_table(chunks), chunks=chunks if chunks > 1 else None)


def _has_batch(args: Namespace) -> bool:
    """Return whether the arguments say the batch, as those of a job do."""
    schedule = getattr(args, "step_batch_size_schedule", None)
    global_batch = getattr(args, "global_batch_size", None) or schedule
    return bool(global_batch and getattr(args, "micro_batch_size", None))


def _make_tables(pipeline: Pipeline, batches: Batches, subject: str, *, fills_groups: bool) -> None:
    """Make the table of each batch size of a run, or refuse the first that has none.

    All of them here: a batch size of a ramp-up without a table would fail hours later.
    """
    pp = pipeline.pp
    if pipeline.name.startswith(CSV_PREFIX):
        check_file(pipeline.name, pp, batches)
    for global_batch, count in batches.counts.items():
        batch = f"{subject} with {batches.explained(global_batch)}"
        if fills_groups and count % pp:
            # The groups in which Megatron sends micro-batches around must be full.
            fewer = count // pp * pp
            fitting = [str(batches.global_batch(fewer + pp))]
            if fewer:
                fitting.insert(0, str(batches.global_batch(fewer)))
            raise ArgumentsError(
                f"{batch}: Megatron's interleaved schedule sends micro-batches in groups of pp = "
                f"{pp}, so their number must be a multiple of it; use --global-batch-size "
                f"{' or '.join(fitting)}, or --pipeline-schedule interleaved, which takes any "
                "number"
            )
        try:
            pipeline.schedule(count)
        except ScheduleError as error:
            raise ScheduleError(f"{batch}: {error}") from error


def _add_stages(
    answer: Preflight, args: Namespace, cut: UserCut, config: PipelineConfig, *, in_job: bool
) -> None:
    """Add the arguments that make Megatron build the stages of the schedule, or of both roles."""
    with answer.collecting("num_layers"):
        if config.disaggregation is not None:
            placement = linear(cut.sizes.pipeline_model_parallel_size)
            subject = incompatible.flag_of(args, config, "disaggregation")
        elif answer.pipeline is not None:
            placement = answer.pipeline.placement
            subject = incompatible.flag_of(args, config, "schedule")
        else:
            return
        has_layers = getattr(args, "num_layers", None) or getattr(
            args, "hybrid_layer_pattern", None
        )
        if in_job or has_layers:
            built = stages.stage_arguments(args, cut, placement, subject)
            answer.arguments = built.values
            answer.changes = [reworded(change, flags.in_flags) for change in built.changes]
        elif answer.pipeline is not None:
            answer.notices.append("the cut into stages is not checked: there is no --num-layers")


def _check_settings(
    answer: Preflight, args: Namespace, config: PipelineConfig, table: Schedule | None
) -> Namespace:
    """Refuse, drop and set settings of Megatron's for a configuration and its table.

    Returns the arguments without those that are dropped.
    """
    pipeline = answer.pipeline
    # What needs a dropped setting is refused first, while the setting still counts.
    if pipeline is not None and pipeline.full.splits_backward:
        subject = incompatible.flag_of(args, config, "schedule")
        answer.refusals += incompatible.refusals(subject, args, RULES["unfused"])
    # Unused settings go before the rules, so that no rule rejects them.
    unused: tuple[Rule, ...] = ()
    if config.disaggregation is not None:
        unused = incompatible.DROPPED_BY_ROLES
    elif pipeline is not None:
        unused = incompatible.dropped(pipeline.full)
    args = copy(args)
    vars(args).update(incompatible.drop(answer, args, unused))
    incompatible.imply(answer, config, args)
    for subject, rules in incompatible.rules_of(config, table, args):
        answer.refusals += incompatible.refusals(subject, args, rules)
    seq_length = getattr(args, "seq_length", None)
    if table is not None and table.num_slices > 1 and seq_length:
        with answer.collecting("slices"):
            # Where even slices are too short, the last of those that attention makes uneven is too.
            even = shares_of_equal_cost(table.num_slices)
            divisor = 1
            if getattr(args, "sequence_parallel", False):
                divisor = args.tensor_model_parallel_size
            token_bounds(even, seq_length, divisor)
    return args


def _give_roles(
    answer: Preflight,
    args: Namespace,
    config: PipelineConfig,
    roles: Disaggregation,
    *,
    in_job: bool,
) -> None:
    """Check that both roles can share out the ranks; in a process of the job, find its role."""
    with answer.collecting("disaggregation"):
        ranks = rank_map(
            args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            merged=roles.merged,
            cp=getattr(args, "context_parallel_size", 1),
        )
        if in_job:
            answer.job = job_of(args, config, ranks)
            answer.arguments |= role_arguments(args, answer.job)
