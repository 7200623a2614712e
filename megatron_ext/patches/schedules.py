"""The patch by which chosen schedules run instead of Megatron's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]


def _is_chosen() -> bool:
    from megatron_ext.schedules import choice

    return choice.current() is not None


def _ours(
    _call: Callable[..., Any], _instance: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> Any:
    from megatron_ext.schedules.runtime.entry import forward_backward

    return forward_backward


PATCHES = (
    Patch(
        id="schedules.forward_backward",
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        fn=_ours,
        kind="replace",
        when=_is_chosen,
        feature="schedules",
        reason="runs the table of --pipeline-schedule; without that flag Megatron's own schedules",
    ),
)
