"""The interface through which `features/` extends a model's training steps.

A runtime creates one instance of each `Feature` class at its first step and calls the methods
below. The base class does nothing; a feature overrides the methods that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.feature_list import STEPS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.compute import Call, StageCompute
    from megatron_ext.runtime.data_order import DataOrder, ReadAhead
    from megatron_ext.runtime.program import Peers, PipelineEnds, Shapes, Table
    from megatron_ext.runtime.split import SplitBackward
    from megatron_ext.schedules.table.actions import Bypass
    from megatron_ext.schedules.table.placement import Placement


@dataclass(frozen=True)
class Model:
    """A model and its pipeline at the first step."""

    pipeline: Pipeline
    groups: ProcessGroupCollection
    chunks: Sequence[torch.nn.Module]
    """This rank's stages."""
    config: Any
    """A `TransformerConfig`."""
    shapes: Shapes
    """Shapes of the tensors that stages exchange."""
    seq_length: int
    """Tokens in a sequence."""


@dataclass(frozen=True)
class Step:
    """One training or evaluation step, before its first action."""

    table: Table
    call: Call
    shapes: Shapes
    """Shapes of the tensors that stages exchange."""
    peers: Peers
    splits: SplitBackward
    """Keeps weight gradients between I and W."""


class Feature:
    """Extends one model's steps. All ranks call the methods in the same order.

    The constructor is collective over all ranks in the job.
    """

    bypasses: tuple[Bypass, ...] = ()
    """Messages that bypass stages."""

    def __init__(self, model: Model) -> None:
        pass

    @staticmethod
    def refuse_roles(
        chunks: Sequence[torch.nn.Module],
        placement: Placement,
        group: dist.ProcessGroup,
    ) -> None:
        """Reject a model that disaggregated ranks cannot run. Collective over a pipeline's group.

        Raises:
            ScheduleError: The model needs this feature, which disaggregated jobs do not support.
        """

    @staticmethod
    def refuse_model(
        pipeline: Pipeline,
        chunks: Sequence[torch.nn.Module],
        forward_step: Callable[..., Any],
    ) -> None:
        """Reject a model, or the caller's forward step, before the first step.

        Raises:
            ScheduleError: The model or the forward step lacks something that this feature needs.
        """

    @staticmethod
    def pipeline_of(
        pipeline: Pipeline,
        config: Any,  # noqa: ARG004 - for overriding methods
        seq_length: int,  # noqa: ARG004
    ) -> Pipeline:
        """Return the pipeline, adapted to a model's `TransformerConfig` and sequence length."""
        return pipeline

    def shapes_on_wires(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the tensors that the transport carries, by message kind."""
        return shapes

    def admit(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Accept another model on the same process groups, or new wrappers around the same model.

        Raises:
            ScheduleError: The model's requirements differ from the first model's.
        """

    def compute(self, step: Step) -> tuple[StageCompute, PipelineEnds] | None:
        """Return the object that computes a step's actions and the `Ends` of its messages.

        None if this feature does not apply to the step.
        """
        return None

    def read_ahead(
        self,
        iterators: Sequence[Any],
        num_microbatches: int,
    ) -> ReadAhead | None:
        """Read the data for a training step whose table depends on it. Collective over the job.

        `iterators` has one entry per chunk. Return None if the table depends only on the number of
        micro-batches.
        """
        return None

    def data_order(self, table: Table, config: Any) -> DataOrder | None:
        """Return the order in which a training step runs its data; None keeps the data's order."""
        return None

    def step_failed(self) -> None:
        """Drop the state that a failed step left behind."""


def features() -> list[type[Feature]]:
    """Return the `Feature` classes, in the order in which their methods are called."""
    classes: list[type[Feature]] = []
    for entry in STEPS:
        module, _, name = entry.partition(":")
        classes.append(getattr(import_module(module), name))
    return classes
