"""The interface of objects that observe a job: traces, watchdogs, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.transport.observed import TransportObserver

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.table.actions import Action, Kind

# A plain tuple, because one is created between every two actions, where the device may wait.
Executed = tuple[int, "Action", float]
"""(position in table order, action, seconds of host time). Each action of a pair counts as half of
the pair's time."""


class Observer(TransportObserver):
    """Observes the training of one rank; override the methods you need.

    Append it to the `observers` of the active configuration before the first step. A runtime passes
    the observers to its transport, which also reports messages between steps; to the data (`read`);
    and in training to the executor, after `begin_step`. The patches in `patches/trace.py` report
    the parts of a training step outside its table, and the actions of Megatron's own schedules.
    """

    def begin_iteration(self, num_microbatches: int) -> None:
        """Called when a training step begins: the schedule, reductions and the optimizer."""

    def end_schedule(self) -> None:
        """Called when the schedule of a training step, and reductions in it, are complete."""

    def end_iteration(self) -> None:
        """Called when a training step has failed, or has sent new weights to forward ranks.

        Every other step ends with the optimizer. Only Megatron's optimizers report that; with
        any other optimizer, this is called at the next evaluation or step.
        """

    def begin_collective(self, name: str) -> None:
        """Called when a rank enters a collective part of a step: `reduce` or `optimizer`."""

    def end_collective(self, name: str) -> None:
        """Called when the rank has left that part, with or without an error."""

    def begin_step(self, compute: Any) -> None:
        """Called when a table's training step begins, with the `StageCompute` that runs it."""

    def read(self, microbatch: int, item: Any) -> None:
        """Called with the item that the data iterator returned for a micro-batch."""

    def made(self, stage: int, outputs: Sequence[Any], model: torch.nn.Module) -> None:
        """Called after a forward of Megatron's own schedules, with its outputs, `[s, b, h]`."""

    def close(self) -> None:
        """Called when the configuration ends."""

    def begin_action(self, action: Action) -> None:
        """Called when an action's inputs are here; a pair's forward begins first and ends last."""

    def end_action(self, position: int, action: Action) -> None:
        """Called when the action at a position of its row has run, before its results leave."""

    def begin_exchange(self) -> None:
        """Called before experts exchange tokens, in the stream of the exchange; pairs only."""

    def end_exchange(self, kind: Kind, stage: int, microbatch: int, layer: int) -> None:
        """Called in the same stream after the exchange.

        Args:
            kind: Kind of the action that it belongs to.
            stage: The action's stage.
            microbatch: The action's micro-batch.
            layer: Index of the layer within the stage.
        """

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Called when a step is complete, with its actions in execution order and its duration."""


def overrides(observer: Observer, method: str) -> bool:
    """Return whether an observer overrides a method of `Observer`."""
    return getattr(type(observer), method) is not getattr(Observer, method)
