"""Describes a job to the planner, which ranks the schedules for `--pipeline-schedule auto`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext import devices
from megatron_ext.config.batches import Batches, batches_of
from megatron_ext.config.completion import completed
from megatron_ext.config.cut import UserCut
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.stages import stage_arguments
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.planning import choice
from megatron_ext.planning.hardware import DEVICES, kind_of
from megatron_ext.planning.layer_costs import FULL
from megatron_ext.planning.measured import MeasuredCosts
from megatron_ext.planning.model_flags import sizes_of_arguments
from megatron_ext.planning.question import ParallelSizes, Question
from megatron_ext.planning.techniques import techniques_of_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.planning.choice import Candidate, Judge, Ranking, Training
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.schedules.table.placement import Placement


REFERENCE = choice.REFERENCE
"""The schedule with the fewest requirements: it can run if any schedule can."""


def ranking(
    args: Namespace, config: PipelineConfig, device: DeviceKind | None
) -> Ranking:
    """Return the schedules that a job may use, best first.

    Arguments and errors are the same as for `question_of`.
    """
    return choice.rank(*question_of(args, config, device))


def question_of(
    args: Namespace, config: PipelineConfig, device: DeviceKind | None
) -> tuple[Training, Judge]:
    """Return a description of the job for the planner, and the judge that compares schedules.

    Args:
        args: Megatron's arguments before its validation, or equivalent sizes.
        config: The configuration, whose schedule is `auto` or `auto:FOLDER`.
        device: Description of the devices, or None if unknown.

    Raises:
        ArgumentsError: The sizes are inconsistent, or the run in the folder has different sizes.
    """
    job = _UndecidedJob(args, config, device)
    return job.training, job.judge()


class _UndecidedJob:
    """A job whose schedule is undecided, as the planner sees it."""

    def __init__(
        self, args: Namespace, config: PipelineConfig, device: DeviceKind | None
    ) -> None:
        """Read the job's sizes; see `question_of`."""
        self._args = args
        self._config = config
        self._device = device
        self._cut = UserCut.of(vars(args))
        pp = self._cut.sizes.pipeline_model_parallel_size
        if pp < 2:
            raise ArgumentsError(
                "--pipeline-schedule=auto needs a pipeline of at least 2 ranks, not "
                f"--pipeline-model-parallel-size={pp}; use --pipeline-model-parallel-size=2, or "
                "remove --pipeline-schedule"
            )
        self._batches = _batches(args)
        # These settings follow from the sizes alone, so they are the same for every schedule.
        undecided = replace(config, schedule=choice.REFERENCE)
        self._reference = completed(vars(args), self._cut, undecided)

    @cached_property
    def training(self) -> Training:
        """The settings that all schedules share."""
        pp = self._cut.sizes.pipeline_model_parallel_size
        # Megatron uses one stage per rank if no flag sets the number, so do not treat 1 as the
        # user's choice.
        chunks = self._cut.chunks_if_even
        if chunks == 1:
            chunks = None
        # If the batch is unknown, use a number that fills the pipeline, as other checks do.
        num_microbatches = 2 * pp
        if self._batches is not None:
            num_microbatches = self._batches.num_microbatches
        num_layers = None
        if self._has_layers:
            num_layers = self._cut.num_layers
        return choice.Training(
            ranks=pp,
            num_microbatches=num_microbatches,
            cut=self._layers_by_stage,
            chunks=chunks,
            num_layers=num_layers,
            costs=self._config.costs,
            feature_options=self._reference.feature_options,
            stash_ratio=self._reference.stash_ratio,
            weights_at_once=self._reference.weights_at_once,
        )

    def judge(self) -> Judge:
        """Return the judge that compares schedules.

        Raises:
            ArgumentsError: The traced run has different sizes.
        """
        folder = self._config.trace_folder
        if folder is not None:
            measured = MeasuredCosts.read(folder)
            measured.check_sizes(vars(self._args), folder)
            return choice.ByTable(
                training=self.training,
                measured=measured,
                reason=f"the times of the run in {folder}",
            )
        try:
            return self._forecast()
        except (ArgumentsError, ScheduleError) as error:
            # Without a forecast, compare only the simulated tables and log the reason.
            problem, _, _remedy = str(error).partition("; ")
            reason = f"tables alone ({problem})"
            return choice.ByTable(training=self.training, measured=None, reason=reason)

    @property
    def _has_layers(self) -> bool:
        """Whether the arguments specify the model's number of layers."""
        sizes = self._cut.sizes
        return bool(self._cut.pattern or sizes.num_layers or sizes.encoder_num_layers)

    def _layers_by_stage(
        self, schedule: str, placement: Placement
    ) -> Sequence[int] | None:
        """Return the layers per stage as Megatron will build them; None if their number is unknown.

        Raises:
            ArgumentsError: The user's flags contradict each other.
            ScheduleError: The model cannot be cut into these stages.
        """
        if not self._has_layers:
            return None
        subject = f"--pipeline-schedule={schedule}"
        built = stage_arguments(self._args, self._cut, placement, subject)
        # Count the layers in the arguments that Megatron gets. They contain the user's cut or ours.
        built_cut = UserCut.of(vars(self._args) | built.values)
        counts = built_cut.layers_by_stage(placement)
        if counts is None:
            raise ScheduleError(
                f"the layers cannot be divided evenly among the stages of {schedule}"
            )
        return counts

    def _forecast(self) -> choice.ByForecast:
        """Return the planner's forecast.

        Raises:
            ArgumentsError: A size is missing, or the planner does not support this kind of
                training.
        """
        args = self._args
        for rule in choice.NOT_FORECAST:
            if rule.refuses(args):
                raise ArgumentsError(f"with {rule.flag} {rule.reason}")
        for rules in feature_rules():
            if reason := rules.why_no_forecast(self._config):
                raise ArgumentsError(reason)
        batches = self._batches
        if batches is None:
            raise ArgumentsError("the batch size is unknown")
        model = sizes_of_arguments(args)
        if not model.sequence:
            raise ArgumentsError("--seq-length is missing")
        sizes = self._cut.sizes
        pp = sizes.pipeline_model_parallel_size
        tp = sizes.tensor_model_parallel_size
        cp = sizes.context_parallel_size
        ep = sizes.expert_model_parallel_size
        ranks_of_stage = sizes.ranks // pp
        if ranks_of_stage % ep:
            raise ArgumentsError(
                f"{ep} expert-parallel ranks do not evenly divide a stage's ranks"
            )
        full_batch = list(batches.counts)[-1]
        # The flag for pairs is not enough: pairs may still be dropped, for example with
        # FP4 or packed sequences.
        techniques = techniques_of_arguments(args)
        techniques = replace(techniques, overlaps_experts=self._reference.pairs)
        question = Question(
            model=model,
            # An unknown device still needs speeds, so assume an H100. In that case, its
            # memory is not used; see `has_memory`.
            device=self._device or DEVICES["h100"],
            num_devices=sizes.ranks,
            global_batch=full_batch,
            sequence=model.sequence,
            # The planner cannot import the rules itself, because the configuration imports the
            # planner.
            pair_rules=RULES.get("pairs", ()),
            techniques=techniques,
            fused_loss=bool(getattr(args, "cross_entropy_loss_fusion", None)),
            overlaps=bool(getattr(args, "overlap_grad_reduce", None)),
            shards_optimizer=bool(getattr(args, "use_distributed_optimizer", None)),
        )
        parallel_sizes = ParallelSizes(
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            micro_batch=batches.micro_batch,
            mode=_recomputed(args),
            num_microbatches=batches.num_microbatches,
            replicas=sizes.ranks // (tp * pp * cp),
        )
        return choice.ByForecast(
            training=self.training,
            job=question,
            sizes=parallel_sizes,
            has_memory=self._device is not None,
        )


