"""Reloads offloaded activations in the order in which a table runs its backward passes.

From the first step on, Megatron's fine-grained offloading moves saved tensors to the host after
each forward pass and later prefetches the tensors for the next backward pass. Megatron derives the
order of backward passes from the number of virtual stages, but a table may use a different order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action

_MEGATRONS = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


class Offloading:
    """Holds the order in which the current step reloads activations."""

    def __init__(self) -> None:
        # Indices of forward passes, in the order of their backward passes; empty in evaluations.
        self._order: tuple[int, ...] = ()
        # The order that Megatron recorded in its first step.
        self._learned: tuple[int, ...] = ()
        # Number of forward passes in this step so far.
        self._begun = 0

    def begin_step(self, row: Sequence[Action]) -> None:
        """Derive the order from a rank's actions; if it has changed, Megatron records it again."""
        numbers: dict[tuple[int, int], int] = {}
        order = []
        for action in row:
            key = (action.stage, action.microbatch)
            if action.kind == "F":
                numbers[key] = len(numbers)
            elif action.kind in ("B", "I"):
                order.append(numbers[key])
        self._order = tuple(order)
        self._begun = 0
        has_changed = self._order != self._learned
        if self._order and has_changed:
            # Reset in the first step too: a schedule that ran before this configuration may have
            # left a different order in place.
            _interface().reset_instance()
            self._learned = self._order

    def begin_forward(self, call: Any, kwargs: dict[str, Any]) -> None:
        """Let Megatron prepare for one forward pass's saved tensors and reorder its records."""
        if not self._order:
            return
        # With one virtual stage, Megatron does not derive an order.
        one_virtual_stage = {"vp_size": 1, "vp_stage": 0}
        call(**{**kwargs, **one_virtual_stage})
        module = sys.modules[_MEGATRONS]
        manager = module.PipelineOffloadManager.get_instance()
        chunks = manager._cached_chunks_forward
        # During the first step, Megatron only has records of the forward passes that
        # have run so far.
        by_backward = []
        for number in self._order:
            if number < len(chunks):
                by_backward.append(chunks[number])
        manager._cached_chunks_backward[:] = by_backward
        manager._cur_forward_chunk = chunks[self._begun]
        self._begun += 1

    @staticmethod
    def end_step() -> None:
        """Start over with the first forward pass and the first backward pass."""
        _interface().reset()


def _interface() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    return FineGrainedActivationOffloadingInterface
