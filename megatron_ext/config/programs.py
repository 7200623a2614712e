"""The configuration of programs that have no command line of Megatron's: `configure`."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext import devices
from megatron_ext.config.active import Active, activate_configuration, clear_configuration
from megatron_ext.config.build import ModelBuild, build_of, check_ranks
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.sized_pipeline import Pipeline, base_table, twins_of
from megatron_ext.config.wires import torch_is_best
from megatron_ext.errors import DeviceError
from megatron_ext.schedules.representation.validation import validate
from megatron_ext.trace import session

__all__ = ["configure"]


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
    """Do what `megatron_ext.configure` says."""
    clear_configuration()
    _take_device(config.device)
    if config.disaggregation is not None:
        raise ConfigurationError(
            "{disaggregation} needs a training loop that knows both roles, which are Megatron's "
            "own and the embedded one; start one with --forward-backward-disaggregating"
        )
    if config.draws_by_microbatch and seed is None:
        raise ConfigurationError(
            "{microbatch_rng} and {dynamic} need a seed of the run; add seed, the same on all ranks"
        )
    pipeline = _pipeline(config, pipeline_ranks, num_microbatches, world_size or pipeline_ranks)
    _check_layers(pipeline, num_layers, layout)
    build = build_of(pipeline, num_layers, mtp_num_layers=mtp_num_layers, layout=layout)
    runs = config.schedule is not None or config.dynamic is not None
    served = not runs and pipeline_ranks > 1 and pipeline.transport != "torch"
    activate_configuration(
        Active(
            config,
            pipeline if runs else None,
            transport_only=pipeline if served else None,
            seed=seed if config.draws_by_microbatch else None,
        )
    )
    session.start(session.Run(schedule=pipeline.full))
    return build


def _take_device(name: str) -> None:
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
            "{num_microbatches} {count} do not divide among the two mirrored pipelines of {name}; "
            "take {fewer} or {more}",
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
            "{num_layers} {count} do not divide into the {stages} stages of {name}; take {near}, "
            "or say which stage has which layers with {layout}",
            count=num_layers,
            stages=stages,
            name=pipeline.name,
            near=(num_layers // stages + 1) * stages,
        )
