"""Actions, messages and waits as spans of Megatron's OpenTelemetry (0.20, with nemo-lens)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.tracing.records import ACTION_NAMES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_ACTIONS, _MESSAGES = "microbatch", "communication"
"""Megatron's names for groups of spans; `--otel-span-groups` enables them."""


def is_on() -> bool:
    """Return whether Megatron, or another host, has enabled spans of actions or messages."""
    state = sys.modules.get("nemo.lens.state")  # imported by whoever sets up telemetry
    return state is not None and any(map(state.is_span_group_enabled, (_ACTIONS, _MESSAGES)))


class OpenSpan:
    """A span below that of the step, from its construction to `end`; the last one ends first."""

    def __init__(self, name: str) -> None:
        from nemo.lens.helpers import managed_span

        group = _ACTIONS if name in ACTION_NAMES.values() else _MESSAGES
        self._context: AbstractContextManager[Any] = managed_span(group, f"megatron_ext.{name}")
        self._span = self._context.__enter__()

    def end(self, about: Mapping[str, Any]) -> None:
        """End it with the attributes that it has in a trace, too."""
        if self._span is not None:  # its group is enabled
            self._span.set_attributes(dict(about))
        self._context.__exit__(None, None, None)
