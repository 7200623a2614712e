"""The training flags of traces and of the watchdog."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from pathlib import Path

from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.errors import ArgumentsError

__all__ = ["add_flags", "tracing"]

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
