"""The training flags of traces and of the watchdog."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from pathlib import Path

from megatron_ext.errors import ArgumentsError
from megatron_ext.trace.recorder import Sampling

__all__ = ["add_flags", "hang_timeout_s", "sampling"]

_OF_TRACE = ("trace_interval", "trace_iterations", "trace_dir")


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add `--trace` and what goes with it, and `--hang-timeout`."""
    group.add_argument(
        "--trace",
        action="store_true",
        help="Record what each rank does when, into benchmark/<run>/; see `megatron-ext aggregate` "
        "and `megatron-ext report`.",
    )
    group.add_argument(
        "--trace-interval",
        type=int,
        metavar="N",
        help=f"Of --trace: every N iterations some are traced (default: {Sampling.interval}).",
    )
    group.add_argument(
        "--trace-iterations",
        type=int,
        metavar="K",
        help=f"Of --trace: the first K of each interval (default: {Sampling.iterations}, or all of "
        "a shorter interval).",
    )
    group.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="Of --trace: the folder of this run (default: by its sizes, in benchmark/).",
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        help="End the job when a training step makes no progress for so long, and say which rank "
        "the others wait for (default: wait as long as the process groups do).",
    )


def sampling(args: Namespace) -> Sampling | None:
    """Return which iterations `--trace` records; None: none.

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
        interval = max(Sampling.interval, iterations or 0)
    if interval < 1:
        raise ArgumentsError(f"--trace-interval {interval} must be at least 1")
    if iterations is None:
        iterations = min(Sampling.iterations, interval)
    if not 1 <= iterations <= interval:
        raise ArgumentsError(
            f"--trace-iterations {iterations} must be between 1 and --trace-interval {interval}"
        )
    return Sampling(interval, iterations)


def hang_timeout_s(args: Namespace) -> float | None:
    """Return `--hang-timeout`.

    Raises:
        ArgumentsError: It is not positive.
    """
    timeout_s: float | None = getattr(args, "hang_timeout", None)
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise ArgumentsError(f"--hang-timeout {timeout_s:g} must be a positive number of seconds")
    return timeout_s
