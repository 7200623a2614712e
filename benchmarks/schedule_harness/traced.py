"""Steps of this package's executor, traced as training does it."""

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


def measure(system: System, sizes: Sizes, directory: Path | None) -> list[float]:
    """Return the seconds of each measured step of this rank; with a directory, traced into it."""
    from megatron_ext.trace import session

    session.start(
        Namespace(
            trace=directory is not None,
            trace_interval=None,
            trace_iterations=None,
            trace_dir=directory,
            pipeline_model_parallel_size=sizes.pp,
        )
    )
    step, _ = prepare(system, sizes)
    observer, found_s = session.current(), []
    for _ in range(sizes.warmup + sizes.steps):
        begin_together()
        begin_s = time.perf_counter()
        if observer is not None:
            observer.begin_step()
        step()
        if observer is not None:
            observer.end_step()
        found_s.append(time.perf_counter() - begin_s)
    begin_together()
    session.close()
    return found_s[sizes.warmup :]
