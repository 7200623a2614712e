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
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.version import __version__

if TYPE_CHECKING:
    from megatron_ext.config.build import ModelBuild
    from megatron_ext.config.pipeline_config import (
        Disaggregation,
        DynamicOrder,
        PipelineConfig,
        Tracing,
    )
    from megatron_ext.patches.registry import Row

__all__ = [
    "Disaggregation",
    "DynamicOrder",
    "ModelBuild",
    "PipelineConfig",
    "Tracing",
    "__version__",
    "activate",
    "begin_iteration",
    "configure",
    "deactivate",
    "deconfigure",
    "report",
]

_MODULE_OF = {
    "Disaggregation": "megatron_ext.config.pipeline_config",
    "DynamicOrder": "megatron_ext.config.pipeline_config",
    "ModelBuild": "megatron_ext.config.build",
    "PipelineConfig": "megatron_ext.config.pipeline_config",
    "Tracing": "megatron_ext.config.pipeline_config",
}
"""What is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    """Import what few programs need."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def activate() -> None:
    """Arm all patches; those of modules that are imported already apply now. Idempotent."""
    from megatron_ext import patches

    patches.arm()


def deactivate() -> None:
    """Restore what was changed: attributes, their copies, import hooks, environment variables.

    The active configuration ends with it.
    """
    from megatron_ext import patches
    from megatron_ext.config.active import clear_configuration

    clear_configuration()
    patches.disarm()


def configure(
    config: PipelineConfig,
    *,
    pipeline_ranks: int,
    num_microbatches: int,
    num_layers: int,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
    world_size: int | None = None,
    seed: int | None = None,
) -> ModelBuild:
    """Put a configuration in force, and return what the model has to be built with.

    For programs that do not parse Megatron's command line. To be called in every process of the
    job, with the same arguments, before process groups and model are made. `megatron.core` may have
    been imported before, but for `config.device`. From then on
    `megatron.core.pipeline_parallel.get_forward_backward_func` returns the schedule. Calling it
    again, or `deconfigure`, ends what was in force.

    Args:
        config: What is wanted.
        pipeline_ranks: Ranks of one pipeline; of both where a schedule mirrors two.
        num_microbatches: Of one step of these ranks, both mirrored pipelines together.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Those.
        layout: Which layers each stage has, in Megatron's notation; None: as many in each.
        world_size: Ranks of the job; None: one pipeline.
        seed: Of the run, where random numbers are drawn by micro-batch.

    Raises:
        UserError: The sizes do not go with the configuration, or the device came too late.
        UpstreamMismatch: Megatron is not one that active patches were written for.
    """
    from megatron_ext.config import programs
    from megatron_ext.patches.registry import REGISTRY

    build = programs.configure(
        config,
        pipeline_ranks=pipeline_ranks,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        mtp_num_layers=mtp_num_layers,
        layout=layout,
        world_size=world_size,
        seed=seed,
    )
    activate()
    REGISTRY.raise_mismatches()
    return build


def deconfigure() -> None:
    """End what `configure` put in force: Megatron's own schedules run again."""
    from megatron_ext.config.active import clear_configuration

    clear_configuration()


def begin_iteration(number: int) -> None:
    """Note which training step begins, where random numbers are drawn by micro-batch.

    Args:
        number: Counted over the whole training, resumed or not.
    """
    from megatron_ext.config import randomness

    randomness.begin_iteration(number)


def report() -> list[Row]:
    """Return the state of every patch, as `megatron-ext patches list` shows it."""
    from megatron_ext.patches.registry import REGISTRY

    return REGISTRY.rows()


if os.environ.get("MEGATRON_EXT_DISABLE", "0") != "1":
    activate()
