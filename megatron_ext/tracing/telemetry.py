"""Actions, messages and waits as spans of Megatron's OpenTelemetry (0.20, with nemo-lens)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.observer import Observer
from megatron_ext.tracing.records import ACTION_NAMES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_ext.message import Message
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.transport.observed import WaitsFor

_ACTIONS, _MESSAGES = "microbatch", "communication"
"""Megatron's names for groups of spans; `--otel-span-groups` enables them."""


def is_on() -> bool:
    """Return whether Megatron, or another host, has enabled spans of actions or messages."""
    state = sys.modules.get("nemo.lens.state")  # imported by whoever sets up telemetry
    return state is not None and any(map(state.is_span_group_enabled, (_ACTIONS, _MESSAGES)))


class Telemetry(Observer):
    """Opens a span for each action, send, receive and wait, below the span of the step."""

    def __init__(self) -> None:
        from nemo.lens.helpers import managed_span

        self._span = managed_span
        self._open: list[tuple[AbstractContextManager[Any], Any]] = []

    def end_iteration(self) -> None:
        """End what a failed step has left open."""
        while self._open:  # innermost first, as contexts end
            self._end()

    def begin_action(self, action: Action) -> None:
        """Begin the span of an action."""
        name = ACTION_NAMES["F" if action.kind == "R" else action.kind]
        where = {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice}
        self._begin(_ACTIONS, name, **where)

    def end_action(self, position: int, action: Action) -> None:
        """End it."""
        self._end()

    def begin_send(self, message: Message, target: int) -> None:
        """Begin the span of a send."""
        self._begin(_MESSAGES, "send", message=str(message), peer=target)

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """End it."""
        self._end(bytes=num_bytes)

    def begin_receive(self, message: Message, source: int) -> None:
        """Begin the span of a receive."""
        self._begin(_MESSAGES, "receive", message=str(message), peer=source)

    def end_receive(self, message: Message, source: int, num_bytes: int, waited_s: float) -> None:
        """End it."""
        self._end(bytes=num_bytes, waited_s=waited_s)

    def begin_wait(self, what: WaitsFor) -> None:
        """Begin the span of a wait."""
        self._begin(_MESSAGES, "wait", cause=what)

    def end_wait(self, what: WaitsFor, arrived: Sequence[Message]) -> None:
        """End it."""
        self._end()

    def _begin(self, group: str, name: str, **about: Any) -> None:
        context = self._span(group, f"megatron_ext.{name}", **about)
        self._open.append((context, context.__enter__()))

    def _end(self, **about: Any) -> None:
        context, span = self._open.pop()
        if span is not None:  # its group is enabled
            span.set_attributes(about)
        context.__exit__(None, None, None)
