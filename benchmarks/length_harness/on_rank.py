"""The measurement on one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.schedule_harness.ops import Sizes, Step
from benchmarks.schedule_harness.rank import begin_together, prepare

from .ways import ScaledTimes

if TYPE_CHECKING:
    from benchmarks.schedule_harness.systems import System

__all__ = ["measure"]


def measure(system: System, sizes: Sizes, rows: Sequence[tuple[float, ...]]) -> list[Step]:
    """Return what this rank recorded in one step for each row of scales."""
    step, probe = prepare(system, sizes)
    share = system.share(sizes.pp)

    def take(row: tuple[float, ...]) -> Step:
        probe.times = ScaledTimes(sizes.forward_s, share, row)
        begin_together()
        begin_s = time.perf_counter()
        step()
        return Step(begin_s, time.perf_counter(), *probe.take(), 0.0)

    for _ in range(sizes.warmup):
        take((0.2,) * sizes.num_microbatches)
    records = [take(row) for row in rows]
    begin_together()
    return records
