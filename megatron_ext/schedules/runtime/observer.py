"""What may listen to a rank while it runs a step: traces, watchdogs, statistics.

The executor calls an observer around each action and at the end of a step; an observed transport
(`megatron_ext/transport/observed.py`) calls it around each message and wait. A run that nobody
observes calls nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ext.transport.observed import TransportObserver

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Action

__all__ = ["Executed", "Observer", "overrides"]


Executed = tuple[int, "Action", float]
"""An action that has run: its position in the table's order, itself, and its duration in seconds as
the host sees it. A plain tuple: one is made between any two actions."""


class Observer(TransportObserver):
    """Listens to the actions and messages of one rank; override what matters."""

    def begin_action(self, action: Action) -> None:
        """Note that the inputs of an action are here and it starts to compute."""

    def end_action(self, position: int, action: Action) -> None:
        """Note that an action has computed; nothing of its results was sent yet.

        Args:
            position: Of the action in the table's order.
            action: What ran.
        """

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Note that a step is over, and what ran in it, in that order.

        Args:
            executed: Every action of the step.
            wall_s: Duration of the step.
        """


def overrides(observer: Observer, method: str) -> bool:
    """Tell whether an observer does anything in one of its methods."""
    return getattr(type(observer), method) is not getattr(Observer, method)
