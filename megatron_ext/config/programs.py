"""The configuration of programs that have no command line of Megatron's: `configure`."""

from __future__ import annotations

from dataclasses import replace

import megatron_ext
from megatron_ext import devices
from megatron_ext.config.active import Active, activate_configuration, clear_configuration
from megatron_ext.config.build import ModelBuild, build_of, check_ranks
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.sized_pipeline import Pipeline, base_table, twins_of
from megatron_ext.config.wires import torch_is_best
from megatron_ext.errors import DeviceError
from megatron_ext.patches.registry import REGISTRY
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
    megatron_ext.activate()
    REGISTRY.raise_mismatches()
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
