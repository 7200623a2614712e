"""Computes the actions of a disaggregated table: F on forward ranks, R and B on backward ranks.

A forward rank runs its F without a graph and sends what it makes to both roles. A backward rank
runs R, which gives it the graph of one micro-batch, and then B, so it keeps no more than that.

A forward rank may be `Job.window` micro-batches ahead of the backward rank of its stage, which
grants credit for one more with each that it begins. That bounds whatever waits on any process:
backwards of neighbouring stages are one micro-batch apart, and nobody overtakes the forwards. Nor
can it lock: the credit for a micro-batch needs nothing but earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_ext.config import randomness
from megatron_ext.disaggregation.ship import Layers, Replay, Saved, replaying
from megatron_ext.errors import MegatronExtError
from megatron_ext.schedules.representation.communication import runs_forward
from megatron_ext.schedules.runtime.program import Form
from megatron_ext.schedules.runtime.rng import microbatch_rng

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.messages import MessageKind
    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.representation.communication import Transfer
    from megatron_ext.schedules.runtime.compute import StageCompute, Tensors
    from megatron_ext.schedules.runtime.split import Progress

__all__ = ["BackwardCompute", "ForwardCompute", "RoleEnds"]


@dataclass(frozen=True)
class RoleEnds:
    """Who is at the other end of the transfers of a role, and what goes there."""

    job: Job
    shape: tuple[int, ...]
    """Of what goes from stage to stage here: `[s, b, h]`."""
    dtype: torch.dtype
    num_layers: int | None
    """Transformer layers of this stage, where what they make is shipped; None: it is not."""

    leads: bool = True

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return global ranks: a merged forward rank faces all tensor-parallel backward ranks."""
        return self.job.peers(transfer.peer)

    def forms(self, kind: MessageKind) -> Sequence[Form]:
        """Return what arrives: shipped activations are `[layers, s, b, h]`, then the generators."""
        if kind == "C":
            return [Form(None, torch.uint8)]
        if self.num_layers is None or kind == "B" or self.job.role == "forward":
            return [Form(self.shape, self.dtype)]
        place, num_stages = self.job.place, self.job.ranks.pp
        made = max(0, self.num_layers - (place.pp < num_stages - 1))
        shipped = Form(((place.pp > 0) + made, *self.shape), self.dtype)
        return [shipped, Form(None, torch.uint8)] if self._ships_generators() else [shipped]

    def num_sent(self, transfer: Transfer) -> int:
        """Return 1, or 2 where the states of random generators travel beside activations."""
        ships = self.num_layers is not None and transfer.message.kind == "F"
        to_backward = transfer.peer >= self.job.ranks.pp
        return 2 if ships and to_backward and self._ships_generators() else 1

    def _ships_generators(self) -> bool:
        """Whether their states before each layer come; a layout may leave a stage without any."""
        return randomness.enabled() and bool(self.num_layers)


