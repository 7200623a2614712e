"""Starts a measurement's ranks with the tests' harness and measures on each of them."""

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
"""Costs, in addition to the launch, of a copy between emulated devices and of a communicator's
operation."""


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
    """Run a measurement in one process per pipeline rank, and return its values by rank.

    Args:
        measure: The function to call with `system`, `sizes` and `args`.
        system: What is measured.
        sizes: How much is run.
        args: Additional arguments for `measure`.
        repeats: How often it runs the steps in `sizes`, which scales the time-out.
        replicas: Number of data-parallel replicas of the pipeline.
        device: The ranks' device backend.
        env: Variables to add to the ranks' environment.

    Raises:
        RanksFailed: A rank failed, or the ranks took much longer than their work should take.
    """
    work_s = sizes.work_s * (sizes.warmup + sizes.steps) * repeats
    limit_s = sizes.timeout_s + 4 * work_s
    return run_ranks(
        sizes.pp * replicas, measure, system, sizes, *args,
        timeout_s=limit_s, env=env, device=device,
    )  # fmt: skip


def emulated_device(
    sizes: Sizes, connections: int = 8, **more_costs: float
) -> dict[str, Any]:
    """Return the keywords that make `run` use the emulated device. `conditions` lists its costs.

    `more_costs` uses the names in `tests/fake_musa/csrc/mode.h`.

    Raises:
        SystemExit: The device cannot be built. The message says why.
    """
    try:
        build.environment()
    except build.NoCompiler as error:
        raise SystemExit(f"the emulated device cannot be built: {error}") from None
    # A device's clock may lag one forward behind its host's.
    lag_us = 1e6 * sizes.forward_s
    costs = DEVICE_COSTS
    env = queued(
        connections=connections, stuck_s=60, lag_us=lag_us, **costs, **more_costs
    )
    words = (
        f"{connections} hardware queues, a copy {costs['copy_us']:g} us and "
        f"{costs['copied_per_us'] / 1e3:g} GB/s, a message of a communicator "
        f"{costs['message_us']:g} us"
    )
    return {"device": "musa", "env": env, "conditions": words}


def clean_up_when_terminated() -> None:
    """Make SIGTERM act like an interrupt, so ranks and their files get cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def measure(
    system: System, sizes: Sizes, times: Sequence[OpTimes] = (), waits: bool = False
) -> list[Step]:
    """Return this rank's records of all measured steps.

    Args:
        system: What is measured.
        sizes: How much is run.
        times: For each step, the times of its ops and messages. If empty, run `sizes.steps` steps
            with the system's times.
        waits: Whether messages take time.
    """
    times = times or [system.times(sizes)] * sizes.steps
    step, probe = prepare(system, sizes, times[0], waits=waits)
    records = []
    # The first steps connect the ranks, allocate memory and fill caches.
    for probe.times in [times[0]] * sizes.warmup + list(times):
        probe.meet()
        probe.cpu_s, cpu_s, begin_s = 0.0, time.process_time(), time.perf_counter()
        thread_s = time.thread_time()
        step()
        runtime_s = time.thread_time() - thread_s - probe.cpu_s
        host_waits = probe.finish()
        end_s = time.perf_counter()
        cpu_s = time.process_time() - cpu_s
        records.append(
            Step(begin_s, end_s, *probe.take(), cpu_s, runtime_s, host_waits)
        )
    probe.meet()  # no rank may exit while others wait for its messages
    return records[sizes.warmup :]


def overhead_s(system: System, sizes: Sizes) -> float:
    """Return the worst rank's processor time outside ops, per op, in its best step."""
    by_rank = run(measure, system, sizes)
    return max(
        min(step.runtime_s / len(step.ops) for step in steps) for steps in by_rank
    )


def prepare(
    system: System, sizes: Sizes, times: OpTimes | None = None, *, waits: bool = False
) -> tuple[Callable[[], object], Probe]:
    """Join the other ranks. Return a function that runs one step, and the probe that records it."""
    import torch  # not in the parent, which also imports this module

    from megatron_ext import devices

    device = devices.current()
    rank = int(os.environ["RANK"])
    device.bind(rank)
    if device.name == "cpu":
        # Pin each rank to separate CPUs, as launchers do. If there are too few, at
        # least neighbours get different ones. Otherwise, the kernel would wake a
        # receiver on its sender's CPU, where the sender continues with its next op,
        # even if another CPU is idle.
        cpus = sorted(os.sched_getaffinity(0))
        rank_cpus = cpus[rank :: int(os.environ["WORLD_SIZE"])]
        os.sched_setaffinity(0, rank_cpus or [cpus[rank % len(cpus)]])
    torch.set_num_threads(1)
    system.join(sizes.pp, device.distributed_backend, sizes.timeout_s)
    probe = system.probe(times or system.times(sizes), device.torch_device(rank))
    probe.waits = waits
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()  # existing objects stay, so collections can skip them
    gc.disable()  # a collection would disturb an op
    return step, probe
