"""The observer interface of traces, watchdogs and statistics.

The executor calls observers around each action and at the end of a step. An observed transport
(`megatron_ext/transport/observed.py`) calls them around each message and wait. Without observers
nothing is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ext.transport.observed import TransportObserver

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action

__all__ = ["Executed", "Observer", "overrides"]


Executed = tuple[int, "Action", float]
"""(position in table order, action, duration in seconds of host time). A plain tuple because one is
created between every two actions."""


class Observer(TransportObserver):
    """Observes the actions and messages of one rank; override the methods you need."""

    def begin_action(self, action: Action) -> None:
        """Called when an action's inputs have arrived, just before it computes."""

    def end_action(self, position: int, action: Action) -> None:
        """Called when an action has computed, before its results are sent.

        Args:
            position: Index of the action in table order.
            action: The action that ran.
        """

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Called when a step is complete.

        Args:
            executed: Every action of the step, in execution order.
            wall_s: Duration of the step in seconds.
        """


def overrides(observer: Observer, method: str) -> bool:
    """Return whether an observer overrides a method of `Observer`."""
    return getattr(type(observer), method) is not getattr(Observer, method)
