"""Reports actions, messages and waits as spans in Megatron's OpenTelemetry (0.20, nemo-lens)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.tracing.records import ACTION_NAMES

# Megatron's names for the span groups that `--otel-span-groups` enables.
_ACTIONS = "microbatch"
_MESSAGES = "communication"

EndSpan = Callable[[Mapping[str, Any]], None]
"""Ends a span, given its attributes."""


def is_on() -> bool:
    """Return whether Megatron, or another host, has enabled spans for actions or messages."""
    # Do not import the module: if telemetry is set up, the host has already imported
    # it.
    state = sys.modules.get("nemo.lens.state")
    if state is None:
        return False
    return any(map(state.is_span_group_enabled, (_ACTIONS, _MESSAGES)))


def begin(name: str) -> EndSpan:
    """Begin a span inside the step's span; return the function that ends it.

    The function takes the span's attributes. Nested spans must end before the spans around them.
    """
    from nemo.lens.helpers import managed_span

    group = _ACTIONS if name in ACTION_NAMES.values() else _MESSAGES
    context = managed_span(group, f"megatron_ext.{name}")
    # Enter and exit the context explicitly, because the span ends in another call.
    span = context.__enter__()

    def end(attributes: Mapping[str, Any]) -> None:
        if span is not None:  # its group is enabled
            span.set_attributes(dict(attributes))
        context.__exit__(None, None, None)

    return end
