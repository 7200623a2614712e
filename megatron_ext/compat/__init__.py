"""What only machines without a GPU, with a MUSA GPU or without Transformer Engine need.

Rows of the registry, stand-ins for modules, and translations of `torch.cuda`: none of it takes part
where NVIDIA's GPUs and Transformer Engine are there. The rest of the package comes in by this door
alone (an import contract says so), so what is behind it can be read, and left out, by itself.
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

_TABLES = ("off_cuda", "torch_adam", "without_te")


def rows() -> list[Patch]:
    """Return the rows of the registry that such machines need."""
    tables = (import_module(f"{__name__}.{name}").PATCHES for name in _TABLES)
    return [patch for table in tables for patch in table]


def cpu_redirects() -> Iterable[Redirect]:
    """List what makes upstream's spelling of CUDA mean the host."""
    from megatron_ext.compat import on_host

    return on_host.redirects()


def musa_redirects() -> Iterable[Redirect]:
    """List what makes upstream's spelling of CUDA mean MUSA, or what torchada leaves of it."""
    from megatron_ext.compat import on_musa

    return on_musa.redirects()


def batch_invariant_stand_in() -> Path:
    """Return the module that takes the place of Megatron's Triton kernels where Triton is not."""
    return Path(__file__).with_name("no_triton.py")


def peak_rss_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    from megatron_ext.compat import host

    return host.peak_rss_bytes()
