"""The one check of a configuration: what a pipeline accepts, changes and refuses.

`preflight` answers for any settings, on any machine and without torch. `inspect` is the same check
in a process of the job, which knows its device and its Transformer Engine; it also returns the
pipeline, and the arguments with which Megatron hosts it: two mirrored pipelines on D ranks are to
Megatron one of D/2 ranks with twice as many data-parallel replicas, and stages placed as a V or W
have a layout.
"""

from __future__ import annotations

import logging
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config import incompatible, stages
from megatron_ext.config.active import Environment, Pipeline, base_table, twins_of
from megatron_ext.config.flags import (
    DROPPED,
    FLAG,
    completed,
    flag_names,
    pipeline_config,
    read_words,
)
from megatron_ext.config.incompatible import (
    MEGATRON_FIELDS,
    RULES,
    Refusal,
    Rule,
    dropped,
    forbids_splitting,
    refusals,
    rules_of,
)
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.stages import check_ranks
from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.disaggregation.role_settings import (
    has_dropout,
    job_of,
    profiles_with_torch,
    role_arguments,
)
from megatron_ext.errors import ArgumentsError, ScheduleError, UserError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, generate
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.validation import validate
from megatron_ext.upstream.tree import setting_names

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["Preflight", "batches_of", "inspect", "preflight", "torch_is_best"]

_LOG = logging.getLogger(__name__)

_USUAL = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "attention_dropout": 0.1,
    "ckpt_format": "torch_dist",
    "context_parallel_size": 1,
    "dist_ckpt_optim_fully_reshardable": False,
    "gradient_accumulation_fusion": True,
    "hidden_dropout": 0.1,
    "load": None,
    "multi_latent_attention": False,
    "pipeline_model_parallel_size": 1,
    "rank": 0,
    "save": None,
    "sequence_parallel": False,
    "tensor_model_parallel_size": 1,
    "tp_comm_overlap": False,
    "transformer_impl": "transformer_engine",
}
"""Megatron's defaults of what the checks read."""


@dataclass
class Preflight:
    """Answer of `preflight`: whether a training can run, and how it differs from its flags."""

    refusals: list[Refusal] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Settings that the schedule replaces: the cut of the model, what is dropped or taken over."""
    notices: list[str] = field(default_factory=list)
    """Notices of settings with less effect than they seem to have."""
    ignored: list[str] = field(default_factory=list)
    """Settings that no check has looked at."""
    config: PipelineConfig | None = None
    """The pipeline as the flags describe it; None: they contradict each other."""
    pipeline: Pipeline | None = None
    """The pipeline that runs; None: Megatron's own schedules run, or it is refused."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if its messages travel over our transport."""
    job: Job | None = None
    """The disaggregated job, in a process of it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments by Megatron's names that let it host the pipeline."""
    _kinds: set[type[UserError]] = field(default_factory=set)

    @property
    def accepted(self) -> bool:
        """Whether the configuration can run."""
        return not self.refusals

    def raise_refusals(self) -> None:
        """Raise all refusals as one error, a line for each.

        Raises:
            ArgumentsError: Settings exclude each other.
            ScheduleError: The schedule does not exist, or not for these sizes.
        """
        if self.refusals:
            kind = ScheduleError if self._kinds == {ScheduleError} else ArgumentsError
            raise kind("\n".join(map(str, self.refusals)))

    def refuse(
        self, config: PipelineConfig, args: Namespace, table: Schedule | None = None
    ) -> None:
        """Add the settings that exclude what a configuration runs, see `incompatible.rules_of`."""
        implies = {"--use-dpp": config.dynamic, FLAG: config.disaggregation}
        subjects = {
            "microbatch_rng": next((flag for flag, one in implies.items() if one), None)
            or "--microbatch-rng",
            "balance": f"--pipeline-balance {config.balance}",
            "slices": f"--pipeline-slices {config.slices}",
            "variable_seq_lengths": "--variable-seq-lengths",
            "disaggregation": FLAG,
            "schedule": f"--pipeline-schedule {config.schedule}",
            "pairs": "--overlap-moe-expert-parallel-comm",
            "dynamic": "--use-dpp",
            "transport": f"--pipeline-transport {config.wire}",
        }
        for name, rules in rules_of(config, args, table):
            self.add(ArgumentsError, refusals(subjects[name], args, rules))

    def drop(self, args: Namespace, rules: Iterable[Rule]) -> None:
        """Switch settings off, and say so."""
        for rule in rules:
            if rule.refuses(args):
                set_ = (dest for dest in rule.reads if getattr(args, dest, None))
                self.arguments |= dict.fromkeys(set_, False)
                self.changes.append(f"{rule.flag} is dropped: {rule.reason}")

    def collecting(self, rule: str, args: Namespace | None = None) -> _Collecting:
        """Return a context that makes errors inside it refusals; the check goes on after it.

        Args:
            rule: Names the check.
            args: Flags to name in place of the fields of a `PipelineConfig`.
        """
        return _Collecting(self, rule, args)

    def add(self, kind: type[UserError], found: list[Refusal]) -> None:
        """Add refusals that were not found before, as errors of a kind."""
        if found:
            self.refusals += [refusal for refusal in found if refusal not in self.refusals]
            self._kinds.add(kind)


