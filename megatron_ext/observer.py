"""The interface for objects that observe a job, such as traces, watchdogs and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.transport.observed import TransportObserver

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.table.actions import Action, Kind

# A plain tuple is cheap to create. One is created between every two actions, when the
# device may be idle.
Executed = tuple[int, "Action", float]
"""(position in table order, action, seconds of host time). A pair's time is split equally between
its two actions."""


class Observer(TransportObserver):
    """Observes one rank's training; override the methods you need.

    Append it to the active configuration's `observers` before the first step. The transport reports
    messages, even between steps. The data iterator calls `read`. During a training step, after
    `begin_step`, the executor reports a table's actions. The patches in `patches/trace.py` report
    the parts of a training step that are outside its table, and the actions of Megatron's own
    schedules.
    """

    def begin_iteration(self, num_microbatches: int) -> None:
        """Called at the start of a training step, which includes reductions and the optimizer."""

    def end_schedule(self) -> None:
        """Called when a training step's schedule and its reductions are complete."""

    def end_iteration(self) -> None:
        """Called when a training step has failed, or has sent new weights to forward ranks.

        All other steps end with the optimizer. Only Megatron's optimizers report when they are
        done; with any other optimizer, this is called at the next evaluation or step.
        """

    def begin_collective(self, name: str) -> None:
        """Called when a rank enters a collective part of a step: `reduce` or `optimizer`."""

    def end_collective(self, name: str) -> None:
        """Called when the rank has left a collective part of a step, with or without an error."""

    def begin_step(self, compute: Any) -> None:
        """Called when a table's training step begins, with the `StageCompute` that runs it."""

    def begin_carried_step(self) -> None:
        """Called when a step of Megatron's own schedule begins, with messages on our transport."""

    def read(self, microbatch: int, item: Any) -> None:
        """Called with the item that the data iterator returned for a micro-batch."""

    def made(self, stage: int, outputs: Sequence[Any], model: torch.nn.Module) -> None:
        """Called after a forward pass in a Megatron schedule, with its outputs, `[s, b, h]`."""

    def close(self) -> None:
        """Called when the configuration is closed."""

    def begin_action(self, action: Action) -> None:
        """Called when an action's inputs have arrived; a pair's F begins first and ends last."""

    def end_action(self, position: int, action: Action) -> None:
        """Called after the action at this position in its row has run, before results are sent."""

    def begin_exchange(self) -> None:
        """Called before experts exchange tokens, on the exchange's stream; pairs only."""

    def end_exchange(
        self,
        kind: Kind,
        stage: int,
        microbatch: int,
        layer: int,
    ) -> None:
        """Called on the same stream after the exchange.

        Args:
            kind: Kind of action that the exchange belongs to.
            stage: The action's stage.
            microbatch: The action's micro-batch.
            layer: Index of the layer within the stage.
        """

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Called when a step is complete, with its actions in execution order and its duration."""


def overrides(observer: Observer, method: str) -> bool:
    """Return whether an observer overrides a method of `Observer`."""
    implementation = getattr(type(observer), method)
    return implementation is not getattr(Observer, method)
