"""Patches on what upstream builds and compiles before training."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_ext.devices import off_cuda
from megatron_ext.devices.translate import to
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]


def _skip_if_built(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `make` only where the compiled index helpers are missing."""
    try:
        import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return call(*args, **kwargs)
    return None


def _nothing(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> None:
    """Do nothing in place of the original."""


def _leave(function: Any) -> Any:
    """Decorate nothing."""
    return function


PATCHES = (
    Patch(
        id="training_init.dataset_helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        fn=_skip_if_built,
        reason="the wheel brings the compiled helpers but no Makefile, and a failed make ends the "
        "process",
    ),
    Patch(
        id="training_init.fused_kernels",
        target="megatron.legacy.fused_kernels:load",
        kind="replace",
        fn=_nothing,
        when=off_cuda,
        until="0.17",
        reason="looks for nvcc; without a CUDA toolkit it raises TypeError",
    ),
    Patch(
        id="training_init.jit_fuser",
        target="megatron.core.jit:jit_fuser",
        kind="set",
        fn=to(_leave),
        when=off_cuda,
        reason="torch.compile needs a compiler for the device and gains nothing here",
    ),
    Patch(
        id="training_init.jit_warmup",
        target="megatron.training.initialize:_warmup_jit_function",
        kind="replace",
        fn=_nothing,
        when=off_cuda,
        reason="warms up fused functions that nothing compiles here",
    ),
)
