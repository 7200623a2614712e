"""A patch on what upstream builds before training."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]


def _skip_if_built(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `make` only where the compiled index helpers are missing."""
    try:
        import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return call(*args, **kwargs)
    return None


PATCHES = (
    Patch(
        id="training_init.dataset_helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        fn=_skip_if_built,
        reason="the wheel brings the compiled helpers but no Makefile, and a failed make ends the "
        "process",
    ),
)
