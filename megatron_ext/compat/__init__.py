"""Support for machines without a GPU, with a MUSA GPU or without Transformer Engine.

Registry rows, stand-ins for modules, and translations of `torch.cuda`; all inactive on NVIDIA GPUs
with Transformer Engine. The rest of the package imports only this module (an import contract
enforces it), so the modules behind it can be read, or skipped, separately.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_ext.devices import Redirect
    from megatron_ext.patches.registry import Patch

__all__ = [
    "batch_invariant_stand_in",
    "cpu_redirects",
    "musa_redirects",
    "peak_rss_bytes",
    "rows",
]

_TABLES = ("off_cuda", "packed_attention", "torch_adam", "without_te")


def rows() -> list[Patch]:
    """Return the rows of the registry that such machines need."""
    tables = (import_module(f"{__name__}.{name}").PATCHES for name in _TABLES)
    return [patch for table in tables for patch in table]


def cpu_redirects() -> Iterable[Redirect]:
    """List the redirects from CUDA names to the host."""
    from megatron_ext.compat import on_host

    return on_host.redirects()


def musa_redirects() -> Iterable[Redirect]:
    """List the redirects from CUDA names to MUSA, without those that torchada makes."""
    from megatron_ext.compat import on_musa

    return on_musa.redirects()


def batch_invariant_stand_in() -> Path:
    """Return the module that replaces Megatron's Triton kernels if Triton is not installed."""
    return Path(__file__).with_name("no_triton.py")


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    from megatron_ext.compat import host

    return host.peak_rss_bytes()
