"""Runs pairs in a model's training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_ext import devices
from megatron_ext.config.active import report_departure
from megatron_ext.errors import ScheduleError
from megatron_ext.features.pairs.awaited_tokens import HOST_WEIGHTS
from megatron_ext.features.pairs.pair_rules import PairRules
from megatron_ext.features.pairs.plans import PlannedCompute
from megatron_ext.features.pairs.skipped_hooks import SkippedHooks
from megatron_ext.features.pairs.waiting_weights import (
    DeviceWeights,
    HostWeights,
    SideStreams,
    WaitingWeights,
)
from megatron_ext.runtime.feature import Feature, Model, Step
from megatron_ext.runtime.program import PipelineEnds
from megatron_ext.runtime.runtime import in_force
from megatron_ext.tracing.digest_files import VARIABLE, folder_asked_for

if TYPE_CHECKING:
    import torch

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Schedule


class PairSteps(Feature):
    """Adds pairs to a model's training steps."""

    def __init__(self, model: Model) -> None:
        pipeline = model.pipeline
        # In a dynamic order, ranks choose pairs during the step, so the table lists
        # none.
        self._chooses_pairs = pipeline.config.pairs and pipeline.dynamic is not None
        self._fills_waits = pipeline.config.num_waiting > 0
        if self._fills_waits and folder_asked_for() is not None:
            # An early W would add to gradients while other actions' digests read them.
            self._fills_waits = False
            if dist.get_rank() == 0:
                report_departure(
                    f"with {VARIABLE}, each W runs at its place in the table instead of earlier"
                )
        # Whether a step with no waiting W has been reported.
        self._has_reported_none = False
        self._device = devices.device_of(model.chunks)
        self._skipped_hooks = SkippedHooks()
        # Created at the first step that needs them.
        self._streams: SideStreams | None = None

    @staticmethod
    def refuse_model(
        pipeline: Pipeline,
        chunks: Sequence[torch.nn.Module],
        forward_step: Callable[..., Any],
    ) -> None:
        """Reject a model or forward step without schedule plans; see `Feature.refuse_model`."""
        if pipeline.config.pairs:
            PairRules().refuse_device(pipeline.config)
            _check_plans(chunks, forward_step)

    def compute(self, step: Step) -> tuple[StageCompute, PipelineEnds] | None:
        """Return the compute object for a training step with pairs; see `Feature.compute`."""
        # A W from an earlier step must not run in this one.
        in_force().kept_by_feature.pop(HOST_WEIGHTS, None)
        table = step.table
        call = step.call
        shapes = step.shapes
        pairs_in_table = table.schedule.pairs_of(table.rank)
        has_pairs = self._chooses_pairs or bool(pairs_in_table)
        if call.forward_only:
            return None
        if self._fills_waits and not self._chooses_pairs:
            self._report_no_pairs(table.schedule)
        if not has_pairs:
            return None
        self._skipped_hooks.log(call.chunks)
        weights = self._weights(step)
        compute = PlannedCompute(
            call,
            table,
            len(shapes["F"]),
            shapes["B"],
            step.splits,
            weights=weights,
            streams=self._streams,
        )
        ends = PipelineEnds.of_shapes(
            step.peers,
            shapes,
            call.config.pipeline_dtype,
        )
        return compute, ends

    def _report_no_pairs(self, schedule: Schedule) -> None:
        """Report the first step that has no pairs, so no W can wait."""
        if self._has_reported_none or any(schedule.pairs) or dist.get_rank():
            return
        self._has_reported_none = True
        report_departure(
            f"--pipeline-waiting-weights has no effect: {schedule.label} forms no pairs "
            f"(micro-batches: {schedule.num_microbatches})"
        )

    def _weights(self, step: Step) -> WaitingWeights | None:
        """Return a step's W if they may run before their place in the table, or None."""
        if not self._fills_waits:
            return None
        _check_waiting(step)
        table = step.table
        row = table.schedule.rows[table.rank]
        backend = devices.current()
        if backend.is_host:
            weights = HostWeights(row, step.splits)
            in_force().kept_by_feature[HOST_WEIGHTS] = weights
            return weights
        # Create the streams only once, because Megatron keeps a process's first
        # communication stream.
        if self._streams is None:
            self._streams = SideStreams.of_device(backend, self._device)
        return DeviceWeights(row, step.splits, self._streams)


def _check_waiting(step: Step) -> None:
    """Reject layers whose W cannot run in parallel with actions.

    The rules for flags reject these as well, but programs may build such layers without flags.
    """
    reason = ""
    if step.call.config.sequence_parallel:
        reason = "with sequence_parallel, W gathers its operands from other ranks"
    elif step.splits.has_te_layers and not devices.current().is_host:
        reason = (
            "Transformer Engine's matrix products share one workspace across streams"
        )
    if reason:
        raise ScheduleError(
            f"waiting_weights is not supported here: {reason}; use waiting_weights=0"
        )


def _check_plans(chunks: Sequence[torch.nn.Module], step: Callable[..., Any]) -> None:
    """Check that the model and the forward step can build schedule plans, which pairs require."""
    remedy = "remove --overlap-moe-expert-parallel-comm"
    for chunk in map(unwrap_model, chunks):
        if not hasattr(chunk, "build_schedule_plan"):
            raise ScheduleError(
                f"{type(chunk).__name__} cannot run in pairs, because it has no method "
                f"build_schedule_plan like Megatron's GPTModel; {remedy}"
            )
    # A forward step with `**kwargs` may pass the argument on.
    accepts_flag = any(
        parameter.name == "return_schedule_plan"
        or parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature(step).parameters.values()
    )
    if not accepts_flag:
        raise ScheduleError(
            "the forward step cannot run in pairs, because it has no argument "
            "return_schedule_plan; add it, and if it is set, return model.build_schedule_plan(...) "
            f"as in pretrain_gpt.py, or {remedy}"
        )
