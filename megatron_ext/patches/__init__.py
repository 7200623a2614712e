"""All changes to other packages: patch tables, and the registry that applies them.

A table is a module with a `PatchTable` named `PATCHES`. Each row is a decorator with an id and a
target. The docstring of the decorated function is the reason for the patch: what goes wrong without
it. Importing a table imports neither torch nor Megatron. Add a patch to the table for its upstream
area. To add a table, write the module and list it here.
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
"""Modules in this package with a `PATCHES` table, one for each upstream area."""


def rows() -> list[Patch]:
    """Return the rows of all tables, for all Megatron releases."""
    modules = [*(f"{__name__}.{name}" for name in TABLES), *feature_list.PATCHES]
    patches: list[Patch] = []
    for module in modules:
        patches += import_module(module).PATCHES
    return patches


def arm() -> None:
    """Register all tables, hook Megatron's import and activate the registry. Idempotent."""
    REGISTRY.register(rows())
    # Do this before activating the registry. If Megatron is already imported, the hook registers
    # the device's redirects at once, and a single sweep repairs all copied names.
    hooks.install(before_core=device.arm)
    REGISTRY.activate()
