"""Everything that this package changes in others: tables of patches, and the registry behind them.

A table is a module with a tuple `PATCHES`; importing one imports neither torch nor Megatron. To add
a patch, add it to the table of its upstream area. To add a table, write the module and name it
here.
"""

from __future__ import annotations

from importlib import import_module

from megatron_ext import compat
from megatron_ext.patches import hooks
from megatron_ext.patches.registry import REGISTRY, Patch

__all__ = ["REGISTRY", "TABLES", "arm", "disarm", "rows"]

TABLES = (
    "arguments",
    "disaggregation",
    "dist_checkpointing",
    "first_steps",
    "folded_pipelines",
    "optimizer",
    "p2p",
    "split_backward",
    "schedules",
    "trace",
    "training_init",
)
"""Modules of this package with a tuple `PATCHES`, by upstream area."""


def rows() -> list[Patch]:
    """Return the rows of all tables and those behind the door of `compat`, for all releases."""
    tables = (import_module(f"{__name__}.{name}").PATCHES for name in TABLES)
    return [*(patch for table in tables for patch in table), *compat.rows()]


def _arm_device() -> None:
    from megatron_ext.patches import device

    device.arm()


def arm() -> None:
    """Register all tables, hook Megatron's import and activate the registry. Idempotent."""
    REGISTRY.register([patch for patch in rows() if patch not in REGISTRY])
    hooks.install(before_core=_arm_device)
    REGISTRY.activate()


def disarm() -> None:
    """Restore every original, the environment and the import hooks. Idempotent.

    An observation (`--trace`, `--hang-timeout`) ends: nobody tells it of steps any more.
    """
    from megatron_ext.patches import device
    from megatron_ext.trace import session

    session.close()
    REGISTRY.deactivate()
    hooks.remove()
    device.restore_environment()
