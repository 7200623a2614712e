"""Runs a model's training steps in slices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.features.slices.slice_inputs import CheckedSteps
from megatron_ext.features.slices.sliced_compute import (
    CutAhead,
    KeptState,
    SlicedCompute,
)
from megatron_ext.features.slices.sliced_layers import SLICES
from megatron_ext.runtime.feature import Feature, Model, Step
from megatron_ext.runtime.lengths import cost_of_model
from megatron_ext.runtime.program import PipelineEnds
from megatron_ext.runtime.runtime import in_force

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.runtime.program import Shapes


def kept_state() -> KeptState:
    """Return the state that layers keep from slice to slice. Patched layers read it as well."""
    kept_by_feature = in_force().kept_by_feature
    state: KeptState = kept_by_feature.setdefault(SLICES, KeptState())
    return state


class SliceSteps(Feature):
    """Adds slices to a model's training steps."""

    def __init__(self, model: Model) -> None:
        config = model.pipeline.config
        self._has_slices = config.slices > 1 or config.slice_tokens is not None
        self._checked_steps = CheckedSteps()

    @staticmethod
    def pipeline_of(pipeline: Pipeline, config: Any, seq_length: int) -> Pipeline:
        """Return the pipeline with slices that cost the same in this model."""
        if pipeline.config.slices == 1:
            return pipeline
        length_cost = pipeline.config.length_costs or cost_of_model(config)
        attention = length_cost.attention_share(seq_length)
        costs = replace(pipeline.costs, attention=attention)
        return replace(pipeline, config=replace(pipeline.config, costs=costs))

    def shapes_on_wires(self, shapes: Shapes) -> Shapes:
        """Return None as every message's shape, so that each message carries its own shape."""
        if not self._has_slices:
            return shapes
        # Slices of equal cost differ in length.
        unknown_shapes: dict[str, list[None]] = {}
        for kind, shapes_of_kind in shapes.items():
            unknown_shapes[kind] = [None] * len(shapes_of_kind)
        return unknown_shapes

    def compute(self, step: Step) -> tuple[StageCompute, PipelineEnds] | None:
        """Return the compute object for a step with slices; see `Feature.compute`."""
        table = step.table
        call = step.call
        # A step with only short micro-batches also has bounds, even though nothing is
        # cut. Neither the model checks nor how empty micro-batches run depends on the
        # lengths.
        is_cut_ahead = isinstance(call.read_ahead, CutAhead)
        if table.schedule.num_slices == 1 and not is_cut_ahead:
            return None
        shapes = self.shapes_on_wires(step.shapes)
        compute = SlicedCompute(
            call,
            table,
            len(shapes["F"]),
            shapes["B"],
            step.splits,
            layer_state=kept_state(),
            checked_steps=self._checked_steps,
        )
        ends = PipelineEnds.of_shapes(
            step.peers,
            shapes,
            call.config.pipeline_dtype,
        )
        return compute, ends

    def step_failed(self) -> None:
        """Drop the state that layers keep, because a failure leaves it incomplete."""
        kept_state().clear()
