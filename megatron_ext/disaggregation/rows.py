"""Runs the row of the table that one process has, once.

A forward rank runs its F without a graph, and sends what they make to both roles. A backward rank
runs R, which gives it the graph of one micro-batch, and then B, so it keeps no more than that.

A forward rank may be `Job.window` micro-batches ahead of the backward rank of its stage, which
grants credit for one more whenever it begins one. That bounds whatever waits on any process:
backwards of neighbouring stages are one micro-batch apart, and nobody overtakes the forwards. Nor
can it lock: the credit for a micro-batch needs nothing but earlier ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config import randomness
from megatron_ext.disaggregation.ship import Layers, Replay, Saved, replaying
from megatron_ext.errors import MegatronExtError
from megatron_ext.messages import Message
from megatron_ext.schedules.runtime.compute import Call, StageCompute
from megatron_ext.schedules.runtime.local_devices import device_of
from megatron_ext.schedules.runtime.rng import microbatch_rng
from megatron_ext.schedules.runtime.sync import GradientSync, ParameterSync
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.disaggregation.link import RoleLink
    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.representation.messages import Operation, Transfer
    from megatron_ext.schedules.runtime.compute import Tensors
    from megatron_ext.schedules.runtime.tables import Table

__all__ = ["BackwardRow", "ForwardRow", "Row"]

_GENERATORS = 1
"""Part of a shipped message with the states of random generators; part 0 are the tensors."""


class Row(ABC):
    """One step of one process.

    Args:
        job: What the process is part of.
        link: To its neighbours.
        table: Both roles of this replica, validated, and which row is meant.
        call: What Megatron handed over.
        shape: Of what goes from stage to stage here.
        layers: Of this stage, if their inputs are shipped.
        force_all_reduce: Whether gradients are reduced as a whole, whatever the optimizer needs.
    """

    def __init__(
        self,
        job: Job,
        link: RoleLink,
        table: Table,
        call: Call,
        shape: tuple[int, ...],
        layers: Layers | None,
        *,
        force_all_reduce: bool,
    ) -> None:
        self._job = job
        self._twins = [job.ranks.rank(twin) for twin in job.ranks.twins(job.place)]
        self._link, self._table, self._call = link, table, call
        self._stage, self._shape, self._layers = job.place.pp, shape, layers
        self._is_last_stage = self._stage == job.ranks.pp - 1
        self._force_all_reduce = force_all_reduce
        self._compute = StageCompute(call, table)

    def run(self) -> StageCompute:
        """Run it, and wait until everything sent has left.

        Raises:
            TransportError: A tensor did not come in time, or the process that has it is gone.
        """
        self._link.begin(self._expected(), min(self._table.slots, self._job.window // 2 + 1))
        self._run_all()
        self._link.flush()
        left = self._compute.unfinished()
        if left:
            raise MegatronExtError(f"{self._table.schedule.label} ended with {left[0]} to be done")
        return self._compute

    @abstractmethod
    def _run_all(self) -> None:
        """Run all operations."""

    def _expected(self) -> list[Expected]:
        needed = (operation.needs for operation in self._table.operations)
        return [e for needs in needed if needs is not None for e in self._parts(needs)]

    def _parts(self, needs: Transfer) -> list[Expected]:
        dtype = self._call.config.pipeline_dtype
        return [Expected(self._link.source(needs.peer), needs.message, self._shape, dtype)]

    def _receive(self, needs: Transfer | None, part: int = 0) -> torch.Tensor | None:
        return (
            None
            if needs is None
            else self._link.recv(needs.peer, needs.message._replace(part=part))
        )


class ForwardRow(Row):
    """The row of a forward rank."""

    def _expected(self) -> list[Expected]:
        later = [op.action.microbatch for op in self._table.operations][self._job.window :]
        expected = [
            Expected(twin, _credit(self._stage, microbatch), None, torch.uint8)
            for microbatch in later
            for twin in self._twins
        ]
        return super()._expected() + expected

    def _wait_for_credit(self, microbatch: int) -> None:
        if microbatch >= self._job.window:
            for twin in self._twins:
                self._link.recv_from(twin, _credit(self._stage, microbatch))

    def _run_all(self) -> None:
        for operation in self._table.operations:
            self._wait_for_credit(operation.action.microbatch)
            given = self._receive(operation.needs)
            with self._saving() as saved, torch.no_grad(), _drawn(operation.action):
                [made] = self._forward(operation.action, [given])
            if operation.makes is not None:
                self._link.send(made, operation.makes.peer, operation.makes.message)
            if operation.copies is not None and self._layers is None:
                self._link.send(made, operation.copies.peer, operation.copies.message)
            elif operation.copies is not None:
                self._ship(operation.copies, given, saved)

    def _saving(self) -> AbstractContextManager[Saved]:
        if self._layers is None:
            return nullcontext(Saved(with_generators=False))
        return self._layers.saving(with_generators=randomness.enabled())

    def _forward(self, action: Action, inputs: Tensors) -> list[Any]:
        first = action.microbatch == 0
        return self._compute.forward(action.stage, action.microbatch, inputs, is_first=first)

    def _ship(self, copies: Transfer, given: torch.Tensor | None, saved: Saved) -> None:
        """Send the input of the stage and what its layers made of it, as far as it is needed."""
        tensors = [given] if given is not None else []
        tensors += saved.outputs if self._is_last_stage else saved.outputs[:-1]
        if tensors:
            packed = torch.stack(tensors)
        else:
            dtype, device = self._call.config.pipeline_dtype, device_of(self._call.chunks)
            packed = torch.empty(0, *self._shape, dtype=dtype, device=device)
        self._link.send(packed, copies.peer, copies.message, sequence_dim=1)
        if saved.generators:
            states = torch.stack(saved.generators)
            self._link.send(
                states, copies.peer, copies.message._replace(part=_GENERATORS), sequence_dim=None
            )


class BackwardRow(Row):
    """The row of a backward rank."""

    def _run_all(self) -> None:
        call, operations = self._call, self._table.operations
        gradients = GradientSync(
            call.config, call.chunks, self._table, force_all_reduce=self._force_all_reduce
        )
        parameters = ParameterSync(call.config, call.chunks, self._table)
        with gradients:
            parameters.before(self._stage)
            for number, operation in enumerate(operations, start=1):
                with gradients.around(operation.action, is_last=number == len(operations)):
                    self._run(operation)
            gradients.after(self._stage)

    def _run(self, operation: Operation) -> None:
        if operation.action.kind == "B":
            self._backward(operation)
        elif self._layers is None:
            given = self._receive(operation.needs)
            self._grant_credit(operation.action.microbatch)
            self._forward_again(operation.action, given)
        else:
            self._grant_credit(operation.action.microbatch)
            self._replay(operation)

    def _grant_credit(self, microbatch: int) -> None:
        """Let the forward rank of this stage begin a micro-batch, if it has any to compute."""
        later = microbatch + self._job.window
        works = self._layers is not None or not self._is_last_stage
        if works and later < self._call.num_microbatches:
            [twin] = self._twins
            self._link.wire.isend(
                torch.empty(0, dtype=torch.uint8), twin, _credit(self._stage, later)
            )

    def _backward(self, operation: Operation) -> None:
        stage, _, microbatch = operation.action
        gradient = self._receive(operation.needs)
        [made] = self._compute.backward(stage, microbatch, [gradient], split=False)
        if operation.makes is not None:
            assert made is not None
            self._link.send(made, operation.makes.peer, operation.makes.message)

    def _forward_again(self, action: Action, given: torch.Tensor | None) -> None:
        if given is not None:
            given.requires_grad_()
        first = action.microbatch == 0
        outputs = self._compute.forward(action.stage, action.microbatch, [given], is_first=first)
        if not self._is_last_stage:  # as if it had been sent: the graph is what matters
            self._compute.release(outputs)

    def _replay(self, operation: Operation) -> None:
        """Make the graph of a forward from what was shipped."""
        packed = self._receive(operation.needs)
        assert packed is not None
        states = None
        if self._ships_generators():
            states = self._receive(operation.needs, _GENERATORS)
        given = packed[0].clone() if self._stage else None
        outputs = packed[1:] if self._stage else packed
        replay = Replay(outputs.unbind(), states)
        with replaying(replay):
            self._forward_again(operation.action, given)
        assert self._layers is not None
        if replay.num_replayed != len(self._layers):
            raise MegatronExtError(
                f"{operation.action} computed layers whose outputs were shipped: only "
                f"{replay.num_replayed} of {len(self._layers)} were taken over"
            )

    def _parts(self, needs: Transfer) -> list[Expected]:
        if self._layers is None or needs.message.kind == "B":
            return super()._parts(needs)
        source, dtype = self._link.source(needs.peer), self._call.config.pipeline_dtype
        count = bool(self._stage) + max(0, len(self._layers) - (not self._is_last_stage))
        parts = [Expected(source, needs.message, (count, *self._shape), dtype)]
        if self._ships_generators():
            parts.append(
                Expected(source, needs.message._replace(part=_GENERATORS), None, torch.uint8)
            )
        return parts

    def _ships_generators(self) -> bool:
        """Whether their states before each layer come; a layout may leave a stage without any."""
        return randomness.enabled() and bool(self._layers)


def _credit(stage: int, microbatch: int) -> Message:
    return Message("C", stage, microbatch)


def _drawn(action: Action) -> AbstractContextManager[None]:
    """Draw the random numbers of a forward in training, though it has no graph."""
    if not randomness.enabled():
        return nullcontext()
    return microbatch_rng(randomness.iteration(), action.stage, action.microbatch)
