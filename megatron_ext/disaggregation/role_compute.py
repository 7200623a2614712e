"""Computes the actions in a disaggregated table: F on forward ranks, R and B on backward ranks.

A forward rank runs F without a graph and sends its outputs to both roles. A backward rank runs R,
which builds the graph for one micro-batch, and then B, so the rank holds only one micro-batch's
graph at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """Resolves peers and message shapes for a role's transfers."""

    job: Job
    shape: tuple[int, ...] | None
    """Shape `[s, b, h]` of activations and gradients between stages. None if each message carries
    its own shape."""
    dtype: torch.dtype
    num_layers: int | None
    """Number of transformer layers in this stage if it ships their outputs, otherwise None."""

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return the global ranks of a transfer's peers.

        A merged forward rank exchanges tensors with all tensor-parallel ranks in a stage.
        """
        return self.job.peers(transfer.peer)

    def forms(self, transfer: Transfer) -> Sequence[Form]:
        """Return the shapes and dtypes of a transfer's tensors.

        Activations and gradients are `[s, b, h]`. Shipped activations are `[layers, s, b, h]`,
        followed by generator states if needed.
        """
        kind = transfer.message.kind
        # C is a credit, which allows a forward rank to start another micro-batch.
        if kind == "C":
            return [Form(None, torch.uint8)]
        # Only backward ranks receive shipped layer outputs. Adjacent stages in the same
        # role exchange a single activation or gradient.
        is_between_stages = kind == "B" or not self._goes_to_backward_rank(transfer)
        if self.num_layers is None or is_between_stages:
            return [Form(self.shape, self.dtype)]
        shipped_shape = self._shipped_shape(self.num_layers)
        shipped = Form(shipped_shape, self.dtype)
        # A stage without layers ships no generator states.
        if active.draws_by_microbatch() and self.num_layers:
            return [shipped, Form(None, torch.uint8, 1)]
        return [shipped]

    def _goes_to_backward_rank(self, transfer: Transfer) -> bool:
        if transfer.verb == "RECV":
            return self.job.role == "backward"
        # The table's rows are the forward stages, followed by the backward stages
        # (`Job.position`).
        return transfer.peer >= self.job.ranks.pp

    def _shipped_shape(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the shape of a stage's shipped activations; None if messages carry it."""
        if self.shape is None:
            return None
        stage = self.job.place.pp
        last_stage = self.job.ranks.pp - 1
        num_tensors = num_layers
        if stage < last_stage and num_layers:
            # The next stage ships the last layer's output as its own input. Only the last stage
            # ships this output itself, for the loss.
            num_tensors -= 1
        if stage > 0:
            num_tensors += 1  # the stage's input
        return (num_tensors, *self.shape)


@dataclass(kw_only=True)
class ForwardCompute(StageCompute):
    """Computes F on a forward rank."""

    job: Job
    layers: Sequence[torch.nn.Module] | None
    """The layers in this stage if it ships their outputs, otherwise None."""

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run F. Return tensors for the next forward rank, then those for backward ranks."""
        stage, _, microbatch, _ = action
        schedule = self.table.schedule
        draws = active.draws_by_microbatch()
        is_last = stage == schedule.num_stages - 1
        keeping = saving(self.layers or (), with_generators=draws)
        # The base class seeds random numbers by micro-batch only where gradients are
        # enabled. This forward pass runs without gradients, so seed it here. Otherwise,
        # its dropout masks would differ from R's.
        drawing: AbstractContextManager[None] = nullcontext()
        if draws:
            drawing = microbatch_rng(active.iteration(), stage, microbatch)
        roles = roles_in_force()
        # Without gradients, Megatron's router does not sort a token's experts, and
        # summing expert outputs in a different order changes the result's low-order
        # bits.
        roles.sorts_experts = not self.job.recomputes_routers
        try:
            with keeping as saved, torch.no_grad(), drawing:
                [output] = self.forward(stage, microbatch, inputs or [None])
        finally:
            roles.sorts_experts = False
        feeds_forward = not is_last and schedule.runs_forward(stage + 1)
        results: Tensors = []
        if feeds_forward:
            results.append(output)
        if self.layers is not None:
            shipped = self._shipped(inputs, output, saved, is_last=is_last)
            return results + shipped
        assert output is not None
        if is_last:
            return results
        return results + self._shares(output, 0)

    def release(self, outputs: Tensors) -> None:
        """Do nothing, because only the transport still references the outputs."""

    def _shipped(
        self,
        inputs: Tensors,
        output: torch.Tensor | None,
        saved: Saved,
        *,
        is_last: bool,
    ) -> Tensors:
        """Return the stage's input and the layer outputs that backward ranks need.

        A first stage without layers has neither input nor outputs and sends an empty tensor.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        tensors += saved.outputs
        if not is_last and saved.outputs:
            tensors.pop()  # the next stage ships this output as its own input
        if tensors:
            packed = torch.stack(tensors)
        else:
            assert output is not None
            packed = output.new_empty(0, *output.shape)
        shipped = self._shares(packed, 1)
        if saved.generators:
            generators = torch.stack(saved.generators)
            shipped += [generators] * self._num_shards
        return shipped

    @property
    def _num_shards(self) -> int:
        """Number of tensor-parallel backward ranks that this rank serves."""
        if self.job.ranks.merged:
            return self.job.ranks.tp
        return 1

    def _shares(self, tensor: torch.Tensor, sequence_dim: int) -> Tensors:
        """Return the part of a tensor that each tensor-parallel backward rank needs."""
        # With sequence parallelism, each backward rank holds a part of the sequence.
        if self._num_shards > 1 and self.job.sequence_parallel:
            return list(tensor.chunk(self._num_shards, sequence_dim))
        return [tensor] * self._num_shards


@dataclass(kw_only=True)
class BackwardCompute(StageCompute):
    """Computes R and B on a backward rank."""

    layers: Sequence[torch.nn.Module] | None
    """The layers in this stage if it receives their outputs, otherwise None."""

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run B, or run R with shipped activations `[layers, s, b, h]`, if there are any."""
        if action.kind != "R" or self.layers is None:
            return super().run(action, inputs)
        packed, *states = inputs
        assert packed is not None
        stage_inputs: Tensors = []
        outputs = packed
        if action.stage > 0:
            stage_inputs = [packed[0].clone()]
            outputs = packed[1:]
        replay = Replay(outputs.unbind(), *states)
        roles = roles_in_force()
        # `patches/disaggregation.py` reads this when Megatron checkpoints a layer.
        roles.replay = replay
        try:
            super().run(action, stage_inputs)
        finally:
            roles.replay = None
        # If a layer bypasses Megatron's checkpoint, the next layer takes that layer's shipped
        # output, and all later layers start from wrong inputs.
        if replay.num_replayed != len(self.layers):
            raise MegatronExtError(
                f"{action} recomputed layers whose outputs were shipped and reused only "
                f"{replay.num_replayed} of {len(self.layers)}; use --fbd-activations recompute"
            )
        return []