class ForwardCompute:
    """Computes F of a forward rank.

    Args:
        job: What the process is part of.
        compute: Of its stage.
        layers: Of the stage, if their inputs are shipped.
    """

    def __init__(self, job: Job, compute: StageCompute, layers: Layers | None) -> None:
        self._job, self._compute, self._layers = job, compute, layers
        schedule, stage = compute.table.schedule, job.place.pp
        self._is_last_stage = stage == schedule.num_stages - 1
        self._feeds_forward = not self._is_last_stage and runs_forward(schedule, stage + 1)

    def run(
        self, action: Action, inputs: Tensors, *, is_first: bool, progress: Progress | None
    ) -> Tensors:
        """Run F; return its output for the next forward rank and what backward ranks get."""
        stage, _, microbatch = action
        with self._saving() as saved, torch.no_grad(), _drawn(action):
            [made] = self._compute.forward(stage, microbatch, inputs or [None], is_first=is_first)
        results: Tensors = [made] if self._feeds_forward else []
        if self._layers is not None:
            return results + self._shipped(inputs, made, saved)
        assert made is not None
        return results if self._is_last_stage else results + self._shares(made, 0)

    def saved_tensors(self, stage: int, microbatch: int) -> None:
        """Return nothing: forwards keep no graph."""

    def release(self, outputs: Tensors) -> None:
        """Do nothing: nobody keeps outputs but the transport."""

    def unfinished(self) -> list[str]:
        """Return nothing."""
        return self._compute.unfinished()

    def _saving(self) -> AbstractContextManager[Saved]:
        if self._layers is None:
            return nullcontext(Saved(with_generators=False))
        return self._layers.saving(with_generators=randomness.enabled())

    def _shipped(self, inputs: Tensors, made: torch.Tensor | None, saved: Saved) -> Tensors:
        """Return the input of the stage and what its layers made of it, as far as it is needed.

        A first stage without layers has neither: what it sends is empty.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        tensors += saved.outputs if self._is_last_stage else saved.outputs[:-1]
        if tensors:
            packed = torch.stack(tensors)
        else:
            assert made is not None
            packed = made.new_empty(0, *made.shape)
        states = [torch.stack(saved.generators)] if saved.generators else []
        return self._shares(packed, 1) + [s for s in states for _ in range(self._num_shards)]

    @property
    def _num_shards(self) -> int:
        """Tensor-parallel backward ranks that this rank stands in for."""
        return self._job.ranks.tp if self._job.ranks.merged else 1

    def _shares(self, tensor: torch.Tensor, sequence_dim: int) -> Tensors:
        """Return what each tensor-parallel backward rank needs of a tensor."""
        if self._num_shards > 1 and self._job.sequence_parallel:
            return [*tensor.chunk(self._num_shards, sequence_dim)]
        return [tensor] * self._num_shards


class BackwardCompute:
    """Computes R and B of a backward rank.

    Args:
        compute: Of its stage.
        layers: Of the stage, if their inputs are shipped.
    """

    def __init__(self, compute: StageCompute, layers: Layers | None) -> None:
        self._compute, self._layers = compute, layers
        self._last_stage = compute.table.schedule.num_stages - 1
        self.saved_tensors = compute.saved_tensors

    def run(
        self, action: Action, inputs: Tensors, *, is_first: bool, progress: Progress | None
    ) -> Tensors:
        """Run B as any rank does; run R as a forward of what arrived."""
        if action.kind != "R":
            return self._compute.run(action, inputs, is_first=is_first, progress=progress)
        if self._layers is None:
            self._forward(action, inputs, is_first=is_first)
        else:
            self._replay(action, inputs, len(self._layers), is_first=is_first)
        return []

    def release(self, outputs: Tensors) -> None:
        """Do nothing: R has released its outputs."""

    def unfinished(self) -> list[str]:
        """Return backwards that did not run."""
        return self._compute.unfinished()

    def _forward(self, action: Action, inputs: Tensors, *, is_first: bool) -> None:
        forward = action._replace(kind="F")
        outputs = self._compute.run(forward, inputs, is_first=is_first, progress=None)
        if action.stage < self._last_stage:  # as if they had been sent: the graph is what matters
            self._compute.release(outputs)

    def _replay(self, action: Action, inputs: Tensors, num_layers: int, *, is_first: bool) -> None:
        """Make the graph of a forward from what was shipped: `[layers, s, b, h]`."""
        packed, *states = inputs
        assert packed is not None
        given: Tensors = [packed[0].clone()] if action.stage else []
        outputs = packed[1:] if action.stage else packed
        replay = Replay(outputs.unbind(), states[0] if states else None)
        with replaying(replay):
            self._forward(action, given, is_first=is_first)
        if replay.num_replayed != num_layers:
            raise MegatronExtError(
                f"{action} computed layers whose outputs were shipped: only "
                f"{replay.num_replayed} of {num_layers} were taken over"
            )


def _drawn(action: Action) -> AbstractContextManager[None]:
    """Draw the random numbers of a forward in training, though it has no graph."""
    if not randomness.enabled():
        return nullcontext()
    return microbatch_rng(randomness.iteration(), action.stage, action.microbatch)
