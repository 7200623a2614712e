"""Brings offloaded activations back in the order in which a table runs its backwards.

Megatron's fine-grained offloading moves saved tensors to the host behind each forward of the first
step, and from then on fetches those of the next backward ahead of time. It derives the order of
backwards from the number of virtual stages; a table has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action

_MEGATRONS = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


class Offloading:
    """The order in which activations return, for the step in progress."""

    def __init__(self) -> None:
        # Numbers of forwards, in the order of their backwards; empty in evaluations.
        self._order: tuple[int, ...] = ()
        # The order that Megatron has in memory.
        self._learned: tuple[int, ...] = ()
        # Forwards of this step so far.
        self._begun = 0

    def begin_step(self, row: Sequence[Action]) -> None:
        """Take the order of a rank's actions; another one than before is learned anew."""
        numbers: dict[tuple[int, int], int] = {}
        order = []
        for action in row:
            key = action.stage, action.microbatch
            if action.kind == "F":
                numbers[key] = len(numbers)
            elif action.kind in ("B", "I"):
                order.append(numbers[key])
        self._order = tuple(order)
        self._begun = 0
        if self._order and self._order != self._learned:
            # In the first step too: a schedule before this configuration may have left its own.
            _interface().reset_instance()
            self._learned = self._order

    def begin_forward(self, call: Any, kwargs: dict[str, Any]) -> None:
        """Let Megatron prepare for the saved tensors of one forward, and sort what it has."""
        if not self._order:
            return
        call(**{**kwargs, "vp_size": 1, "vp_stage": 0})  # so it derives nothing
        manager = sys.modules[_MEGATRONS].PipelineOffloadManager.get_instance()
        chunks = manager._cached_chunks_forward
        # Before the end of the first step Megatron knows the forwards so far.
        by_backward = [chunks[number] for number in self._order if number < len(chunks)]
        manager._cached_chunks_backward[:] = by_backward
        manager._cur_forward_chunk = chunks[self._begun]
        self._begun += 1

    @staticmethod
    def end_step() -> None:
        """Begin with the first forward and the first backward again."""
        _interface().reset()


def _interface() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    return FineGrainedActivationOffloadingInterface
