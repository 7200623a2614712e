"""Runs the operations of one rank: takes inputs, computes, hands results on.

The executor knows no particular schedule and no policy. An `Order` says which operation is next;
where an input has not arrived yet it sleeps in the transport. Tensors between two stages of one
rank never leave it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from megatron_ext.errors import MegatronExtError, TransportError
from megatron_ext.schedules.comms import Operation, Tag, Transfer
from megatron_ext.transport.base import Expected, Key

if TYPE_CHECKING:
    from megatron_ext.schedules.actions import Action
    from megatron_ext.schedules.runtime.compute import StageCompute, Tensors
    from megatron_ext.schedules.runtime.measured import StepMeasure
    from megatron_ext.schedules.runtime.ordering import Order
    from megatron_ext.schedules.runtime.sync import GradientSync, ParameterSync
    from megatron_ext.schedules.runtime.tables import Table
    from megatron_ext.transport.base import Transport

__all__ = ["Executor", "Peers", "Shapes"]

Shapes = Mapping[str, Sequence[tuple[int, ...] | None]]
"""By kind (F, B): the shape of each tensor of one hand-over; None: it travels with the tensor."""


@dataclass(frozen=True)
class Peers:
    """Global ranks of those that this rank exchanges tensors with."""

    pipeline: Sequence[int]
    """By rank of the pipeline."""
    twin: int | None = None
    """The rank that holds the same stages in the mirrored pipeline."""

    def of(self, transfer: Transfer) -> int:
        """Return who is at the other end of a transfer."""
        if not transfer.to_twin:
            return self.pipeline[transfer.peer]
        assert self.twin is not None
        return self.twin


@dataclass
class Executor:
    """One step of one rank."""

    table: Table
    order: Order
    compute: StageCompute
    gradients: GradientSync
    parameters: ParameterSync
    transport: Transport
    peers: Peers
    shapes: Shapes
    dtype: torch.dtype
    """Of the tensors between stages."""
    timeout_s: float
    measure: StepMeasure
    _handed: dict[Tag, Tensors] = field(default_factory=dict, init=False)
    """Tensors between two stages of this rank."""
    _left: Counter[int] = field(init=False)
    """By stage: actions that were not run yet."""

    def run(self) -> None:
        """Run every operation of the table, in the order of `order`.

        Raises:
            TransportError: An input did not come in time; names the action that waits for it.
        """
        begin_s = time.perf_counter()
        self._left = self.table.actions_by_stage.copy()
        self.transport.begin(self._expected(), self.table.slots)
        for position in self.order:
            self._run(position, self.table.operations[position])
        self.transport.flush(self.timeout_s)
        self.measure.into.wall_s += time.perf_counter() - begin_s
        left = [*self.compute.unfinished(), *map(str, self._handed)]
        if left:
            raise MegatronExtError(f"{self.table.schedule.label} ended with {left[0]} to be done")

    def _run(self, position: int, operation: Operation) -> None:
        action = operation.action
        left = self._left[action.stage]
        is_first = left == self.table.actions_by_stage[action.stage]
        is_last = left == 1
        if is_first:
            self.parameters.before(action.stage)
        inputs = self._inputs(operation)
        begin_s = time.perf_counter()
        with self.gradients.around(action, is_last=is_last):
            outputs = self._compute(action, inputs, is_first=is_first)
        self.measure.ran(position, action, time.perf_counter() - begin_s)
        self._deliver(operation, outputs)
        self._left[action.stage] = left - 1
        if is_last:
            self.gradients.after(action.stage)

    def _expected(self) -> list[Expected]:
        return self.order.expected() + [
            Expected(self.peers.of(transfer), Key(*transfer.tag, part), shape, self.dtype)
            for transfer in self.table.arrivals
            for part, shape in enumerate(self.shapes[transfer.tag.kind])
        ]

    def _inputs(self, operation: Operation) -> Tensors:
        stage, kind, microbatch = operation.action
        if kind == "W":
            return []
        direction: Literal["F", "B"] = "F" if kind == "F" else "B"
        if operation.needs is not None:
            return self._receive(operation, operation.needs)
        handed = self._handed.pop(Tag(direction, stage, microbatch), None)
        if handed is not None:
            return handed
        # The first stage has data and no input, the last stage a loss and no gradient.
        return [None] * (len(self.shapes["F"]) if kind == "F" else 1)

    def _receive(self, operation: Operation, needs: Transfer) -> Tensors:
        source = self.peers.of(needs)
        tensors: Tensors = []
        for part in range(len(self.shapes[needs.tag.kind])):
            try:
                tensor = self.transport.recv(source, Key(*needs.tag, part), self.timeout_s)
            except TransportError as error:
                raise type(error)(
                    f"rank {dist.get_rank()} (pipeline rank {self.table.rank}) cannot run "
                    f"{operation.action}, action {self.table.operations.index(operation)} of its "
                    f"{len(self.table.operations)} in {self.table.schedule.label}: {error}"
                ) from error
            tensors.append(tensor.requires_grad_() if needs.tag.kind == "F" else tensor)
        return tensors

    def _compute(self, action: Action, inputs: Tensors, *, is_first: bool) -> Tensors:
        stage, kind, microbatch = action
        if kind == "F":
            return self.compute.forward(stage, microbatch, inputs, is_first=is_first)
        if kind == "W":
            self.compute.weights(stage, microbatch)
            return []
        return self.compute.backward(stage, microbatch, inputs, split=kind == "I")

    def _deliver(self, operation: Operation, tensors: Tensors) -> None:
        makes = operation.makes
        if makes is None:
            return
        if makes.verb == "LOCAL":
            # A leaf of its own, so that its gradient is what the stage before gets back.
            leaf = makes.tag.kind == "F"
            self._handed[makes.tag] = [
                t.detach().requires_grad_() if leaf and t is not None else t for t in tensors
            ]
            self.order.handed(makes.tag)
        else:
            target = self.peers.of(makes)
            for part, tensor in enumerate(tensors):
                assert tensor is not None
                self.transport.isend(tensor, target, Key(*makes.tag, part))
        if operation.action.kind == "F":
            self.compute.release(tensors)
