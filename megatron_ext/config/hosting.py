"""Checks a configuration: which settings a pipeline accepts, changes and rejects.

`preflight` checks any settings, on any machine and without torch. `inspect` runs the same checks in
a process of the job, whose device and Transformer Engine are known. It also returns the pipeline
and the arguments that Megatron needs to host it. Megatron treats two mirrored pipelines on D ranks
as one pipeline of D/2 ranks with twice as many data-parallel replicas, and is given a layout for
stages that are placed as a V or W.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config import flags, incompatible, stages
from megatron_ext.config.active import Choice, Environment, Pipeline
from megatron_ext.config.batches import batches_of, check_file
from megatron_ext.config.command_line import CommandLine, read_command_line
from megatron_ext.config.completion import completed
from megatron_ext.config.cut import UserCut
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.flags import MEGATRON_FIELDS
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.refusals import Preflight
from megatron_ext.config.required_flags import missing_flags
from megatron_ext.config.restarts import check_restart, place_local_checkpoints
from megatron_ext.config.roles import job_of, rank_map, role_arguments
from megatron_ext.config.sizes import layout_text
from megatron_ext.errors import ArgumentsError, ScheduleError, reworded
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, default_schedule
from megatron_ext.schedules.table.placement import linear
from megatron_ext.upstream.flag_list import megatron_flags
from megatron_ext.upstream.tree import setting_names

if TYPE_CHECKING:
    from megatron_ext.config.batches import Batches
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.planning.choice import Candidate
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.rules import Rule
    from megatron_ext.schedules.table.actions import Schedule

_LOG = logging.getLogger(__name__)

# Megatron's defaults for arguments that the checks read. Only arguments whose absence a
# rule would interpret differently are listed.
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

# `megatron.training` arguments that the checks read. megatron-core alone does not define them.
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
    """Check which settings a configuration accepts, changes and rejects.

    This imports neither torch nor Megatron, and the job may run on another machine. If the
    arguments name no device, the devices are assumed to be GPUs that can reach each other. If
    Transformer Engine's layers are chosen, Transformer Engine is assumed to be installed.

    Args:
        arguments: A command line or its words, parsed arguments, or settings under the names that
            Megatron's arguments, its configuration objects or Megatron-Bridge use. Missing settings
            get Megatron's defaults. Checks that need a missing model or batch size are skipped.
        config: The pipeline, as for `configure`. If None, flags among the arguments choose it.
        world_size: Number of ranks in the job. Default: `world_size` of the arguments, or one
            replica.
        device: Kind of the job's devices, one of `megatron_ext.devices.CHOICES`. If None, it is
            taken from the configuration or the arguments.
        device_kind: The planner's description of the devices, for `--pipeline-schedule auto`, or
            None if it is unknown.
        num_candidates: How many of the best accepted schedules to return under `auto`.

    Returns:
        The result of all checks. Refusals are listed in it instead of being raised.
    """
    # Collect the user's settings from any of these descriptions of a job.
    line: CommandLine | None = None
    answer = Preflight()
    if isinstance(arguments, Namespace):
        user_args = vars(arguments)
    elif isinstance(arguments, Mapping):
        user_args = dict(arguments)
    else:
        # A string is also a sequence, but of characters, so split it into words.
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
    # The other checks need readable settings.
    if answer.refusals:
        return answer
    # Only a command line for a Megatron script shows which required flags are missing.
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
        answer.ignored = sorted(flags.attribute_of(flag) for flag in line.unknown)
    else:
        answer.ignored = _unknown_names(user_args)
    return answer


_RENAMED = {field: dest for dest, field in MEGATRON_FIELDS.items()}


def _read_by_rules() -> frozenset[str]:
    """Return the names of the Megatron arguments that the rules read."""
    names: set[str] = set()
    for rules in RULES.values():
        for rule in rules:
            names.update(rule.reads)
    return frozenset(names)


_READ = _read_by_rules()
_NAMES = _READ | _RENAMED.keys()


def _unknown_names(user_args: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that neither Megatron nor this package recognises."""
    megatron_names = setting_names()
    # Without Megatron's sources, no setting can be called unknown.
    if not megatron_names:
        return []
    known_names = (
        megatron_names
        | _NAMES
        | flags.DESTINATIONS
        | _OF_TRAINING
        | _MEGATRON_DEFAULTS.keys()
    )
    unknown_names = []
    for name in sorted(user_args.keys() - known_names):
        # Some of Megatron's switches exist only in negated form, such as --no-position-embedding.
        if f"no_{name}" not in known_names:
            unknown_names.append(name)
    return unknown_names


