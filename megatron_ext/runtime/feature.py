"""What a feature adds to the steps of a model: the seam between the runtime and `features/`.

A runtime makes one `Feature` of each kind at its first step and calls the methods below. Those of
this class add nothing; a feature overrides the ones that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.feature_list import STEPS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.compute import Call, StageCompute
    from megatron_ext.runtime.program import Peers, PipelineEnds, Shapes, Table
    from megatron_ext.runtime.split import SplitBackward
    from megatron_ext.schedules.table.actions import Bypass
    from megatron_ext.schedules.table.placement import Placement


@dataclass(frozen=True)
class Model:
    """A model at its first step, under a pipeline."""

    pipeline: Pipeline
    groups: ProcessGroupCollection
    chunks: Sequence[torch.nn.Module]
    """The stages of this rank."""
    config: Any
    """A `TransformerConfig`."""
    shapes: Shapes
    """Of what stages exchange."""
    seq_length: int
    """Tokens of a sequence."""


@dataclass(frozen=True)
class Step:
    """One step of a model, before its first action."""

    table: Table
    call: Call
    shapes: Shapes
    """Of what stages exchange."""
    peers: Peers
    splits: SplitBackward
    """Weight gradients between I and W."""


class DataOrder(Protocol):
    """The order in which one training step runs the micro-batches of its data."""

    def iterator(self, items: Any) -> Iterator[Any] | None:
        """Return an iterator over a chunk's micro-batches in this order; None without data."""

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Return reports by micro-batch of the table as reports by micro-batch of the file."""


class Feature:
    """A feature in the steps of one model. All ranks call its methods in the same order.

    Making it is collective over all ranks of the job.
    """

    bypasses: tuple[Bypass, ...] = ()
    """Messages past stages that the model sends."""

    def __init__(self, model: Model) -> None:
        pass

    @staticmethod
    def refuse_roles(
        chunks: Sequence[torch.nn.Module], placement: Placement, group: dist.ProcessGroup
    ) -> None:
        """Refuse a model that disaggregated ranks cannot run. Collective over a pipeline's group.

        Raises:
            ScheduleError: The model needs this feature, which such jobs do not have.
        """

    @staticmethod
    def refuse_model(
        pipeline: Pipeline, chunks: Sequence[torch.nn.Module], forward_step: Callable[..., Any]
    ) -> None:
        """Refuse a model before its first step, or the caller's forward step.

        Raises:
            ScheduleError: They lack what this feature needs.
        """

    @staticmethod
    def pipeline_of(
        pipeline: Pipeline,
        config: Any,  # noqa: ARG004 - for those that override it
        seq_length: int,  # noqa: ARG004
    ) -> Pipeline:
        """Return the pipeline for the shape of a model: its `TransformerConfig`, and tokens."""
        return pipeline

    def shapes_on_wires(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the tensors that the transport carries, by kind."""
        return shapes

    def admit(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Let another model on the same process groups run, or other wrappers of the same one.

        Raises:
            ScheduleError: It needs something else than the first model.
        """

    def compute(self, step: Step) -> tuple[StageCompute, PipelineEnds] | None:
        """Return what computes the actions of a step, and the ends of its messages.

        None: this feature has no part in the step.
        """
        return None

    def data_order(self, table: Table, config: Any) -> DataOrder | None:
        """Return the order in which a training step runs its data; None: that of the file."""
        return None

    def step_failed(self) -> None:
        """Drop what the failed step has left."""


def features() -> list[type[Feature]]:
    """Return what all features add to steps, in the order in which they are asked."""
    classes: list[type[Feature]] = []
    for entry in STEPS:
        module, _, name = entry.partition(":")
        classes.append(getattr(import_module(module), name))
    return classes
