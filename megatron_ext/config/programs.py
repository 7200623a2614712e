"""`configure`: the configuration of programs that do not use Megatron's command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import megatron_ext
from megatron_ext import devices, hosts
from megatron_ext.config.active import Active, activate_configuration, clear_configuration
from megatron_ext.config.hosting import torch_is_best
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.sized_pipeline import Pipeline, base_table, twins_of
from megatron_ext.config.stages import ModelBuild, build_of, check_ranks
from megatron_ext.errors import ArgumentsError, DeviceError
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Sizes", "await_host", "configure"]


class _Needed(TypedDict):
    pipeline_ranks: int
    """Ranks of one pipeline, of both where a schedule mirrors two."""
    num_microbatches: int
    """Of one step of these ranks, both mirrored pipelines together."""
    num_layers: int
    """Transformer layers of the model, without those of multi-token prediction."""


class Sizes(_Needed, total=False):
    """The sizes of a job, keywords of `configure`."""

    mtp_num_layers: int | None
    """Layers of multi-token prediction."""
    layout: str | None
    """Which layers each stage has, in Megatron's notation; None: the same number in each."""
    world_size: int | None
    """Ranks of the job; None: one pipeline."""
    seed: int | None
    """Of the run; needed where random numbers are drawn by micro-batch."""


@overload
def configure(config: PipelineConfig) -> None: ...


@overload
def configure(config: PipelineConfig, **sizes: Unpack[Sizes]) -> ModelBuild: ...


def configure(config: PipelineConfig, **sizes: Any) -> ModelBuild | None:
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
        **sizes: The sizes of the job, see `Sizes`: `pipeline_ranks`, `num_microbatches`,
            `num_layers`, and where needed `mtp_num_layers`, `layout`, `world_size`, `seed`.

    Raises:
        UserError: A size is missing or unknown, the sizes do not fit the configuration, the device
            was named too late, or no host is installed.
        UpstreamMismatch: Active patches do not fit the installed Megatron.
    """
    clear_configuration()
    _select_device(config.device)
    megatron_ext.activate()
    REGISTRY.raise_mismatches()
    if sizes:
        return _configure(config, _complete(sizes))
    hosts.check_some_host()
    await_host(config)
    return None


def _complete(sizes: dict[str, Any]) -> Sizes:
    missing = [name for name in _Needed.__annotations__ if name not in sizes]
    if missing:
        raise ArgumentsError(f"configure needs all sizes; give {', '.join(missing)} too")
    unknown = [name for name in sizes if name not in Sizes.__annotations__]
    if unknown:
        raise ArgumentsError(
            f"configure has no size {unknown[0]}; sizes are {', '.join(Sizes.__annotations__)}, "
            "settings go into the PipelineConfig"
        )
    return cast("Sizes", sizes)


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


def _configure(config: PipelineConfig, sizes: Sizes) -> ModelBuild:
    _begin(config)
    seed = sizes.get("seed") if config.draws_by_microbatch else None
    if config.draws_by_microbatch and seed is None:
        raise ConfigurationError(
            "{microbatch_rng} and {dynamic} need a seed; pass seed, the same on all ranks"
        )
    ranks, layers, layout = sizes["pipeline_ranks"], sizes["num_layers"], sizes.get("layout")
    world_size = sizes.get("world_size") or ranks
    pipeline = _pipeline(config, ranks, sizes["num_microbatches"], world_size)
    _check_layers(pipeline, layers, layout)
    build = build_of(pipeline, layers, mtp_num_layers=sizes.get("mtp_num_layers"), layout=layout)
    runs = config.schedule is not None or config.dynamic is not None
    served = not runs and ranks > 1 and pipeline.transport != "torch"
    activate_configuration(
        Active(
            config,
            pipeline if runs else None,
            transport_only=pipeline if served else None,
            world_size=world_size,
            seed=seed,
            asked=config,
        )
    )
    return build


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


def _check_layers(pipeline: Pipeline, num_layers: int, layout: str | None) -> None:
    stages = pipeline.placement.num_stages
    if layout is None and num_layers % stages:
        raise ConfigurationError(
            "{num_layers} {count} must be a multiple of the {stages} stages of {name}; use {near}, "
            "or give each stage its layers with {layout}",
            count=num_layers,
            stages=stages,
            name=pipeline.name,
            near=(num_layers // stages + 1) * stages,
        )
