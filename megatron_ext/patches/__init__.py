"""Every change made to other packages: the patch tables and the registry that applies them.

A table is a module with a `PatchTable` named `PATCHES`. Each row is a decorator with an id and a
target. The decorated function's docstring is the patch's reason: what goes wrong without the patch.
Importing a table imports neither torch nor Megatron. Add a patch to the table for its upstream
area. To add a table, write the module and add its name to `TABLES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megatron_ext import feature_list
from megatron_ext.patches import device, hooks
from megatron_ext.patches.registry import REGISTRY

if TYPE_CHECKING:
    from megatron_ext.patches.point import Patch

__all__ = ["REGISTRY", "TABLES", "arm", "rows"]

TABLES = (
    "arguments",
    "checkpoints",
    "disaggregation",
    "effects",
    "folded_pipelines",
    "inprocess_restart",
    "off_cuda",
    "split_backward",
    "schedules",
    "recorded_steps",
    "trace",
    "without_te",
)
"""Modules in this package with a `PATCHES` table, one per upstream area."""


def rows() -> list[Patch]:
    """Return every table's rows, for all Megatron releases."""
    modules = [*(f"{__name__}.{name}" for name in TABLES), *feature_list.PATCHES]
    patches: list[Patch] = []
    for module in modules:
        patches += import_module(module).PATCHES
    return patches


def arm() -> None:
    """Register all tables, hook Megatron's import and activate the registry. Idempotent."""
    REGISTRY.register(rows())
    # Install the hook before activating the registry: if Megatron is already imported,
    # the hook registers the device's redirects now, so one sweep repairs all copies.
    hooks.install(before_core=device.arm)
    REGISTRY.activate()
