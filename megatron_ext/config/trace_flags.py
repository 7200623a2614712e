"""The training flags of traces and of the watchdog."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.config.sized_pipeline import base_table
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import generate
from megatron_ext.tools.trace import session

if TYPE_CHECKING:
    from megatron_ext.config.active import Active
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["add_flags", "run_of", "tracing"]

_SETTINGS = (
    "pipeline_schedule", "enable_bitpipe_schedule", "use_dpp", "dpp_policy",
    "dpp_extra_activations", "pipeline_transport", "pipeline_costs", "world_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "micro_batch_size", "global_batch_size", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts",
    "params_dtype", "recompute_granularity", "overlap_grad_reduce", "overlap_param_gather",
    "use_distributed_optimizer", "sequence_parallel",
)  # fmt: skip
"""Arguments that may explain a duration."""

_OF_TRACE = ("trace_interval", "trace_iterations", "trace_dir")


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add `--trace` and what goes with it, and `--hang-timeout`."""
    group.add_argument(
        "--trace",
        action="store_true",
        help="Record a timeline of each rank in benchmark/<run>/; see `megatron-ext aggregate` "
        "and `megatron-ext report`.",
    )
    group.add_argument(
        "--trace-interval",
        type=int,
        metavar="N",
        help=f"With --trace: length of an interval, in iterations (default: {Tracing.interval}).",
    )
    group.add_argument(
        "--trace-iterations",
        type=int,
        metavar="K",
        help="With --trace: record the first K iterations of each interval (default: "
        f"{Tracing().num_iterations}, or all of a shorter interval).",
    )
    group.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="With --trace: output folder of this run (default: in benchmark/, named after the "
        "run's sizes).",
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        help="End the job when a training step makes no progress for this long, and name the rank "
        "that the others wait for (default: the process groups' time-out applies).",
    )


def tracing(args: Namespace) -> Tracing | None:
    """Return the settings of `--trace`; None without it.

    Raises:
        ArgumentsError: The numbers are impossible, or `--trace` is missing.
    """
    if not getattr(args, "trace", False):
        for dest in _OF_TRACE:
            if getattr(args, dest, None) is not None:
                flag = f"--{dest.replace('_', '-')}"
                raise ArgumentsError(f"{flag} is for traces; add --trace, or leave it out")
        return None
    interval: int | None = args.trace_interval
    iterations: int | None = args.trace_iterations
    if interval is None:
        interval = max(Tracing.interval, iterations or 0)
    return Tracing(interval=interval, iterations=iterations, directory=args.trace_dir)


def run_of(args: Namespace, found: Active) -> session.Run:
    """Return the description of the run that a trace stores.

    Args:
        args: Arguments that Megatron has completed.
        found: The active configuration.
    """
    if found.config.tracing is None:
        return session.Run()
    return session.Run(
        schedule=_table(args, found),
        settings=_settings(args, found),
        iterations_done=lambda: int(getattr(args, "iteration", 0)),
    )


def _table(args: Namespace, found: Active) -> Schedule | None:
    """Return the table of a full batch; that of Megatron's own schedule if it runs."""
    if found.pipeline is not None:
        return found.pipeline.full
    count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if found.job is not None:
        return found.job.schedule(count)
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        return None
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    try:
        return generate(base_table(chunks), pp, count, chunks)
    except ScheduleError:
        return None  # Megatron runs a schedule that we have no table for


def _settings(args: Namespace, active: Active) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            found[name] = value if isinstance(value, bool | int | float) else str(value)
    found.setdefault("pipeline_schedule", "Megatron's own")
    found["transport"] = found.get("pipeline_transport", "torch")
    pipeline = active.pipeline
    if pipeline is not None:  # includes settings that other flags imply
        found |= {"pipeline_schedule": pipeline.name, "transport": pipeline.transport}
        found["stash_ratio"] = pipeline.config.stash_ratio
        if pipeline.dynamic is not None:
            found["dpp_policy"] = pipeline.dynamic.policy
            found["dpp_extra_activations"] = pipeline.dynamic.margin
    return found
