"""Starts the ranks of a measurement with the tests' harness, and measures on each."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tests.fake_musa import build
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

from .ops import OpTimes, Sizes, Step
from .systems import System

if TYPE_CHECKING:
    from .stage import Probe


_T = TypeVar("_T")
DEVICE_COSTS = {"copy_us": 10.0, "copied_per_us": 20_000.0, "message_us": 30.0}
"""Of a copy between emulated devices and an operation of a communicator, beside their launch."""


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
    """Run a measurement on as many processes as the pipeline has ranks; return its values by rank.

    Args:
        measure: Takes system, sizes and `args`.
        system: What is measured.
        sizes: How much is run.
        args: More for `measure`.
        repeats: How often it runs the steps of `sizes`.
        replicas: Data-parallel replicas of the pipeline.
        device: The device backend of the ranks.
        env: What to add to their environment.

    Raises:
        RanksFailed: A rank failed, or they took much longer than their work.
    """
    work_s = sizes.work_s * (sizes.warmup + sizes.steps) * repeats
    limit_s = sizes.timeout_s + 4 * work_s
    return run_ranks(
        sizes.pp * replicas, measure, system, sizes, *args,
        timeout_s=limit_s, env=env, device=device,
    )  # fmt: skip


def emulated_device(sizes: Sizes, connections: int = 8) -> dict[str, Any]:
    """Return what makes `run` use the emulated device behind its host; `conditions` says its costs.

    Raises:
        SystemExit: It cannot be built; with the line that says so.
    """
    try:
        build.environment()
    except build.NoCompiler as error:
        raise SystemExit(f"the emulated device cannot be built: {error}") from None
    # A device's clock may lag one forward behind its host's.
    lag_us, costs = 1e6 * sizes.forward_s, DEVICE_COSTS
    env = queued(connections=connections, stuck_s=60, lag_us=lag_us, **costs)
    words = (
        f"{connections} hardware queues, a copy {costs['copy_us']:g} us and "
        f"{costs['copied_per_us'] / 1e3:g} GB/s, a message of a communicator "
        f"{costs['message_us']:g} us"
    )
    return {"device": "musa", "env": env, "conditions": words}


def clean_up_when_terminated() -> None:
    """Make SIGTERM end this process as an interrupt does: ranks and their files go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


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
        probe.cpu_s, cpu_s, begin_s = 0.0, time.process_time(), time.perf_counter()
        thread_s = time.thread_time()
        step()
        runtime_s = time.thread_time() - thread_s - probe.cpu_s
        host_waits = probe.finish()
        end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        records.append(Step(begin_s, end_s, *probe.take(), cpu_s, runtime_s, host_waits))
    probe.meet()  # nobody leaves while others still wait for its messages
    return records[sizes.warmup :]


def overhead_s(system: System, sizes: Sizes) -> float:
    """Return the processor time outside of ops, for each op, in a rank's best step, at most."""
    by_rank = run(measure, system, sizes)
    return max(min(step.runtime_s / len(step.ops) for step in steps) for steps in by_rank)


def prepare(
    system: System, sizes: Sizes, times: OpTimes | None = None, *, waits: bool = False
) -> tuple[Callable[[], object], Probe]:
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
        rank_cpus = cpus[rank :: int(os.environ["WORLD_SIZE"])]
        os.sched_setaffinity(0, rank_cpus or [cpus[rank % len(cpus)]])
    torch.set_num_threads(1)
    system.join(sizes.pp, device.distributed_backend, sizes.timeout_s)
    probe = system.probe(times or system.times(sizes), device.torch_device(rank))
    probe.waits = waits
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()  # what is there now stays: collections between steps need not look at it
    gc.disable()  # a collection would fall into somebody's op
    return step, probe
