"""`configure`: the configuration of programs that do not use Megatron's command line."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import megatron_ext
from megatron_ext import devices, hosts
from megatron_ext.config.active import Active, activate_configuration, clear_configuration
from megatron_ext.config.hosting import torch_is_best
from megatron_ext.config.pipeline_config import (
    ConfigurationError,
    PipelineConfig,
    is_of_type,
)
from megatron_ext.config.sized_pipeline import Pipeline, base_table, twins_of
from megatron_ext.config.stages import ModelBuild, build_of, check_ranks
from megatron_ext.errors import ArgumentsError, DeviceError
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.schedules.table.validation import validate

__all__ = ["await_host", "configure"]


@overload
def configure(config: PipelineConfig) -> None: ...


@overload
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
) -> ModelBuild: ...


def configure(
    config: PipelineConfig,
    *,
    pipeline_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_layers: int | None = None,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
    world_size: int | None = None,
    seed: int | None = None,
) -> ModelBuild | None:
    """Activate a configuration, and return what to build the model with.

    For programs that do not parse Megatron's command line. Call it in every process of the job,
    with the same arguments, before you create process groups and the model. `megatron.core` may be
    imported earlier unless `config.device` is given. From then on
    `megatron.core.pipeline_parallel.get_forward_backward_func` returns the schedule. Another call,
    or `deconfigure`, ends this configuration.

    Without any size it waits for a host that knows them, `pretrain` or `finetune` of
    Megatron-Bridge, which then builds the model accordingly; it returns None.

    Args:
        config: The settings.
        pipeline_ranks: Ranks of one pipeline, of both where a schedule mirrors two.
        num_microbatches: Of one step of these ranks, both mirrored pipelines together.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Layers of multi-token prediction.
        layout: Which layers each stage has, in Megatron's notation; None: the same number in each.
        world_size: Ranks of the job; None: one pipeline.
        seed: Of the run; needed where random numbers are drawn by micro-batch, as with `dynamic`.

    Raises:
        UserError: A size is missing or impossible, the sizes do not fit the configuration, the
            device was named too late, or no host is installed.
        UpstreamMismatch: Active patches do not fit the installed Megatron.
    """
    if not isinstance(config, PipelineConfig):
        raise ArgumentsError(
            f"configure takes a PipelineConfig, not a {type(config).__name__}; for example "
            'configure(PipelineConfig(schedule="zb-v"), pipeline_ranks=4, ...)'
        )
    needed = {
        "pipeline_ranks": pipeline_ranks,
        "num_microbatches": num_microbatches,
        "num_layers": num_layers,
    }
    others = {"world_size": world_size, "mtp_num_layers": mtp_num_layers, "seed": seed}
    sizes = {name: v for name, v in {**needed, **others}.items() if v is not None}
    for name, value in sizes.items():
        least = 1 if name in needed or name == "world_size" else 0
        if not is_of_type(value, int) or value < least:
            raise ArgumentsError(f"{name} {value!r} must be a whole number of at least {least}")
    if not is_of_type(layout, str | None):
        raise ArgumentsError(f"layout {layout!r} must be a string in Megatron's notation")
    missing = [name for name in needed if name not in sizes]
    if missing and (sizes or layout is not None):
        raise ArgumentsError(f"configure needs all sizes; give {', '.join(missing)} too")
    clear_configuration()
    _select_device(config.device)
    megatron_ext.activate()
    REGISTRY.raise_mismatches()
    if not sizes:
        hosts.check_some_host()
        await_host(config)
        return None
    _begin(config)
    if config.draws_by_microbatch and seed is None:
        raise ConfigurationError(
            "{microbatch_rng} and {dynamic} need a seed; pass seed, the same on all ranks"
        )
    assert pipeline_ranks is not None
    assert num_microbatches is not None
    assert num_layers is not None
    world_size = world_size or pipeline_ranks
    pipeline = _pipeline(config, pipeline_ranks, num_microbatches, world_size)
    build = build_of(pipeline, num_layers, mtp_num_layers=mtp_num_layers, layout=layout)
    runs = config.schedule is not None or config.dynamic is not None
    served = not runs and pipeline_ranks > 1 and pipeline.transport != "torch"
    activate_configuration(
        Active(
            config,
            pipeline if runs else None,
            transport_only=pipeline if served else None,
            world_size=world_size,
            seed=seed if config.draws_by_microbatch else None,
            asked=config,
        )
    )
    return build


def await_host(config: PipelineConfig) -> None:
    """Keep a configuration until a host (`megatron_ext/hosts/`) gives the sizes of its job."""
    _begin(config)
    activate_configuration(Active(config, asked=config, is_sized=False))


def _begin(config: PipelineConfig) -> None:
    """End the active configuration, and refuse what programs without flags cannot have."""
    clear_configuration()
    if config.disaggregation is not None:
        raise ConfigurationError(
            "{disaggregation} needs a training loop that supports both roles; start Megatron's own "
            "with --forward-backward-disaggregating"
        )


def _select_device(name: str) -> None:
    if name == "auto":
        return
    found = devices.take(name)
    if found.name != name:
        raise DeviceError(
            f"device {name} came after the {found.name} backend was armed (megatron.core was "
            f"imported before); call configure first, or set MEGATRON_EXT_DEVICE={name}"
        )


def _pipeline(
    config: PipelineConfig, pipeline_ranks: int, num_microbatches: int, world_size: int
) -> Pipeline:
    """Return the pipeline, after proving that its table exists."""
    name = config.schedule or base_table(config.chunks)
    twins = twins_of(name)
    if config.schedule is not None or config.dynamic is not None:
        check_ranks(name, pipeline_ranks, twins)
    if num_microbatches % twins:
        raise ConfigurationError(
            "{num_microbatches} {count} must be even for the two mirrored pipelines of {name}; "
            "use {fewer} or {more}",
            count=num_microbatches,
            name=name,
            fewer=num_microbatches - 1,
            more=num_microbatches + 1,
        )
    pipeline = Pipeline(
        replace(config, schedule=name),
        pipeline_ranks,
        num_microbatches // twins,
        over_torch=torch_is_best(config, world_size),
    )
    validate(pipeline.full)
    return pipeline
