"""`configure`, the entry point for programs with their own training loop."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import overload

from megatron_ext import devices, hosts, patches
from megatron_ext.config.active import Pipeline, clear_configuration, required
from megatron_ext.config.cut import UserCut
from megatron_ext.config.entrances import await_host, log, put_in_force
from megatron_ext.config.flags import FLAGS, in_fields, requested_flags
from megatron_ext.config.hosting import inspect
from megatron_ext.config.model_build import ModelBuild
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.config.refusals import Preflight
from megatron_ext.config.stages import stage_arguments
from megatron_ext.errors import (
    ArgumentsError,
    ConfigurationError,
    DeviceError,
    ScheduleError,
    reworded,
)
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.schedules.generators.catalog import default_schedule


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
    """Activate a configuration and return the settings to build the model with.

    Use this in programs that do not parse Megatron's command line. Call it in every process of the
    job, with the same arguments, before you create process groups and the model. If `config.device`
    is set, call it before `megatron.core` is imported. Afterwards,
    `megatron.core.pipeline_parallel.get_forward_backward_func` returns the schedule. The
    configuration remains active until the next call, or until `deconfigure`.

    If no size is passed, the function returns None. The configuration then waits for a host that
    knows the sizes and builds the model: Megatron-Bridge's `pretrain` or `finetune`.

    Args:
        config: The settings.
        pipeline_ranks: Number of ranks in one pipeline, or in both if the schedule mirrors two.
        num_microbatches: Micro-batches that these ranks run in one step, for both mirrored
            pipelines together.
        num_layers: Transformer layers in the model, excluding multi-token prediction layers.
        mtp_num_layers: Multi-token prediction layers.
        layout: The layers of each stage, in Megatron's notation. Default: an equal number in each.
        world_size: Number of ranks in the job. Default: one pipeline.
        seed: The run's seed. Required if random numbers are drawn by micro-batch, as with
            `dynamic`.

    Returns:
        The settings to build the model with, or None if no size was passed.

    Raises:
        UserError: A size is missing or invalid, the sizes do not fit the configuration, the device
            was chosen too late, or no host is installed.
        UpstreamMismatch: Active patches do not fit the installed Megatron.
    """
    _check_entrance(config)
    has_sizes = _check_sizes(
        pipeline_ranks=pipeline_ranks,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        world_size=world_size,
        mtp_num_layers=mtp_num_layers,
        seed=seed,
        layout=layout,
    )
    # A second call replaces the configuration from the first call.
    clear_configuration()
    # Select the device before arming the patches: they import Megatron for the selected device.
    if config.device != "auto":
        _take_device(config.device)
    patches.arm()
    hosts.arm()
    # Fail before the program builds a model that the patches do not fit.
    REGISTRY.raise_mismatches()
    if config.disaggregation is not None:
        raise ArgumentsError(
            "disaggregation needs a training loop that supports both roles; start Megatron's own "
            "training loop with --forward-backward-disaggregating"
        )
    if not has_sizes:
        hosts.check_some_host()
        await_host(config)
        return None
    assert pipeline_ranks is not None
    assert num_microbatches is not None
    assert num_layers is not None
    sizes = _Sizes(
        pipeline_ranks=pipeline_ranks,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        mtp_num_layers=mtp_num_layers,
        layout=layout,
        world_size=world_size or pipeline_ranks,
    )
    if config.draws_by_microbatch and seed is None:
        raise ConfigurationError(
            "{microbatch_rng} and {dynamic} need a seed; pass the same seed on all ranks"
        )
    _check_twins(config, sizes)
    return _put_in_force(config, sizes, seed)


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a job, as passed to `configure`."""

    pipeline_ranks: int
    num_microbatches: int
    num_layers: int
    mtp_num_layers: int | None
    layout: str | None
    world_size: int


def _check_entrance(config: object) -> None:
    """Check the type of `config`, and that the environment allows a configuration from Python.

    Raises:
        ArgumentsError: The type is wrong, or an environment variable conflicts with `configure`.
    """
    if not isinstance(config, PipelineConfig):
        raise ArgumentsError(
            f"configure takes a PipelineConfig, not a {type(config).__name__}; for example "
            'configure(PipelineConfig(schedule="zb-v"), pipeline_ranks=4, ...)'
        )
    if os.environ.get("MEGATRON_EXT_DISABLE", "0") == "1":
        raise ArgumentsError(
            "MEGATRON_EXT_DISABLE=1 disables everything that configure activates; unset it, or "
            "remove configure to use Megatron's own schedule"
        )
    # Reject flags instead of choosing one of two configurations.
    flags = requested_flags()
    if flags:
        raise ArgumentsError(
            f"configure was called, but {FLAGS} is also set, to {' '.join(flags)!r}; remove "
            "one of them"
        )