def _batches(args: Namespace) -> Batches | None:
    """Return the batch sizes for one pipeline, or None if the arguments do not contain them."""
    has_batch = False
    for size in ("global_batch_size", "step_batch_size_schedule"):
        has_batch = has_batch or bool(getattr(args, size, None))
    if not (has_batch and getattr(args, "micro_batch_size", None)):
        return None
    # `Training` counts the micro-batches that a set of ranks runs, whether or not a schedule
    # mirrors two pipelines on these ranks.
    return batches_of(args, args.pipeline_model_parallel_size, 1)


def _recomputed(args: Namespace) -> frozenset[str]:
    """Return the recomputed modules, under the planner's names."""
    granularity = getattr(args, "recompute_granularity", None)
    if granularity == "full":
        return FULL
    if granularity == "selective" or getattr(args, "recompute_activations", None):
        # Core attention is Megatron's default for selective recomputation.
        modules = getattr(args, "recompute_modules", None) or ("core_attn",)
        return frozenset(modules)
    return frozenset()


def configured(config: PipelineConfig, candidate: Candidate) -> PipelineConfig:
    """Return the configuration with a candidate's schedule."""
    costs = candidate.costs or config.costs
    return replace(
        config,
        schedule=candidate.schedule,
        chunks=candidate.chunks,
        costs=costs,
    )


def memory_here() -> DeviceKind | None:
    """Return a description of this process's device, in which only the memory is reliable.

    Returns None if the device has no separate memory.
    """
    name, memory_gib = devices.name_and_memory()
    if memory_gib is None:
        return None
    # The description needs a speed, so use an H100's speed if the kind is unknown.
    kind = kind_of(name) or DEVICES["h100"]
    return replace(kind, name=name, memory_gib=memory_gib)


def device_here() -> DeviceKind | None:
    """Return a description of this process's device, including its memory.

    Returns None if the process has no device or the planner does not know what kind it is.
    """
    name, memory_gib = devices.name_and_memory()
    kind = kind_of(name)
    if kind is None or memory_gib is None:
        return None
    return replace(kind, memory_gib=memory_gib)
