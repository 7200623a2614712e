"""The measurements on one rank."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from .ops import OpTimes, Peaks, Sizes, Step

if TYPE_CHECKING:
    from .stage import Probe
    from .systems import System

__all__ = ["begin_together", "measure", "measure_memory", "prepare"]


def measure(
    system: System,
    sizes: Sizes,
    times: Sequence[OpTimes] = (),
    waits: bool = False,
) -> list[Step]:
    """Return what this rank recorded in each measured step.

    Args:
        system: What is measured.
        sizes: How much is run.
        times: For each step, the times that its ops and messages take; empty: `sizes.steps` steps
            with those of the system.
        waits: Whether messages take time.
    """
    step, probe = prepare(system, sizes, waits=waits)
    times = times or [probe.times] * sizes.steps
    records = []
    # The first steps connect ranks, allocate, and fill caches.
    for probe.times in [times[0]] * sizes.warmup + list(times):
        begin_together()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        step()
        end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        records.append(Step(begin_s, end_s, *probe.take(), cpu_s))
    begin_together()  # nobody leaves while others still wait for its messages
    return records[sizes.warmup :]


def measure_memory(*sizes: object) -> Peaks:
    """Return what this rank of a real model keeps; takes what `real_memory.measure` does."""
    from . import real_memory

    return real_memory.measure(*sizes)  # type: ignore[arg-type]


def prepare(
    system: System, sizes: Sizes, *, waits: bool = False
) -> tuple[Callable[[], None], Probe]:
    """Join the other ranks; return a function that runs one step, and what it records to."""
    import torch  # not by the parent of the ranks, which imports this module for its name

    from .stage import Probe

    # CPUs of its own, as launchers give; where there are too few, neighbours differ. Left alone,
    # the kernel wakes a receiver on the CPU of its sender, which goes on with its next op there,
    # while another CPU may sleep.
    rank, cpus = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[rank :: sizes.pp] or [cpus[rank % len(cpus)]])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=sizes.timeout_s))
    probe = Probe(system.times(sizes), waits=waits)
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()  # what is there now stays: collections between steps need not look at it
    gc.disable()  # a collection would fall into somebody's op
    return step, probe


def begin_together() -> None:
    """Wait for all ranks."""
    import torch

    gc.collect()
    torch.distributed.barrier()
