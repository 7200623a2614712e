"""Runs the operations of one rank: takes inputs, computes, hands results on.

The executor knows no particular schedule and no policy. An `Order` says which operation is next;
where an input has not arrived yet it sleeps in the transport. Tensors between two stages of one
rank never leave it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_ext.errors import MegatronExtError, TransportError

if TYPE_CHECKING:
    from megatron_ext.messages import Message
    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.runtime.compute import StageCompute, Tensors
    from megatron_ext.schedules.runtime.measured import StepMeasure
    from megatron_ext.schedules.runtime.ordering import Order
    from megatron_ext.schedules.runtime.program import Program, Work
    from megatron_ext.schedules.runtime.sync import GradientSync, ParameterSync
    from megatron_ext.schedules.runtime.tables import Table
    from megatron_ext.transport.base import Transport

__all__ = ["Executor"]


@dataclass
class Executor:
    """One step of one rank.

    What others wait for comes first: results leave as soon as they exist, and all that can be done
    afterwards, such as counting, is.
    """

    table: Table
    program: Program
    """Of this table."""
    order: Order
    compute: StageCompute
    gradients: GradientSync
    parameters: ParameterSync
    transport: Transport
    timeout_s: float
    measure: StepMeasure
    _handed: dict[Message, Tensors] = field(default_factory=dict, init=False)
    """Tensors between two stages of this rank."""
    _left: dict[int, int] = field(init=False)
    """By stage: actions that were not run yet."""
    _ran: list[tuple[int, Action, float]] = field(default_factory=list, init=False)
    """Position, action and seconds of what was run."""

    def run(self) -> None:
        """Run every operation of the table, in the order of `order`.

        Raises:
            TransportError: An input did not come in time; names the action that waits for it.
        """
        begin_s = time.perf_counter()
        self._left = dict(self.table.actions_by_stage)
        self.transport.begin([*self.order.expected(), *self.program.expected], self.table.slots)
        works = self.program.works
        for position in self.order:
            self._run(position, works[position])
        self.transport.flush(self.timeout_s)
        self.measure.into.wall_s += time.perf_counter() - begin_s
        for ran in self._ran:
            self.measure.ran(*ran)
        left = [*self.compute.unfinished(), *map(str, self._handed)]
        if left:
            raise MegatronExtError(f"{self.table.schedule.label} ended with {left[0]} to be done")

    def _run(self, position: int, work: Work) -> None:
        action = work.action
        stage = action.stage
        left = self._left[stage]
        is_first, is_last = left == self.table.actions_by_stage[stage], left == 1
        if is_first:
            self.parameters.before(stage)
        inputs = self._inputs(work)
        spent = self.compute.kept(stage, action.microbatch)
        begin_s = time.perf_counter()
        with self.gradients.around(action, is_last=is_last):
            outputs = self._compute(action, inputs, is_first=is_first, is_last=is_last)
        end_s = time.perf_counter()
        self._deliver(work, outputs)
        del spent  # not before: to free the graph of a backward takes about as long as to send
        self._left[stage] = left - 1
        self._ran.append((position, action, end_s - begin_s))
        if is_last:
            self.gradients.after(stage)

    def _inputs(self, work: Work) -> Tensors:
        if work.source is not None:
            return self._receive(work, work.source)
        if work.handed is None:
            return []
        return self._handed.pop(work.handed, None) or [None] * work.num_inputs

    def _receive(self, work: Work, source: int) -> Tensors:
        try:
            tensors = [self.transport.recv(source, key, self.timeout_s) for key in work.arriving]
        except TransportError as error:
            raise type(error)(
                f"rank {dist.get_rank()} (pipeline rank {self.table.rank}) cannot run "
                f"{work.action}, action {self.program.works.index(work)} of its "
                f"{len(self.program.works)} in {self.table.schedule.label}: {error}"
            ) from error
        if work.action.kind == "F":
            return [tensor.requires_grad_() for tensor in tensors]
        return [*tensors]

    def _compute(
        self, action: Action, inputs: Tensors, *, is_first: bool, is_last: bool
    ) -> Tensors:
        stage, kind, microbatch = action
        if kind == "F":
            return self.compute.forward(stage, microbatch, inputs, is_first=is_first)
        if kind == "W":
            progress = self.gradients.progress(stage) if is_last else None
            self.compute.weights(stage, microbatch, progress)
            return []
        return self.compute.backward(stage, microbatch, inputs, split=kind == "I")

    def _deliver(self, work: Work, tensors: Tensors) -> None:
        if work.target is not None:
            for tensor, key in zip(tensors, work.leaving, strict=True):
                assert tensor is not None
                self.transport.isend(tensor, work.target, key)
        elif work.left is not None:
            # A leaf of its own, so that its gradient is what the stage before gets back.
            leaf = work.left.kind == "F"
            self._handed[work.left] = [
                t.detach().requires_grad_() if leaf and t is not None else t for t in tensors
            ]
            self.order.handed(work.left)
        else:
            return
        if work.action.kind == "F":
            self.compute.release(tensors)
