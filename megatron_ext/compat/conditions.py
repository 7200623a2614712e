"""Conditions of patches that several tables share, each cheap enough to evaluate per call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from megatron_ext import devices

__all__ = ["off_cuda", "on_cpu", "without_te"]


@cache
def without_te() -> bool:
    """Return whether Transformer Engine is missing."""
    return find_spec("transformer_engine") is None


def off_cuda() -> bool:
    """Return whether this process computes on a device other than CUDA."""
    return not devices.on_cuda()


def on_cpu() -> bool:
    """Return whether this process computes on the host."""
    return devices.current().name == "cpu"
