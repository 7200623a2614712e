"""Steps of this package's executor, with tracing as in training."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .rank import begin_together, prepare

if TYPE_CHECKING:
    from .ops import Sizes
    from .systems import System

__all__ = ["measure"]


def measure(system: System, sizes: Sizes, directory: Path) -> list[tuple[float, float]]:
    """Return pairs of seconds of this rank: a step that is not traced, and the one traced after it.

    Both are steps of one run, so what the machine does meanwhile meets both alike.

    Args:
        system: What is measured.
        sizes: Its `steps` are pairs.
        directory: Where the trace goes.
    """
    from megatron_ext.tracing import session

    session.start(
        Namespace(
            trace=True,
            trace_interval=2,
            trace_iterations=1,
            trace_dir=directory,
            pipeline_model_parallel_size=sizes.pp,
        )
    )
    step, _ = prepare(system, sizes)
    observer, found_s = session.current(), []
    assert observer is not None
    # The first of each two is traced; one more in the beginning, so that pairs end with it.
    for _ in range(2 * sizes.warmup + 1 + 2 * sizes.steps):
        begin_together()
        begin_s = time.perf_counter()
        observer.begin_step()
        step()
        observer.end_step()
        found_s.append(time.perf_counter() - begin_s)
    begin_together()
    session.close()
    measured = found_s[2 * sizes.warmup + 1 :]
    return list(zip(measured[::2], measured[1::2], strict=True))
