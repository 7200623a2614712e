"""One action at a time, through Megatron's own forward and backward steps.

What upstream's schedules pass to `forward_step` and `backward_step` by their position in a loop is
given here by micro-batch: losses, data and what a backward needs are all kept under the stage and
micro-batch that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import schedules as upstream
from megatron.core.utils import get_model_type

from megatron_ext.schedules.runtime.rng import rng_of_this_step
from megatron_ext.schedules.runtime.split import SPLIT

if TYPE_CHECKING:
    from megatron_ext.schedules.runtime.microbatches import MicrobatchData
    from megatron_ext.schedules.runtime.tables import Table

__all__ = ["Call", "StageCompute", "Tensors"]

Tensors = list[torch.Tensor | None]
"""What one stage hands to the next: one tensor, or several where Megatron's shapes say so."""


@dataclass
class Call:
    """What Megatron handed over for one step, in the words of its own schedules."""

    forward_step_func: Callable[..., Any]
    data: list[MicrobatchData]
    """By chunk."""
    chunks: list[torch.nn.Module]
    config: Any
    num_microbatches: int
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


@dataclass
class StageCompute:
    """Runs the actions of one step on the chunks of this rank."""

    call: Call
    table: Table
    reports: dict[int, Any] = field(default_factory=dict)
    """What the loss function reported, by micro-batch; on the rank of the last stage only."""
    num_tokens: torch.Tensor | None = None
    """Sum over the micro-batches, an integer scalar."""
    _live: dict[tuple[int, int], tuple[Tensors, Tensors]] = field(default_factory=dict, init=False)
    _forwards: int = field(default=0, init=False)

    def forward(self, stage: int, microbatch: int, inputs: Tensors, *, is_first: bool) -> Tensors:
        """Run F.

        Args:
            stage: One of this rank's.
            microbatch: Which.
            inputs: Activations of the stage before, leaves that require a gradient; None for the
                first stage.
            is_first: Whether the stage runs for the first time in this step.

        Returns:
            The activations for the next stage, or the loss.
        """
        call, chunk = self.call, self.table.schedule.placement.chunk_of(stage)
        store: list[Any] = []
        splits = SPLIT.defer(stage, microbatch) if self._is_split(stage, microbatch) else _UNCHANGED
        with splits, rng_of_this_step(stage, microbatch):
            outputs: Tensors
            outputs, num_tokens = upstream.forward_step(
                call.forward_step_func,
                call.data[chunk].view(microbatch),
                call.chunks[chunk],
                call.num_microbatches,
                inputs,
                store,
                call.config,
                cp_group_size=call.cp_group_size,
                collect_non_loss_data=call.collect_non_loss_data,
                checkpoint_activations_microbatch=self._checkpoints_all_layers(),
                is_first_microbatch=upstream.check_first_val_step(
                    call.first_val_step, call.forward_only, is_first
                ),
                current_microbatch=microbatch,
                vp_stage=chunk if len(call.chunks) > 1 else None,
                is_last_stage=stage == self.table.schedule.num_stages - 1,
            )
        self._forwards += 1
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
        if store:
            self.reports[microbatch] = store[0]
        if not call.forward_only:
            self._live[stage, microbatch] = (inputs, outputs)
        return outputs

    def release(self, outputs: Tensors) -> None:
        """Free the data of outputs that were sent; backward needs their graph only."""
        for tensor in outputs:
            upstream.deallocate_output_tensor(tensor, self.call.config.deallocate_pipeline_outputs)

    def backward(self, stage: int, microbatch: int, gradients: Tensors, *, split: bool) -> Tensors:
        """Run B, or I with `split`.

        Args:
            stage: One of this rank's.
            microbatch: Which.
            gradients: Of the outputs; None for the last stage.
            split: Whether the gradients of the weights wait for W.

        Returns:
            The gradients of the inputs; None for the first stage.
        """
        model = self.call.chunks[self.table.schedule.placement.chunk_of(stage)]
        inputs, outputs = self._live.pop((stage, microbatch))
        with SPLIT.defer(stage, microbatch) if split else _UNCHANGED:
            found = upstream.backward_step(
                inputs,
                outputs,
                gradients,
                get_model_type(model),
                self.call.config,
            )
        # A stage may leave an input unused; the stage before waits for a gradient all the same.
        return [
            torch.zeros_like(x) if x is not None and grad is None else grad
            for x, grad in zip(inputs, found, strict=True)
        ]

    def weights(self, stage: int, microbatch: int) -> None:
        """Run W."""
        SPLIT.run(stage, microbatch)

    def unfinished(self) -> list[str]:
        """Return what a complete step must not leave behind, for an error message."""
        left = [f"{stage}B{microbatch}" for stage, microbatch in self._live]
        return left + [f"{stage}W{microbatch}" for stage, microbatch in SPLIT.pending()]

    def _is_split(self, stage: int, microbatch: int) -> bool:
        return (stage, microbatch) in self.table.split_backwards

    def _checkpoints_all_layers(self) -> bool | None:
        """Upstream's partial checkpointing: the first few of those alive keep some layers."""
        limit = self.call.config.num_microbatches_with_partial_activation_checkpoints
        return None if limit is None else self._forwards % max(self.table.max_live, 1) >= limit


class _Unchanged:
    """A context without effect, cheaper than contextlib's for something that runs per action."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_UNCHANGED = _Unchanged()