def _check_sizes(**arguments: object) -> bool:
    """Check the sizes and the layout passed to `configure`; return whether any were passed.

    Raises:
        ArgumentsError: A value is invalid, or some sizes are missing.
    """
    # None means that the argument was not passed.
    sizes = {name: value for name, value in arguments.items() if value is not None}
    for name, value in sizes.items():
        if name == "layout":
            if not isinstance(value, str):
                raise ArgumentsError(
                    f"layout {value!r} must be a string in Megatron's notation"
                )
            continue
        minimum = 0 if name in ("mtp_num_layers", "seed") else 1
        # Reject bool explicitly, because it is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ArgumentsError(
                f"{name} {value!r} must be a whole number of at least {minimum}"
            )
    required_sizes = ("pipeline_ranks", "num_microbatches", "num_layers")
    missing = [name for name in required_sizes if name not in sizes]
    if missing and sizes:
        raise ArgumentsError(
            f"configure needs all sizes; pass {', '.join(missing)} too"
        )
    return bool(sizes)


def _take_device(name: str) -> None:
    """Select a device.

    Raises:
        DeviceError: Another device has already been selected.
    """
    armed_name = devices.take(name).name
    if armed_name != name:
        raise DeviceError(
            f"device {name} was requested after the {armed_name} backend had been selected "
            f"(megatron.core was imported before); call configure first, or set "
            f"MEGATRON_EXT_DEVICE={name}"
        )


def _check_twins(config: PipelineConfig, sizes: _Sizes) -> None:
    num_microbatches = sizes.num_microbatches
    if num_microbatches % config.twins:
        schedule = config.schedule or default_schedule(config.chunks)
        raise ConfigurationError(
            f"num_microbatches {num_microbatches} must be even for the two mirrored pipelines of "
            f"{schedule}; use {num_microbatches - 1} or {num_microbatches + 1}"
        )


def _put_in_force(
    config: PipelineConfig,
    sizes: _Sizes,
    seed: int | None,
) -> ModelBuild:
    """Check a configuration against the sizes, activate it, and return the model's settings."""
    requested = config
    arguments = _megatron_arguments(config, sizes)
    # A single rank under Megatron's own schedule sends no messages, so nothing needs checking.
    preflight = Preflight()
    if config.schedule or config.dynamic or sizes.pipeline_ranks > 1:
        preflight = inspect(arguments, config)
    try:
        preflight.raise_refusals(in_fields)
        config = preflight.config or requested
        pipeline = preflight.pipeline or preflight.transport_only
        schedule = config.schedule or default_schedule(config.chunks)
        if pipeline is None:
            pipeline = _stock_pipeline(config, sizes, arguments)
            schedule = pipeline.name
        cut_arguments = preflight.arguments
        # `inspect` splits the model only for our schedules. Split it by the same rules if
        # Megatron's own schedule runs.
        if preflight.pipeline is None:
            cut = UserCut.of(vars(arguments))
            built = stage_arguments(arguments, cut, pipeline.placement, schedule)
            cut_arguments = built.values
    except (ArgumentsError, ScheduleError) as error:
        # The rules name flags, but the caller knows the fields of `PipelineConfig`.
        kind = ScheduleError if isinstance(error, ScheduleError) else ArgumentsError
        raise kind(reworded(str(error), in_fields)) from None
    put_in_force(preflight, requested, seed)
    # Log once per host.
    if required().environment.local_rank == 0:
        lines = [
            reworded(line, in_fields) for line in preflight.changes + preflight.notices
        ]
        log(*lines)
    placement = pipeline.placement
    num_chunks = placement.num_stages // placement.num_ranks
    # With 1 instead of None, Megatron would interleave the only chunk.
    virtual_size = num_chunks if num_chunks > 1 else None
    layout = cut_arguments.get("pipeline_model_parallel_layout", sizes.layout)
    return ModelBuild(
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_model_parallel_layout=layout,
        replicas=config.twins,
        num_microbatches=pipeline.num_microbatches,
        variable_seq_lengths=config.variable_seq_lengths,
        stages_of=placement.stages_of,
    )


def _megatron_arguments(config: PipelineConfig, sizes: _Sizes) -> Namespace:
    """Return the sizes under Megatron's argument names, which the rules use."""
    # Attribute the program's other parallelism to tensor parallelism. Then there is
    # only one replica, whose global batch consists of one pipeline's micro-batches.
    tensor_parallel_size = max(1, sizes.world_size // sizes.pipeline_ranks)
    # A layout sets the stages per rank.
    num_chunks = None if sizes.layout else config.chunks
    return Namespace(
        world_size=sizes.world_size,
        tensor_model_parallel_size=tensor_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_ranks,
        num_virtual_stages_per_pipeline_rank=num_chunks,
        pipeline_model_parallel_layout=sizes.layout,
        num_layers=sizes.num_layers,
        mtp_num_layers=sizes.mtp_num_layers,
        micro_batch_size=1,
        global_batch_size=sizes.num_microbatches,
    )


def _stock_pipeline(
    config: PipelineConfig,
    sizes: _Sizes,
    arguments: Namespace,
) -> Pipeline:
    """Return the pipeline that Megatron's own schedule runs."""
    # A layout may have several stages per rank, except on a single rank, which holds one stage.
    num_chunks = 1
    if sizes.pipeline_ranks > 1:
        num_chunks = UserCut.of(vars(arguments)).chunks
    stock_config = replace(
        config,
        schedule=config.schedule or default_schedule(num_chunks),
        chunks=num_chunks if num_chunks > 1 else None,
    )
    return Pipeline(
        stock_config,
        sizes.pipeline_ranks,
        sizes.num_microbatches,
    )
