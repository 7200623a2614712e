"""The measurements on one rank."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from .noise import SCENARIOS, NoisyTimes
from .ops import Peaks, Sizes, Step

if TYPE_CHECKING:
    from .stage import Probe
    from .systems import System

__all__ = [
    "begin_together",
    "measure",
    "measure_disturbed",
    "measure_memory",
    "measure_overhead",
    "prepare",
]


def measure(system: System, sizes: Sizes) -> list[Step]:
    """Return what this rank recorded in each measured step."""
    step, probe = prepare(system, sizes)
    records = []
    for _ in range(sizes.warmup + sizes.steps):
        begin_together()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        step()
        end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        records.append(Step(begin_s, end_s, *probe.take(), cpu_s))
    begin_together()  # nobody leaves while others still wait for its messages
    return records[sizes.warmup :]


def measure_disturbed(
    system: System, sizes: Sizes, names: Sequence[str], rounds: int = 1
) -> list[list[Step]]:
    """Return what this rank recorded in each step of each scenario, round after round.

    Args:
        system: What is measured.
        sizes: Its `steps` are those of one scenario in one round; they differ in their draws.
        names: The scenarios, all of which delay messages, or none.
        rounds: How often all of that is done, with the same draws; see `Scenario.repetitions`.
    """
    scenarios = [SCENARIOS[name] for name in names]
    step, probe = prepare(system, sizes, waits=scenarios[0].delays_messages)
    rank_of = system.placement(sizes.pp).rank_of
    records: list[list[Step]] = [[] for _ in scenarios]

    def take(index: int, number: int) -> Step:
        probe.times = NoisyTimes(
            sizes.forward_s, system.share(sizes.pp), scenarios[index], rank_of, 0, number
        )
        begin_together()
        begin_s = time.perf_counter()
        step()
        return Step(begin_s, time.perf_counter(), *probe.take(), 0.0)

    for number in range(-sizes.warmup, 0):
        take(0, number)
    for finished in range(rounds):
        for index, record in enumerate(records):
            if finished < scenarios[index].repetitions(rounds):
                record += [take(index, number) for number in range(sizes.steps)]
    begin_together()
    return records


def measure_overhead(system: System, sizes: Sizes) -> float:
    """Return the processor time of this thread outside of ops, for each op, in the best step."""
    step, probe = prepare(system, sizes)
    found_s = []
    for _ in range(sizes.warmup + sizes.steps):
        begin_together()
        probe.cpu_s, begin_s = 0.0, time.thread_time()
        step()
        outside_s = time.thread_time() - begin_s - probe.cpu_s
        ops, _ = probe.take()
        found_s.append(outside_s / len(ops))
    begin_together()
    return min(found_s[sizes.warmup :])


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

    _bind(sizes.pp)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=sizes.timeout_s))
    probe = Probe(system.times(sizes), waits=waits)
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()  # what is there now stays: collections between steps need not look at it
    gc.disable()  # a collection would fall into somebody's op
    return step, probe


def _bind(num_ranks: int) -> None:
    """Give this rank CPUs of its own, as launchers do; where there are too few, neighbours differ.

    Left alone, the kernel wakes a receiver on the CPU of its sender, which goes on with its next
    op there, while another CPU may sleep.
    """
    rank, cpus = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[rank::num_ranks] or [cpus[rank % len(cpus)]])


def begin_together() -> None:
    """Wait for all ranks."""
    import torch

    gc.collect()
    torch.distributed.barrier()
