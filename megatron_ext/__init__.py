"""Better pipelines for an unmodified Megatron-LM.

Importing this package arms its patches; put it first:

    import megatron_ext
    from megatron.training import pretrain

or leave the script as it is and start it with `python -m megatron_ext SCRIPT.py FLAGS`. With no
flag of ours given, a CUDA machine trains exactly as without the import. `MEGATRON_EXT_DISABLE=1`
makes the import do nothing; `deactivate()` undoes it. Neither torch nor Megatron is imported here:
patches are applied when those are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_ext.version import __version__

if TYPE_CHECKING:
    from megatron_ext.patches.registry import Row

__all__ = ["__version__", "activate", "deactivate", "report"]


def activate() -> None:
    """Arm all patches; those of modules that are imported already apply now. Idempotent."""
    from megatron_ext import patches

    patches.arm()


def deactivate() -> None:
    """Restore what was changed: attributes, their copies, import hooks, environment variables."""
    from megatron_ext import patches

    patches.disarm()


def report() -> list[Row]:
    """Return the state of every patch, as `megatron-ext patches list` shows it."""
    from megatron_ext.patches.registry import REGISTRY

    return REGISTRY.rows()


if os.environ.get("MEGATRON_EXT_DISABLE", "0") != "1":
    activate()
