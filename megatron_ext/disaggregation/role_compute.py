"""Computes the actions of a disaggregated table: F on forward ranks, R and B on backward ranks.

A forward rank runs its F without a graph and sends its outputs to both roles. A backward rank runs
R, which builds the graph of one micro-batch, and then B, so it keeps the graph of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_ext.config import active
from megatron_ext.disaggregation.ship import Replay, Saved, saving
from megatron_ext.disaggregation.worlds import roles_in_force
from megatron_ext.errors import MegatronExtError
from megatron_ext.runtime.compute import StageCompute, microbatch_rng
from megatron_ext.runtime.program import Form

if TYPE_CHECKING:
    from megatron_ext.config.roles import Job
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.schedules.table.communication import Transfer


@dataclass(frozen=True)
class RoleEnds:
    """The peers of a role's transfers, and the shapes of the messages."""

    job: Job
    shape: tuple[int, ...] | None
    """Shape of activations and gradients between stages, `[s, b, h]`; None: it travels."""
    dtype: torch.dtype
    num_layers: int | None
    """Transformer layers of this stage if their outputs are shipped, else None."""

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return global ranks; a merged forward rank has all tensor-parallel ranks as peers."""
        return self.job.peers(transfer.peer)

    def forms(self, transfer: Transfer) -> Sequence[Form]:
        """Return the forms of what a transfer moves: an activation or gradient `[s, b, h]`.

        Shipped activations are `[layers, s, b, h]`, followed by generator states if there are any.
        """
        place, num_stages = self.job.place, self.job.ranks.pp
        kind, receives = transfer.message.kind, transfer.verb == "RECV"
        if kind == "C":
            return [Form(None, torch.uint8)]
        to_backward = self.job.role == "backward" if receives else transfer.peer >= num_stages
        if self.num_layers is None or kind == "B" or not to_backward:
            return [Form(self.shape, self.dtype)]
        # What the last layer makes is the next stage's input; only the loss needs it on its own
        # stage.
        made = max(0, self.num_layers - (place.pp < num_stages - 1))
        shape = None if self.shape is None else ((place.pp > 0) + made, *self.shape)
        shipped = Form(shape, self.dtype)
        if active.draws_by_microbatch() and self.num_layers:  # a stage may have none
            return [shipped, Form(None, torch.uint8, 1)]
        return [shipped]


@dataclass(kw_only=True)
class ForwardCompute(StageCompute):
    """Computes F of a forward rank."""

    job: Job
    layers: Sequence[torch.nn.Module] | None
    """The layers of the stage if their outputs are shipped, else None."""

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run F; return the tensors for the next forward rank, then those for backward ranks."""
        stage, _, microbatch, _ = action
        schedule, draws = self.table.schedule, active.draws_by_microbatch()
        is_last = stage == schedule.num_stages - 1
        keeping = saving(self.layers or (), with_generators=draws)
        # Without a graph, which R builds on the backward rank: so the forward itself does not draw
        # the numbers of its micro-batch.
        drawing = microbatch_rng(active.iteration(), stage, microbatch) if draws else nullcontext()
        roles = roles_in_force()
        roles.sorts_experts = not self.job.recomputes_routers
        try:
            with keeping as saved, torch.no_grad(), drawing:
                [made] = self.forward(stage, microbatch, inputs or [None])
        finally:
            roles.sorts_experts = False
        feeds_forward = not is_last and schedule.runs_forward(stage + 1)
        results: Tensors = [made] if feeds_forward else []
        if self.layers is not None:
            return results + self._shipped(inputs, made, saved, is_last=is_last)
        assert made is not None
        return results if is_last else results + self._shares(made, 0)

    def release(self, outputs: Tensors) -> None:
        """Do nothing: only the transport keeps outputs."""

    def _shipped(
        self, inputs: Tensors, made: torch.Tensor | None, saved: Saved, *, is_last: bool
    ) -> Tensors:
        """Return the stage's input and its layers' outputs, as far as backward ranks need them.

        A first stage without layers has neither and sends an empty tensor.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        tensors += saved.outputs if is_last else saved.outputs[:-1]
        if tensors:
            packed = torch.stack(tensors)
        else:
            assert made is not None
            packed = made.new_empty(0, *made.shape)
        states = [torch.stack(saved.generators)] if saved.generators else []
        return self._shares(packed, 1) + [s for s in states for _ in range(self._num_shards)]

    @property
    def _num_shards(self) -> int:
        """Tensor-parallel backward ranks that this rank serves."""
        return self.job.ranks.tp if self.job.ranks.merged else 1

    def _shares(self, tensor: torch.Tensor, sequence_dim: int) -> Tensors:
        """Return the part of a tensor for each tensor-parallel backward rank."""
        if self._num_shards > 1 and self.job.sequence_parallel:
            return [*tensor.chunk(self._num_shards, sequence_dim)]
        return [tensor] * self._num_shards


@dataclass(kw_only=True)
class BackwardCompute(StageCompute):
    """Computes R and B of a backward rank."""

    layers: Sequence[torch.nn.Module] | None
    """The layers of the stage if their outputs are shipped, else None."""

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run B, or R, from shipped activations `[layers, s, b, h]` if there are any."""
        if action.kind != "R" or self.layers is None:
            return super().run(action, inputs)
        packed, *states = inputs
        assert packed is not None
        given: Tensors = [packed[0].clone()] if action.stage else []
        outputs = packed[1:] if action.stage else packed
        replay = Replay(outputs.unbind(), states[0] if states else None)
        roles = roles_in_force()
        roles.replay = replay  # for Megatron's checkpoint, see `patches/disaggregation.py`
        try:
            super().run(action, given)
        finally:
            roles.replay = None
        if replay.num_replayed != len(self.layers):
            raise MegatronExtError(
                f"{action} recomputed layers although their outputs were shipped: it reused only "
                f"{replay.num_replayed} of {len(self.layers)}; use --fbd-activations recompute"
            )
        return []