@dataclass
class _Collecting:
    """See `Preflight.collecting`."""

    found: Preflight
    rule: str
    args: Namespace | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, ConfigurationError) and self.args is not None:
            error = ArgumentsError(error.worded(flag_names(self.args)))
        if not isinstance(error, ArgumentsError | ScheduleError):
            return False
        kind = ScheduleError if isinstance(error, ScheduleError) else ArgumentsError
        self.found.add(kind, [Refusal.of(self.rule, line) for line in str(error).splitlines()])
        return True


class _Given(Namespace):
    """Settings that note which of them a check reads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.__dict__["_read"] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__
        if not name.startswith("_"):
            found("__dict__")["_read"].add(name)
        return found(name)


def preflight(
    arguments: Sequence[str] | Mapping[str, Any] | Namespace,
    config: PipelineConfig | None = None,
    *,
    world_size: int | None = None,
) -> Preflight:
    """Return what a configuration takes, changes and refuses; imports neither torch nor Megatron.

    The job may run on another machine: devices are taken to reach each other, and Transformer
    Engine to be installed where its layers are chosen.

    Args:
        arguments: The words of a command line, parsed arguments, or settings by the names of
            Megatron's arguments, of its configuration objects or of Megatron-Bridge's. Missing
            ones have Megatron's defaults. What follows from missing sizes of the model or of the
            batch is not checked.
        config: The pipeline, as for `configure`; None: flags among the arguments choose it.
        world_size: Ranks of the job; None: `world_size` of the arguments, or one replica.
    """
    if isinstance(arguments, Namespace):
        given = vars(arguments)
    else:
        given = dict(arguments if isinstance(arguments, Mapping) else read_words(arguments))
    renamed = {field: dest for dest, field in MEGATRON_FIELDS.items()}
    args = _Given(**{**_USUAL, **{renamed.get(name, name): given[name] for name in given}})
    args.pipeline_model_parallel_layout = stages.layout_text(
        given.get("pipeline_model_parallel_layout")
    )
    if args.pipeline_model_parallel_layout and "virtual_pipeline_model_parallel_size" in given:
        # Configuration objects hold both; Megatron derives this one from the layout.
        args.num_virtual_stages_per_pipeline_rank = None
    args.world_size = world_size or given.get("world_size")
    args.__dict__["_read"].clear()
    found = inspect(args, config, here=False)
    read = args.__dict__["_read"].union(*(rule.reads for rules in RULES.values() for rule in rules))
    read |= {*_USUAL, "seq_length"}
    unread = [name for name in given if renamed.get(name, name) not in read]
    megatrons = setting_names() if unread else frozenset()
    found.ignored = sorted(name for name in unread if name not in megatrons)
    return found


def inspect(
    args: Namespace, requested: PipelineConfig | None = None, *, here: bool = True
) -> Preflight:
    """Check a configuration: what it takes, changes and refuses, and what follows for Megatron.

    Args:
        args: Arguments with upstream's names, not yet validated by Megatron.
        requested: The pipeline, as for `configure`; None: the flags choose it.
        here: Whether this is a process of the job, with its device and its software.
    """
    found = Preflight()
    config = None
    with found.collecting("flags"):
        config = pipeline_config(args) if requested is None else completed(args, requested)
    if config is None:
        return found
    if config.disaggregation is not None and has_dropout(args):
        config = replace(config, microbatch_rng=True)  # both roles must draw the same masks
    found.config = config
    # What the job does without leaves nothing for the rules to refuse.
    if config.disaggregation is not None:
        found.drop(args, RULES["dropped_by_roles"])
        args = copy(args)
        vars(args).update(found.arguments)
    found.refuse(config, args)
    if config.slices > 1 and not getattr(args, "reset_attention_mask", False):
        # Tensor-parallel ranks receive a mask in a buffer of the whole one's form.
        found.arguments |= {"create_attention_mask_in_dataloader": False}
    if config.variable_seq_lengths and not getattr(args, "num_experts", None):
        # Megatron refuses them with allgather, its default, in models without experts too.
        found.arguments |= {"moe_token_dispatcher_type": "alltoall"}
    # What ends one of these checks leaves the rest of it without a subject.
    if config.disaggregation is not None:
        with found.collecting("disaggregation"):
            _inspect_roles(found, config, args, here=here)
    elif config.schedule is not None:
        with found.collecting("pipeline_schedule", args if requested is None else None):
            _inspect_schedule(found, config, args, here=here)
    elif config.wire != "torch" and not torch_is_best(config, _world_size(args), here=here):
        with found.collecting("pipeline_transport"):
            _inspect_own(found, config, args)
    if here:
        with found.collecting("device"):
            found.arguments |= device_arguments(args, config)
    for flag, reason in DROPPED.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            found.changes.append(f"{flag} {value} is ignored: Megatron-LM has dropped it, {reason}")
    return found


def _inspect_roles(
    found: Preflight, config: PipelineConfig, args: Namespace, *, here: bool
) -> None:
    """Check forward and backward ranks; a wrong number of processes ends the check."""
    assert config.disaggregation is not None
    found.drop(args, (*RULES["dropped"], *RULES["dropped_by_line"]))
    with found.collecting("num_layers"):
        if here or getattr(args, "num_layers", None):
            line = linear(args.pipeline_model_parallel_size)
            arguments, changes = stages.flags_for(args, line, FLAG)
            found.arguments |= arguments
            found.changes += changes
    if profiles_with_torch(args):
        found.notices.append("--use-pytorch-profiler profiles backward ranks only")
    if here:
        if not found.refusals:
            found.job = job_of(args, config)
            found.arguments |= role_arguments(args, found.job)
        return
    if args.world_size:
        rank_map(
            args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            merged=config.disaggregation.merged,
            cp=args.context_parallel_size,
        )


def _inspect_schedule(
    found: Preflight, config: PipelineConfig, args: Namespace, *, here: bool
) -> None:
    """Check a schedule of ours; a wrong number of ranks, or no table, ends the check."""
    name = config.schedule
    assert name is not None
    subject = f"--pipeline-schedule {name}"
    if config.pairs:
        found.arguments["overlap_moe_expert_parallel_comm"] = True
    elif getattr(args, "overlap_moe_expert_parallel_comm", False):
        found.notices.append(
            "--overlap-moe-expert-parallel-comm has no effect without experts on several ranks "
            "(--num-experts, --expert-model-parallel-size)"
        )
        found.arguments["overlap_moe_expert_parallel_comm"] = False
    twins, pp = twins_of(name), args.pipeline_model_parallel_size
    check_ranks(name, pp, twins)
    batches = None
    batch = (getattr(args, size, None) for size in ("global_batch_size", _STEPS))
    if here or (getattr(args, "micro_batch_size", None) and any(batch)):
        with found.collecting("global_batch_size"):
            batches = batches_of(args, pp, twins)
    else:
        found.notices.append(
            "the number of micro-batches is not checked: there is no --micro-batch-size or no "
            "--global-batch-size"
        )
    pipeline = Pipeline(
        config,
        pp,
        2 * pp if batches is None else batches.num_microbatches,
        splits=not forbids_splitting(args),
        over_torch=torch_is_best(config, _world_size(args), here=here),
    )
    if batches is not None:
        prove(pipeline, batches)
    found.refuse(config, args, pipeline.full)
    found.drop(args, dropped(pipeline.full))
    with found.collecting("transformer_impl"):
        pipeline = _with_splittable_layers(found, args, pipeline, here=here)
    found.pipeline = pipeline
    with found.collecting("num_layers"):
        if here or getattr(args, "num_layers", None):
            arguments, changes = stages.flags_for(args, pipeline.placement, subject)
            found.arguments |= arguments
            found.changes += changes
        else:
            found.notices.append("the cut into stages is not checked: there is no --num-layers")
    if getattr(args, "use_distributed_optimizer", False):
        found.arguments["dist_ckpt_optim_fully_reshardable"] = True
        if not args.dist_ckpt_optim_fully_reshardable and (args.save or args.load):
            found.changes.append(
                "--dist-ckpt-optim-fully-reshardable is set: in any other form, optimizer state "
                "cannot be loaded under another schedule"
            )
    if getattr(args, "microbatch_group_size_per_vp_stage", None):
        found.notices.append(
            "--microbatch-group-size-per-virtual-pipeline-stage has no effect: the order of "
            "micro-batches is part of the schedule"
        )


def _with_splittable_layers(
    found: Preflight, args: Namespace, pipeline: Pipeline, *, here: bool
) -> Pipeline:
    """Return the pipeline in a form that the layers of Transformer Engine can run.

    Raises:
        ArgumentsError: The table splits backwards, but these layers cannot.
    """
    if not pipeline.full.splits_backward or not hasattr(args, "transformer_impl"):
        return pipeline
    reason = incompatible.why_te_cannot_split(args, here=here)
    if reason is None:
        notice = incompatible.te_leaves_whole(args, here=here)
        if notice is not None:
            found.notices.append(f"--pipeline-schedule {pipeline.name}: {notice}")
        if getattr(args, "tp_comm_overlap", False) and args.transformer_impl != "local":
            found.notices.append(
                f"--pipeline-schedule {pipeline.name}: --tp-comm-overlap hides no reduce-scatter "
                "under weight gradients, which run later, and their gathered operands are copied"
            )
        return pipeline
    if pipeline.dynamic is not None:
        whole = replace(pipeline, splits=False)
        if not whole.full.splits_backward:
            found.notices.append(f"--use-dpp leaves backwards whole: {reason}")
            return whole
    other = "--bitpipe-order paper" if pipeline.name == "bitpipe" else "1f1b or interleaved"
    raise ArgumentsError(
        f"--pipeline-schedule {pipeline.name} splits backwards, but {reason}; or use {other}, "
        "which does not split them"
    )


def _inspect_own(found: Preflight, config: PipelineConfig, args: Namespace) -> None:
    """Check Megatron's own schedule, whose messages will travel over our transport.

    Its table is never executed; it announces the messages in advance.

    Raises:
        ArgumentsError: There is no pipeline, or Megatron sends messages that our tables lack.
    """
    flag = f"--pipeline-transport {config.wire}"
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ArgumentsError(
            f"{flag} carries tensors between pipeline ranks, --pipeline-model-parallel-size {pp} "
            f"has no second rank; leave it out"
        )
    chunks = stages.chunks_of_megatron(args)
    batches = batches_of(args, pp, twins=1)
    own = replace(config, schedule=base_table(chunks), chunks=chunks if chunks > 1 else None)
    pipeline = Pipeline(own, pp, batches.num_microbatches)
    found.refuse(config, args, pipeline.full)
    for global_batch, count in batches.counts.items():
        if chunks > 1 and count % pp:
            # The groups in which Megatron sends micro-batches around must be full.
            lower = count // pp * pp
            fitting = " or ".join(
                str(batches.global_batch(some)) for some in (lower, lower + pp) if some
            )
            raise ArgumentsError(
                f"{flag} with {batches.explained(global_batch)}: Megatron's interleaved schedule "
                f"sends micro-batches in groups of pp = {pp}, so their number must be a multiple "
                f"of it; use --global-batch-size {fitting}, or --pipeline-schedule interleaved, "
                "which takes any number"
            )
        try:
            validate(pipeline.schedule(count))
        except ScheduleError as error:
            raise ArgumentsError(
                f"{flag} with {batches.explained(global_batch)}: {error}"
            ) from error
    found.transport_only = pipeline


def prove(pipeline: Pipeline, batches: Batches) -> None:
    """Make and validate the table of every batch size of the run.

    torch.distributed may match messages by their order; over it, the proof covers that order too.

    Args:
        pipeline: The pipeline of the run.
        batches: The batch sizes of the run.

    Raises:
        ScheduleError: A batch size has no table, or its ranks would deadlock.
    """
    if pipeline.name.startswith(CSV_PREFIX):
        _check_file(pipeline, batches)
    for global_batch, count in batches.counts.items():
        try:
            validate(pipeline.schedule(count))
        except ScheduleError as error:
            reason = f"with {batches.explained(global_batch)}: {error}"
            raise ScheduleError(f"--pipeline-schedule {pipeline.name} {reason}") from error
        if pipeline.transport == "torch":
            check_queues(pipeline.schedule(count))


def _check_file(pipeline: Pipeline, batches: Batches) -> None:
    """Compare the size of a file's table with the run, and name the flags to change."""
    table = generate(pipeline.name)
    if table.pp != pipeline.pp:
        raise ScheduleError(
            f"--pipeline-schedule {pipeline.name} has {table.pp} rows, one for each rank, not "
            f"{pipeline.pp}; use --pipeline-model-parallel-size {table.pp}"
        )
    for global_batch, count in batches.counts.items():
        if count != table.num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule {pipeline.name} runs {table.num_microbatches} micro-batches, "
                f"not {batches.explained(global_batch)}; use --global-batch-size "
                f"{batches.global_batch(table.num_microbatches)}"
            )


