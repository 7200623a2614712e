"""Better pipelines for an unmodified Megatron-LM.

Importing this package arms its patches, so import it first:

    import megatron_ext
    from megatron.training import pretrain

or leave the script unchanged and start it with `python -m megatron_ext SCRIPT.py FLAGS`. If none of
this package's flags are used, training on a CUDA machine behaves as it would without the import.
`MEGATRON_EXT_DISABLE=1` makes the import do nothing; `deactivate()` undoes it. The import loads
neither torch nor Megatron: each patch is applied when its target module is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.version import __version__

if TYPE_CHECKING:
    from megatron_ext.config.active import begin_iteration
    from megatron_ext.config.hosting import preflight
    from megatron_ext.config.model_build import ModelBuild
    from megatron_ext.config.pipeline_config import (
        Disaggregation,
        DynamicOrder,
        PipelineConfig,
        Tracing,
    )
    from megatron_ext.features.trees import routes
    from megatron_ext.hosts.own_program import configure
    from megatron_ext.patches.point import Row
    from megatron_ext.schedules.table.costs import Costs
    from megatron_ext.schedules.table.length_cost import LengthCost

__all__ = [
    "Costs",
    "Disaggregation",
    "DynamicOrder",
    "LengthCost",
    "ModelBuild",
    "PipelineConfig",
    "Tracing",
    "__version__",
    "activate",
    "begin_iteration",
    "configure",
    "deactivate",
    "deconfigure",
    "preflight",
    "report",
    "routes",
]

_MODULE_OF = {
    "Costs": "megatron_ext.schedules.table.costs",
    "Disaggregation": "megatron_ext.config.pipeline_config",
    "DynamicOrder": "megatron_ext.config.pipeline_config",
    "LengthCost": "megatron_ext.schedules.table.length_cost",
    "ModelBuild": "megatron_ext.config.model_build",
    "PipelineConfig": "megatron_ext.config.pipeline_config",
    "Tracing": "megatron_ext.config.pipeline_config",
    "begin_iteration": "megatron_ext.config.active",
    "configure": "megatron_ext.hosts.own_program",
    "preflight": "megatron_ext.config.hosting",
    "routes": "megatron_ext.features.trees.routes",
}
"""Public name -> module that defines it; the module is imported on first use."""


def __getattr__(name: str) -> Any:
    """Import rarely used names on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULE_OF[name])
    # `routes` is itself a module. All other names are attributes of their modules.
    if module.__name__.endswith(f".{name}"):
        return module
    return getattr(module, name)


def __dir__() -> list[str]:
    special_names = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *special_names})


def activate() -> None:
    """Arm all patches and patch modules that are already imported. Idempotent."""
    from megatron_ext import hosts, patches

    patches.arm()
    hosts.arm()


def deactivate() -> None:
    """Undo all changes: attributes, their copies, import hooks and environment variables.

    This also deactivates the active configuration.
    """
    from megatron_ext.patches.registry import REGISTRY

    deconfigure()
    REGISTRY.deactivate()


def deconfigure() -> None:
    """Deactivate the configuration so that Megatron's own schedules run again."""
    from megatron_ext.config.active import clear_configuration

    clear_configuration()


def report() -> list[Row]:
    """Return the state of every patch, as shown by `megatron-ext patches list`."""
    from megatron_ext.patches.registry import REGISTRY

    return REGISTRY.rows()


if os.environ.get("MEGATRON_EXT_DISABLE", "0") != "1":
    try:
        activate()
    except ModuleNotFoundError:
        # `plan` needs only the standard library. If another command needs the missing module,
        # cli.py reports it in one line.
        if sys.argv[:1] != ["-m"] and not sys.argv[0].endswith("megatron-ext"):
            raise
