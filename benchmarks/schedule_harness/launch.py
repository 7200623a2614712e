"""Starts the ranks of a measurement with the tests' harness."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from tests.ranks import run_ranks

if TYPE_CHECKING:
    from .ops import Sizes
    from .systems import System

__all__ = ["clean_up_when_terminated", "run"]

_T = TypeVar("_T")


def run(
    measure: Callable[..., _T],
    system: System,
    sizes: Sizes,
    *args: object,
    repeats: int = 1,
    replicas: int = 1,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Run a measurement on as many processes as the pipeline has ranks.

    Args:
        measure: Takes system, sizes and `args`.
        system: What is measured.
        sizes: How much is run.
        args: More for `measure`.
        repeats: How often it runs the steps of `sizes`.
        replicas: Data-parallel replicas of the pipeline.
        device: The device backend of the ranks.
        env: What to add to their environment.

    Returns:
        What it returned, by rank.

    Raises:
        RanksFailed: A rank failed, or they took much longer than their work.
    """
    work_s = 3 * sizes.forward_s * sizes.num_microbatches * (sizes.warmup + sizes.steps) * repeats
    limit_s = sizes.timeout_s + 4 * work_s
    return run_ranks(
        sizes.pp * replicas, measure, system, sizes, *args,
        timeout_s=limit_s, env=env, device=device,
    )  # fmt: skip


def clean_up_when_terminated() -> None:
    """Make SIGTERM end this process as an interrupt does: ranks and their files go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