@dataclass(frozen=True)
class Batches:
    """The batch sizes of a run, and the micro-batches of one model replica."""

    micro_batch: int
    """Samples of one micro-batch."""
    replicas: int
    """Megatron's data-parallel size, which counts two mirrored pipelines as two replicas."""
    twins: int
    counts: Mapping[int, int]
    """Micro-batches of one replica by global batch size; the last one is the full batch."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a full batch."""
        return list(self.counts.values())[-1]

    def total(self, count: int) -> int:
        """Return the micro-batches of the whole pipeline world if one replica has `count`."""
        return count * self.twins

    def global_batch(self, count: int) -> int:
        """Return the global batch size that gives one replica `count` micro-batches."""
        return count * self.micro_batch * self.replicas

    def explained(self, global_batch: int) -> str:
        """Return the number of micro-batches in a global batch, with its derivation in words."""
        worlds = self.replicas // self.twins
        return (
            f"{self.total(self.counts[global_batch])} micro-batches (--global-batch-size "
            f"{global_batch} / (--micro-batch-size {self.micro_batch} x {worlds} data-parallel))"
        )


def batches_of(args: Namespace, pp: int, twins: int) -> Batches:
    """Return the batch sizes that the flags request.

    Args:
        args: Parsed arguments, not yet validated by Megatron.
        pp: Ranks of the whole pipeline world.
        twins: 2 if two mirrored pipelines share it, else 1.

    Raises:
        ArgumentsError: A size is missing, or the sizes do not divide.
    """
    replicas = _worlds(args, pp) * twins
    micro_batch = args.micro_batch_size
    if not micro_batch or micro_batch < 1:
        raise ArgumentsError("--micro-batch-size is missing: give it a value of at least 1")
    step = micro_batch * replicas
    rounds = getattr(args, "decrease_batch_size_if_needed", False)
    counts = {}
    batches, nearest = _global_batches(args, step)
    for batch in batches:
        if batch < step or (batch % step and not rounds):
            mirrored = " (two for each mirrored pipeline)" if twins == 2 else ""
            raise ArgumentsError(
                f"a global batch of {batch} is not a multiple of --micro-batch-size {micro_batch} "
                f"x {replicas} replicas{mirrored}; use {nearest}"
            )
        counts[batch] = batch // step
    return Batches(micro_batch, replicas, twins, counts)


