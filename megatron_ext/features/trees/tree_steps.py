"""Runs trees and routes in a model's training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError
from megatron_ext.features.trees.route_plan import plan_routes
from megatron_ext.features.trees.routes import declared
from megatron_ext.features.trees.trees import TreeCompute, agree_trees
from megatron_ext.runtime.feature import Feature, Model, Step
from megatron_ext.runtime.program import PipelineEnds

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.runtime.program import Shapes
    from megatron_ext.schedules.table.placement import Placement


class TreeSteps(Feature):
    """Adds trees and routes to the steps of a model that declares them."""

    def __init__(self, model: Model) -> None:
        placement = model.pipeline.placement
        self._declared = [declared(chunk) for chunk in model.chunks]
        # Shapes that are None are sent with each message (`--variable-seq-lengths`).
        shapes_travel = None in model.shapes["F"]
        # Collective, so ranks whose stages declare nothing take part as well.
        self._trees = agree_trees(
            model.chunks,
            placement,
            model.groups.pp,
            shapes_travel=shapes_travel,
        )
        if self._trees is not None:
            _check_settings(model.pipeline)
            plan = plan_routes(self._trees.routes, placement)
            self.bypasses = plan.bypasses

    @staticmethod
    def refuse_roles(
        chunks: Sequence[torch.nn.Module],
        placement: Placement,
        group: dist.ProcessGroup,
    ) -> None:
        """Reject models with declarations; see `Feature.refuse_roles`."""
        trees = agree_trees(chunks, placement, group, shapes_travel=False)
        if trees is not None:
            raise ScheduleError(
                "the model declares routes or boundaries, but forward and backward ranks exchange "
                "a single tensor [s, b, h]; remove --forward-backward-disaggregating"
            )

    def shapes_on_wires(self, shapes: Shapes) -> Shapes:
        """Return unknown shapes, because trees are sent as bytes, and their number varies."""
        if self._trees is None:
            return shapes
        return {"F": [None], "B": [None]}

    def admit(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Reject declarations that differ from the first model's; see `Feature.admit`."""
        declarations = [declared(chunk) for chunk in chunks]
        if declarations != self._declared:
            raise ScheduleError(
                f"{type(unwrap_model(chunks[0])).__name__} declares different trees or routes "
                "than the model that used these process groups before; give each model its own "
                "groups (pg_collection and p2p_communicator)"
            )

    def compute(self, step: Step) -> tuple[StageCompute, PipelineEnds] | None:
        """Return the compute object for a step with trees; see `Feature.compute`."""
        if self._trees is None:
            return None
        forms = self._trees.forms(step.call, step.shapes)
        ends = PipelineEnds(
            step.peers,
            forms.of_messages,
            forms.of_messages,
        )
        compute = TreeCompute(
            step.call,
            step.table,
            splits=step.splits,
            forms=forms,
            trees=self._trees,
        )
        return compute, ends


def _check_settings(pipeline: Pipeline) -> None:
    """Reject settings that stages with trees or routes do not support."""
    if pipeline.config.pairs:
        raise ScheduleError(
            f"{pipeline.name} cannot pair stages that declare trees or routes, because Megatron's "
            "schedule plans do not support them; remove --overlap-moe-expert-parallel-comm"
        )
    if pipeline.config.cuts_sequences:
        raise ScheduleError(
            "slices require a model that sends a single tensor, not trees or routes; disable "
            "slices"
        )
