"""The measurements on one rank."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .ops import OpTimes, Peaks, Sizes, Step

if TYPE_CHECKING:
    from .stage import Probe
    from .systems import System

__all__ = ["measure", "measure_memory", "measure_overhead", "prepare"]


def measure(
    system: System, sizes: Sizes, times: Sequence[OpTimes] = (), waits: bool = False
) -> list[Step]:
    """Return what this rank recorded in each measured step.

    Args:
        system: What is measured.
        sizes: How much is run.
        times: For each step, the times that its ops and messages take; empty: `sizes.steps` steps
            with those of the system.
        waits: Whether messages take time.
    """
    times = times or [system.times(sizes)] * sizes.steps
    step, probe = prepare(system, sizes, times[0], waits=waits)
    records = []
    # The first steps connect ranks, allocate, and fill caches.
    for probe.times in [times[0]] * sizes.warmup + list(times):
        probe.meet()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        step()
        host_waits = probe.finish()
        end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        records.append(Step(begin_s, end_s, *probe.take(), cpu_s, host_waits))
    probe.meet()  # nobody leaves while others still wait for its messages
    return records[sizes.warmup :]


def measure_overhead(system: System, sizes: Sizes) -> float:
    """Return the processor time of this rank outside of ops, for each op, in the best step."""
    step, probe = prepare(system, sizes)
    found_s = []
    for _ in range(sizes.warmup + sizes.steps):
        probe.meet()
        probe.cpu_s, begin_s = 0.0, time.thread_time()  # of this thread: waits do not count
        step()
        spent_s = time.thread_time() - begin_s - probe.cpu_s
        ops, _ = probe.take()
        found_s.append(spent_s / len(ops))
    probe.meet()
    return min(found_s[sizes.warmup :])


def measure_memory(*sizes: object) -> Peaks:
    """Return what this rank of a real model keeps; takes what `real_memory.measure` does."""
    from . import real_memory

    return real_memory.measure(*sizes)  # type: ignore[arg-type]


def prepare(
    system: System, sizes: Sizes, times: OpTimes | None = None, *, waits: bool = False
) -> tuple[Callable[[], None], Probe]:
    """Join the other ranks; return a function that runs one step, and what it records to."""
    import torch  # not by the parent of the ranks, which imports this module for its name

    from megatron_ext import devices

    device, rank = devices.current(), int(os.environ["RANK"])
    device.bind(rank)
    if device.name == "cpu":
        # CPUs of its own, as launchers give; where there are too few, neighbours differ. Left
        # alone, the kernel wakes a receiver on the CPU of its sender, which goes on with its next
        # op there, while another CPU may sleep.
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cpus[rank :: sizes.pp] or [cpus[rank % len(cpus)]])
    torch.set_num_threads(1)
    system.join(sizes.pp, device.distributed_backend, sizes.timeout_s)
    probe = system.probe(times or system.times(sizes), device.torch_device(rank))
    probe.waits = waits
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()  # what is there now stays: collections between steps need not look at it
    gc.disable()  # a collection would fall into somebody's op
    return step, probe