def _worlds(args: Namespace, pp: int) -> int:
    """Return the number of copies of the whole pipeline that the processes form."""
    tp = args.tensor_model_parallel_size
    cp = getattr(args, "context_parallel_size", 1)
    ranks, world_size = tp * pp * cp, _world_size(args)
    if world_size % ranks:
        raise ArgumentsError(
            f"world size {world_size} is not a multiple of tensor {tp} x pipeline {pp} x "
            f"context {cp} = {ranks}; start {ranks} processes or a multiple, or lower a parallel "
            "size"
        )
    return int(world_size // ranks)


_STEPS = "step_batch_size_schedule"
_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _global_batches(args: Namespace, step: int) -> tuple[list[int], str]:
    """Return every global batch size of the run, the full one last, and flags of sizes that divide.

    Args:
        args: Parsed arguments.
        step: Samples of one micro-batch of every replica.
    """
    full = getattr(args, "global_batch_size", None) or step
    steps, ramp = getattr(args, _STEPS, None), getattr(args, "rampup_batch_size", None)
    if steps is not None:
        given = re.findall(r"([\d.]+)([KMBT]?):(\d+)", steps.upper())
        if not given:
            raise ArgumentsError(
                f"--step-batch-size-schedule {steps} has no THRESHOLD:SIZE, such as 0:768 or "
                "250B:1536; leave it out"
            )
        by_threshold = sorted(
            (float(number) * _SUFFIXES[suffix], int(size)) for number, suffix, size in given
        )
        # Smaller ones are of a run on fewer processes that goes on here; Megatron checks it.
        batches = [size for _, size in by_threshold if size >= step]
        near = " ".join(f"{at:.0f}:{-(-size // step) * step}" for at, size in by_threshold)
        return batches or [by_threshold[-1][1]], f"--step-batch-size-schedule '{near}'"
    if ramp is None:
        lower, upper = full // step * step, (full // step + 1) * step
        return [full], f"--global-batch-size {f'{lower} or {upper}' if lower else upper}"
    written = " ".join(map(str, ramp))
    try:
        start, increment, samples = map(int, ramp)
    except ValueError:
        raise ArgumentsError(
            f"--rampup-batch-size {written}: must be start, increment, samples; give three integers"
        ) from None
    if start < 1 or increment < 1 or start > full or (full - start) % increment:
        lower = start + max(0, full - start) // max(1, increment) * increment
        raise ArgumentsError(
            f"--rampup-batch-size {written} does not lead from {start} to the --global-batch-size "
            f"{full} in steps of {increment}; use --global-batch-size {lower} or "
            f"{lower + increment}, or leave --rampup-batch-size out"
        )
    first, more = (-(-size // step) * step for size in (start, increment))
    last = first + -(-max(0, full - first) // more) * more
    return (
        [*range(start, full, increment), full],
        f"--rampup-batch-size {first} {more} {samples} --global-batch-size {last}",
    )


def torch_is_best(config: PipelineConfig, world_size: int, *, here: bool = True) -> bool:
    """Return whether `auto` selects torch.distributed: a static order between devices.

    torch.distributed offers all that a schedule with a fixed order needs. Tables take it for every
    pair of ranks that does not share device memory, on one host or several; Megatron's own
    schedules only on one host, where nothing of them has to be replaced.
    """
    if config.wire != "auto" or config.dynamic is not None:
        return False
    if config.device_path == "ipc" or config.checksums:  # torch.distributed has neither
        return False
    if here and not devices.current().reaches_peers:
        return False
    on_one_host = Environment.read().ranks_per_node(world_size) >= world_size
    if not on_one_host and config.schedule is None:
        return False
    _LOG.info(
        "--pipeline-transport auto: torch.distributed, which moves tensors between devices without "
        "the host's memory%s",
        ", for pairs of ranks that do not share device memory"
        if config.tries_ipc and config.schedule is not None
        else "",
    )
    return True


def device_arguments(args: Namespace, config: PipelineConfig) -> dict[str, Any]:
    """Return the arguments, by name, that the device corrects; refuse the others it cannot accept.

    Only `--distributed-backend` is corrected, with a notice: scripts written for GPUs always name
    NCCL, and each device has only one possible backend.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    device = devices.current()
    if config.device not in {"auto", device.name}:
        raise ArgumentsError(
            f"--device-backend {config.device} came after the {device.name} backend was armed "
            "(Megatron was imported before the arguments were known); set "
            f"MEGATRON_EXT_DEVICE={config.device} too"
        )
    wanted, errors = {}, []
    for dest, (value, reason) in device.argument_defaults.items():
        found = getattr(args, dest, value)
        if found == value:
            continue
        if dest == "distributed_backend":
            _LOG.warning("--distributed-backend %s: %s is used, %s", found, value, reason)
            wanted[dest] = value
            continue
        flag = f"--{dest.replace('_', '-')}"
        errors.append(f"{flag} is {found!r}, {device.name} needs {value!r}: {reason}")
    errors.extend(device.argument_errors(args))
    if errors:
        raise ArgumentsError("\n".join(errors))
    return wanted


def _world_size(args: Namespace) -> int:
    """Return the number of ranks, or where it is unknown that of one replica."""
    sizes = ("tensor_model", "pipeline_model", "context")
    of_replica = math.prod(getattr(args, f"{kind}_parallel_size", 1) for kind in sizes)
    return int(getattr(args, "world_size", None) or of_replica)
