"""The measurement on one rank."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from .ops import OpTimes, Sizes, Step

if TYPE_CHECKING:
    from .systems import System

__all__ = ["measure"]


def measure(system: System, sizes: Sizes) -> list[Step]:
    """Run a system's steps on this rank, all ranks beginning each together."""
    import torch  # not by the parent of the ranks, which imports this module for its name

    from .stage import Probe

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=sizes.timeout_s))
    probe = Probe(OpTimes(sizes.forward_s, system.share(sizes.pp)))
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    records = []
    gc.disable()  # a collection would fall into somebody's op
    for _ in range(sizes.warmup + sizes.steps):
        gc.collect()
        torch.distributed.barrier()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        step()
        end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        records.append(Step(begin_s, end_s, *probe.take(), cpu_s))
    torch.distributed.barrier()
    return records[sizes.warmup :]