def _settings_of(user_args: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Return the user's settings by Megatron's argument names, with Megatron's defaults.

    Raises:
        ArgumentsError: A value contains nested settings, or is not a number although Megatron
            requires one.
    """
    for name, value in user_args.items():
        # In a running job, this package adds attributes to the arguments, which are not settings.
        if not isinstance(value, Mapping) or name.startswith("megatron_ext"):
            continue
        if _READ & {*value}:
            raise ArgumentsError(
                f"{name} contains nested settings, which are not read; pass each one by its own "
                "name"
            )
    _check_numbers(user_args)
    # Megatron's defaults are overridden by the device's defaults, and both by the user's settings.
    settings = dict(_MEGATRON_DEFAULTS)
    if device not in (None, "auto"):
        backend = devices.named(device)
        for dest, (value, _reason) in backend.argument_defaults.items():
            settings[dest] = value
    for name, value in user_args.items():
        settings[_RENAMED.get(name, name)] = value
    layout = layout_text(user_args.get("pipeline_model_parallel_layout"))
    if layout and "virtual_pipeline_model_parallel_size" in user_args:
        # Configuration objects contain both settings, although Megatron derives this one from the
        # layout.
        settings["num_virtual_stages_per_pipeline_rank"] = None
    settings["pipeline_model_parallel_layout"] = layout
    return settings


def _check_numbers(user_args: Mapping[str, Any]) -> None:
    """Reject values that are not numbers although Megatron's flag takes a single number."""
    for flag in megatron_flags():
        kind = flag.keywords.get("type")
        value = user_args.get(flag.dest)
        takes_number = kind in (int, float) and "nargs" not in flag.keywords
        if value is None or not takes_number:
            continue
        # Reject bool explicitly, because it is a subclass of int.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number:
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
    """Check a configuration and compute the pipeline and the arguments for Megatron.

    Args:
        args: Megatron's arguments, before Megatron validates them. They are not changed.
        requested: The pipeline. If None, flags among the arguments choose it.
        in_job: Whether this is a process in the job, with the job's device and software.
        script_defaults: A training script's values for missing arguments. If None, arguments that
            Megatron needs may be missing.
        device_kind: As in `preflight`. A process in the job detects its device instead.
        num_candidates: As in `preflight`.
    """
    inspection = _Inspection(
        args=args,
        in_job=in_job,
        script_defaults=script_defaults,
        device_kind=device_kind,
        num_candidates=num_candidates,
    )
    return inspection.run(requested)


@dataclass(kw_only=True)
class _Inspection:
    """The checks of one configuration, which add to `answer`. `run` calls each once, in order."""

    args: Namespace
    """As in `inspect`. `run` replaces them by a copy before it changes them."""
    in_job: bool
    script_defaults: Mapping[str, Any] | None
    device_kind: DeviceKind | None
    num_candidates: int
    answer: Preflight = field(default_factory=Preflight)
    cut: UserCut = field(init=False)
    """How the user's flags cut the model."""
    config: PipelineConfig = field(init=False)
    """The configuration, completed with the job's sizes."""

    def run(self, requested: PipelineConfig | None) -> Preflight:
        """Check the requested pipeline or, if None, the one that the flags choose."""
        answer = self.answer
        with answer.collecting("flags"):
            self.cut = UserCut.of(vars(self.args))
            config = requested or flags.pipeline_config(self.args)
            if config.is_automatic:
                return self._choose(config)
            config = completed(vars(self.args), self.cut, config)
            for feature in feature_rules():
                config = feature.decided(
                    answer,
                    config,
                    self.args,
                    self.device_kind,
                    in_job=self.in_job,
                )
            self.config = config
            answer.config = config
        answer.refusals += missing_flags(self.args, self.script_defaults)
        # Without a configuration there is nothing to check the other settings against.
        if answer.refusals:
            return answer
        # The arguments belong to the caller, and some are changed below.
        self.args = copy(self.args)
        # Rules about disaggregation read its flags, which are missing if it comes from `configure`.
        roles = self.config.disaggregation
        if roles is not None:
            self.args.fbd_activations = roles.activations
            self.args.ignore_forward_tensor_parallel = roles.merged
        # First check the sizes, which the later checks rely on.
        table = self._add_pipeline()
        self._add_stages()
        # Then check Megatron's settings against the configuration and its table.
        self._drop_settings()
        self._check_settings(table)
        self._check_layers()
        self._give_role()
        self._check_device()
        place_local_checkpoints(answer, self.args)
        check_restart(answer, self.args, in_job=self.in_job)
        self._report_removed_flags()
        return answer

    def _choose(self, requested: PipelineConfig) -> Preflight:
        """Check the planner's best schedules and return the answer for the first accepted one.

        Raises:
            ArgumentsError: The planner cannot rank any schedule.
        """
        # Imported here because importing the planner takes time and only `auto` needs it.
        from megatron_ext.config import automatic

        device_kind = self.device_kind
        if self.in_job:
            device_kind = automatic.device_here()
        ranking = automatic.ranking(self.args, requested, device_kind)
        # Check the candidates in the planner's order until enough of them are accepted.
        accepted: list[Candidate] = []
        refused: list[str] = []
        first = None
        for candidate in ranking.candidates:
            answer = self._answer_for(automatic.configured(requested, candidate))
            if not answer.accepted:
                refused.append(candidate.schedule)
                continue
            first = first or answer
            accepted.append(candidate)
            if len(accepted) == self.num_candidates:
                break
        if first is None:
            # Whatever rules out all other schedules also rules out this one, so report its
            # refusals.
            answer = self._answer_for(replace(requested, schedule=automatic.REFERENCE))
            # Ranks with different devices may have found a schedule. All ranks compare
            # their choices later, so record a choice here too.
            if answer.accepted:
                setting = f"--pipeline-schedule {automatic.REFERENCE}"
                answer.choice = Choice(setting, ranking.basis)
            return answer
        first.candidates = accepted
        first.choice = Choice(accepted[0].flags, ranking.basis)
        first.changes.insert(0, ranking.sentence(accepted[:2], refused))
        return first

    def _answer_for(self, config: PipelineConfig) -> Preflight:
        """Return the answer for another configuration of the same job."""
        return inspect(
            self.args,
            config,
            in_job=self.in_job,
            script_defaults=self.script_defaults,
        )

    def _add_pipeline(self) -> Schedule | None:
        """Add the pipeline that runs, or Megatron's own if our transport carries its messages.

        Returns:
            The pipeline's table, or None if there is no pipeline. For Megatron's own pipeline, the
            table is never executed: it only announces the messages in advance.
        """
        config = self.config
        cut = self.cut
        answer = self.answer
        if config.disaggregation is not None:
            return None
        over_torch = _torch_is_best(config, cut.sizes.ranks, in_job=self.in_job)
        uses_torch = over_torch or config.wire == "torch"
        carries_megatron_schedule = config.schedule is None
        # torch.distributed carries Megatron's own schedule without our help.
        if carries_megatron_schedule and uses_torch:
            return None
        table = None
        setting = "pipeline_schedule"
        if carries_megatron_schedule:
            setting = "pipeline_transport"
        with answer.collecting(setting):
            if carries_megatron_schedule:
                config = _stock_config(config, cut)
                subject = f"--pipeline-transport={config.wire}"
            else:
                stages.check_ranks(self.args, config)
                subject = f"--pipeline-schedule={config.schedule}"
            pp = cut.sizes.pipeline_model_parallel_size
            batches = None
            if self.in_job or _has_batch(self.args):
                # Collect the error and continue: the table is still checked, with a
                # substitute batch.
                with answer.collecting("global_batch_size"):
                    batches = batches_of(self.args, pp, config.twins)
            else:
                answer.notices.append(
                    "the number of micro-batches is not checked, because --micro-batch-size or "
                    "--global-batch-size is missing"
                )
            # Without a batch, use a number that fills the pipeline: nothing that is checked below
            # depends on it.
            num_microbatches = 2 * pp
            if batches is not None:
                num_microbatches = batches.num_microbatches
            # A dynamic order splits backward passes only to save time, so leave them whole
            # if a setting rules out W.
            reasons_for_whole = [
                rule.reason for rule in RULES["whole"] if rule.refuses(self.args)
            ]
            pipeline = Pipeline(
                config,
                pp,
                num_microbatches,
                splits=not reasons_for_whole,
                over_torch=over_torch,
            )
            if batches is not None:
                fills_groups = carries_megatron_schedule and config.chunks is not None
                _make_tables(pipeline, batches, subject, fills_groups=fills_groups)
            table = pipeline.full
            if config.dynamic is not None and not table.splits_backward:
                for reason in reasons_for_whole:
                    answer.notices.append(
                        f"--use-dpp does not split backward passes: {reason}"
                    )
            if carries_megatron_schedule:
                answer.transport_only = pipeline
            else:
                answer.pipeline = pipeline
        return table

    def _add_stages(self) -> None:
        """Add the arguments that Megatron needs to build the schedule's or both roles' stages."""
        answer = self.answer
        args = self.args
        with answer.collecting("num_layers"):
            if self.config.disaggregation is not None:
                placement = linear(self.cut.sizes.pipeline_model_parallel_size)
                subject = incompatible.flag_of(args, self.config, "disaggregation")
            elif answer.pipeline is not None:
                placement = answer.pipeline.placement
                subject = incompatible.flag_of(args, self.config, "schedule")
            else:
                return
            pattern = getattr(args, "hybrid_layer_pattern", None)
            has_layers = getattr(args, "num_layers", None) or pattern
            # If there are no layers, `stage_arguments` would fail. In a job, that is a user
            # error.
            if self.in_job or has_layers:
                built = stages.stage_arguments(args, self.cut, placement, subject)
                answer.arguments = built.values
                for change in built.changes:
                    answer.changes.append(reworded(change, flags.in_flags))
            elif answer.pipeline is not None:
                answer.notices.append(
                    "the cut into stages is not checked, because --num-layers is missing"
                )

    def _drop_settings(self) -> None:
        """Drop Megatron's settings that the table replaces or ignores."""
        config = self.config
        answer = self.answer
        pipeline = answer.pipeline
        # First reject settings that depend on a setting that is dropped below.
        if pipeline is not None and pipeline.full.splits_backward:
            subject = incompatible.flag_of(self.args, config, "schedule")
            answer.refusals += incompatible.refusals(
                subject, self.args, RULES["unfused"]
            )
        # Drop unused settings before the rules are applied, so that no rule rejects them.
        unused: tuple[Rule, ...] = ()
        if config.disaggregation is not None:
            unused = incompatible.DROPPED_BY_ROLES
        elif pipeline is not None:
            unused = incompatible.dropped(pipeline)
        switched_off = incompatible.drop(answer, self.args, unused)
        vars(self.args).update(switched_off)

    def _check_settings(self, table: Schedule | None) -> None:
        """Reject and set Megatron's settings for the configuration and its table."""
        config = self.config
        answer = self.answer
        incompatible.imply(answer, config, self.args)
        for subject, rules in incompatible.rules_of(config, table, self.args):
            answer.refusals += incompatible.refusals(subject, self.args, rules)
        for feature in feature_rules():
            feature.refuse(answer, config, table, self.args)

    def _check_layers(self) -> None:
        """Adapt the pipeline to what Transformer Engine's layers can run, or reject it."""
        pipeline = self.answer.pipeline
        if pipeline is None:
            return
        with self.answer.collecting("transformer_impl"):
            incompatible.suit_layers(
                self.answer,
                pipeline,
                self.args,
                in_job=self.in_job,
            )

    def _give_role(self) -> None:
        """Check that the ranks divide evenly into both roles; set the role of a job's process."""
        roles = self.config.disaggregation
        args = self.args
        # In a job that is already rejected, this process needs no role.
        is_rejected_job = self.in_job and not self.answer.accepted
        if roles is None or not args.world_size or is_rejected_job:
            return
        with self.answer.collecting("disaggregation"):
            ranks = rank_map(
                args.world_size,
                tp=args.tensor_model_parallel_size,
                pp=args.pipeline_model_parallel_size,
                merged=roles.merged,
                cp=getattr(args, "context_parallel_size", 1),
            )
            if self.in_job:
                self.answer.job = job_of(args, self.config, ranks)
                self.answer.arguments |= role_arguments(args, self.answer.job)

    def _check_device(self) -> None:
        """Check the device of a process in the job."""
        if not self.in_job:
            return
        with self.answer.collecting("device"):
            arguments = devices.arguments_for(self.args, self.config.device)
            self.answer.arguments |= arguments
        for feature in feature_rules():
            with self.answer.collecting("device"):
                feature.refuse_device(self.config)

    def _report_removed_flags(self) -> None:
        """Say which flags Megatron-LM no longer has."""
        for flag, reason in flags.DROPPED.items():
            value = getattr(self.args, flags.attribute_of(flag), None)
            if value is not None:
                self.answer.changes.append(
                    f"{flag} {value} is ignored: Megatron-LM no longer has it, because {reason}"
                )


def _torch_is_best(config: PipelineConfig, world_size: int, *, in_job: bool) -> bool:
    """Return whether transport `auto` selects torch.distributed.

    torch.distributed provides everything that a schedule with a fixed order needs. Tables use it
    for any two ranks that do not share device memory, on one host or several. Megatron's
    own schedules use it only on one host, where they run unchanged.
    """
    # Only a fixed order suits torch.distributed, which cannot tell which messages have arrived.
    if config.wire != "auto" or config.dynamic is not None:
        return False
    # torch.distributed supports neither CUDA IPC nor checksums.
    if config.device_path == "ipc" or config.checksums:
        return False
    local_world_size = Environment.read().local_world_size or world_size
    if config.schedule is None and local_world_size < world_size:
        return False
    # Its advantage is that tensors bypass host memory, which does not matter on CPUs.
    if in_job and devices.current().is_host:
        return False
    scope = ""
    if config.tries_ipc and config.schedule is not None:
        scope = ", between ranks that do not share device memory"
    _LOG.info(
        "--pipeline-transport auto: torch.distributed, which moves tensors between devices without "
        "a copy in host memory%s",
        scope,
    )
    return True


def _stock_config(config: PipelineConfig, cut: UserCut) -> PipelineConfig:
    """Return the configuration for Megatron's own schedule, with its table and stages."""
    pp = cut.sizes.pipeline_model_parallel_size
    if pp < 2:
        raise ArgumentsError(
            f"--pipeline-transport={config.wire} carries tensors between pipeline ranks, but "
            f"--pipeline-model-parallel-size={pp} has only one; remove it"
        )
    # The user's flags are valid for Megatron without this package, so keep Megatron's
    # number of stages.
    chunks = cut.chunks
    return replace(
        config,
        schedule=default_schedule(chunks),
        chunks=chunks if chunks > 1 else None,
    )


def _has_batch(args: Namespace) -> bool:
    """Return whether the arguments contain the batch sizes, as a job's arguments always do."""
    schedule = getattr(args, "step_batch_size_schedule", None)
    global_batch = getattr(args, "global_batch_size", None) or schedule
    return bool(global_batch and getattr(args, "micro_batch_size", None))


def _make_tables(
    pipeline: Pipeline,
    batches: Batches,
    subject: str,
    *,
    fills_groups: bool,
) -> None:
    """Generate the table for each of a run's batch sizes; reject the first size without a table.

    All tables are generated up front. Otherwise a ramp-up batch size without a table would stop the
    job hours later.
    """
    pp = pipeline.pp
    if pipeline.name.startswith(CSV_PREFIX):
        check_file(pipeline.name, pp, batches)
    for global_batch, count in batches.counts.items():
        batch = f"{subject} with {batches.explained(global_batch)}"
        if fills_groups and count % pp:
            # Megatron's interleaved schedule needs full groups of micro-batches.
            # Suggest the nearest batches above and below.
            fewer = count // pp * pp
            fitting = str(batches.global_batch(fewer + pp))
            if fewer:
                fitting = f"{batches.global_batch(fewer)} or {fitting}"
            raise ArgumentsError(
                f"{batch}: Megatron's interleaved schedule sends micro-batches in groups of pp = "
                f"{pp}, so their number must be a multiple of {pp}; use "
                f"--global-batch-size={fitting}, or "
                "--pipeline-schedule=interleaved, which accepts any number"
            )
        try:
            pipeline.schedule(count)
        except ScheduleError as error:
            raise ScheduleError(f"{batch}: {error}") from error
