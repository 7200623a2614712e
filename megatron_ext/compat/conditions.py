"""When patches act: the few questions that more than one table asks, each cheap enough per call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from megatron_ext import devices

__all__ = ["off_cuda", "on_cpu", "without_te"]


@cache
def without_te() -> bool:
    """Tell whether Transformer Engine is not installed."""
    return find_spec("transformer_engine") is None


def off_cuda() -> bool:
    """Tell whether this process computes on something else than a CUDA device."""
    return not devices.on_cuda()


def on_cpu() -> bool:
    """Tell whether this process computes on the host."""
    return devices.current().name == "cpu"
