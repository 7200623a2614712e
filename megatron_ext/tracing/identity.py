"""Provides this rank's identity and its run's settings for the first line of its trace file."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext import devices
from megatron_ext.config.batches import batches_of
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.sizes import layout_text
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import default_schedule, generate
from megatron_ext.tracing.records import Header, directory_name
from megatron_ext.upstream.releases import core_version
from megatron_ext.upstream.signatures import megatron_arguments
from megatron_ext.version import __version__, installed

if TYPE_CHECKING:
    from megatron_ext.config.active import Active
    from megatron_ext.schedules.table.actions import Schedule

_SETTINGS = (
    "pipeline_costs",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_experts",
    "params_dtype",
    "recompute_granularity",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "sequence_parallel",
)
"""Megatron arguments that may explain a duration. Our own settings are in the configuration."""


class Identity(NamedTuple):
    """The data that a recorder needs to create its file."""

    directory: Path
    """The run's folder."""
    header: Header
    schedule: Schedule | None
    """The table for a full batch, on the first rank; None on other ranks or without a table."""


def identity_of(configuration: Active) -> Identity:
    """Return this rank's identity. Megatron's process groups must exist."""
    args = megatron_arguments() or getattr(configuration.host, "arguments", None)
    place = _place(configuration)
    header = Header(
        place.rank,
        place.data,
        place.pipeline,
        place.tensor,
        sizes=place.sizes,
        num_ranks=place.num_ranks,
        host=socket.gethostname(),
        clock=_clock_name(),
        # Keep these two lines together, because readers use them to convert this clock to the time
        # of day.
        clock_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        settings=settings_of(configuration, args),
        run="/".join(filter(None, configuration.environment.run)),
    )
    tracing = configuration.config.tracing
    assert tracing is not None
    is_dynamic = configuration.config.dynamic is not None
    name = directory_name(place.sizes, dynamic=is_dynamic)
    default = Path("benchmark") / name
    directory = Path(tracing.directory or default)
    # All ranks share the table, so only one rank writes it.
    schedule = None
    if place.rank == 0:
        schedule = _schedule(configuration, args)
    return Identity(directory, header, schedule)


class _Place(NamedTuple):
    """A rank's position in its job and its groups; see `Header`."""

    rank: int
    num_ranks: int
    data: int
    pipeline: int
    tensor: int
    sizes: tuple[int, int, int]


def _place(configuration: Active) -> _Place:
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    # A file's name contains three ranks, so the data rank must distinguish context-parallel ranks
    # too.
    data_size = groups.get_data_parallel_world_size(with_context_parallel=True)
    pipeline_size = groups.get_pipeline_model_parallel_world_size()
    data = groups.get_data_parallel_rank(with_context_parallel=True)
    tensor = groups.get_tensor_model_parallel_rank()
    job = configuration.job
    # In a disaggregated job, forward ranks are the first half of the pipeline, and backward ranks
    # the second half.
    if job is not None:
        return _Place(
            rank=job.rank,
            num_ranks=job.ranks.num_ranks,
            data=data,
            pipeline=job.position,
            tensor=tensor,
            sizes=(data_size, 2 * pipeline_size, job.ranks.tp),
        )
    tensor_size = groups.get_tensor_model_parallel_world_size()
    return _Place(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        data=data,
        pipeline=groups.get_pipeline_model_parallel_rank(),
        tensor=tensor,
        sizes=(data_size, pipeline_size, tensor_size),
    )


def _clock_name() -> str:
    """Return a name for this boot of the host; ranks with the same name share a clock."""
    try:
        # Containers on one host have different host names, but share its clock and boot id.
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return boot_id.strip()
    except OSError:
        return socket.gethostname()


def settings_of(configuration: Active, args: Any) -> dict[str, Any]:
    """Return versions and the settings that may explain a duration."""
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(args, name, None)
        if value is None or value is False:
            continue
        # Other values, such as dtypes and enumerations, cannot be written as JSON.
        is_number = isinstance(value, bool | int | float)
        settings[name] = value if is_number else str(value)
    layout = layout_text(getattr(args, "pipeline_model_parallel_layout", None))
    if layout is not None:
        settings["pipeline_model_parallel_layout"] = layout
    settings["pipeline_schedule"] = "Megatron's own"
    settings["transport"] = "torch"
    if configuration.job is not None:
        settings["pipeline_schedule"] = "fbd"
        settings["transport"] = configuration.config.wire
    settings["device"] = devices.current().name
    # Ranks that share CPUs slow each other down, so forecasts need to know each rank's CPUs.
    cpus = sorted(os.sched_getaffinity(0))
    settings["cpus"] = ",".join(map(str, cpus))
    settings["megatron_ext"] = __version__
    settings["megatron-core"] = core_version() or "unknown"
    settings["torch"] = installed("torch") or "unknown"
    settings["python"] = platform.python_version()
    pipeline = configuration.pipeline
    connected = pipeline or configuration.transport_only
    if connected is not None:
        settings["transport"] = connected.transport
    # The pipeline's configuration includes settings that other flags imply.
    if pipeline is not None:
        settings["pipeline_schedule"] = pipeline.name
        settings["stash_ratio"] = pipeline.config.stash_ratio
        for rules in feature_rules():
            settings |= rules.recorded(pipeline.config)
        if pipeline.dynamic is not None:
            settings["dpp_policy"] = pipeline.dynamic.policy
            if pipeline.config.has_table_per_step:
                margin = pipeline.margin_by_length
            else:
                margin = pipeline.dynamic.margin
            settings["dpp_extra_activations"] = margin
    return settings


def _schedule(configuration: Active, args: Any) -> Schedule | None:
    """Return the table for a full batch; None without a pipeline or a matching table."""
    connected = configuration.pipeline or configuration.transport_only
    if connected is not None:
        return connected.full
    if args is None:
        return None
    job = configuration.job
    pp = args.pipeline_model_parallel_size
    if pp < 2 and job is None:
        return None
    num_microbatches = batches_of(args, pp, 1).num_microbatches
    if job is not None:
        return job.schedule(num_microbatches)
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    try:
        return generate(default_schedule(chunks), pp, num_microbatches, chunks)
    except ScheduleError:
        return None  # Megatron accepts sizes that we have no table for
