"""The measurements on one rank whose device runs behind its host."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from .noise import SCENARIOS, NoisyTimes
from .ops import OpTimes, Step

if TYPE_CHECKING:
    from .ops import Sizes
    from .systems import System

__all__ = ["DeviceStep", "measure_on_device"]


class DeviceStep(NamedTuple):
    """Records of one rank in one step."""

    step: Step
    host_waits: dict[str, int]
    """How often the host waited for the device, by line."""


def measure_on_device(
    system: System, sizes: Sizes, scenario: str, repetitions: int = 1
) -> list[DeviceStep]:
    """Return what this rank recorded in each measured step of a scenario.

    Args:
        system: What is measured.
        sizes: Its `steps` are one repetition; they differ in their draws.
        scenario: Name of the disturbance.
        repetitions: How often these steps run, with the same draws.
    """
    import torch  # not by the parent of the ranks, which imports this module for its name
    from torch_musa import host_waits

    from megatron_ext import devices

    from .device_probe import DeviceProbe

    device = devices.current()
    rank = int(os.environ["RANK"])
    device.bind(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        device.distributed_backend, timeout=timedelta(seconds=sizes.timeout_s)
    )
    share, rank_of = system.share(sizes.pp), system.placement(sizes.pp).rank_of
    probe = DeviceProbe(OpTimes(sizes.forward_s, share), device.torch_device(rank))
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay launches
    found = []
    warmup = range(-sizes.warmup, 0)
    for number in (*warmup, *list(range(sizes.steps)) * repetitions):
        probe.times = NoisyTimes(
            sizes.forward_s, share, SCENARIOS[scenario], rank_of, 0, max(0, number)
        )
        gc.collect()
        probe.set_clock()
        torch.distributed.barrier()
        host_waits.reset()
        begin_s = time.perf_counter()
        step()
        waits = {
            f"{what} at {line}": count
            for (what, line, thread), count in host_waits.by_line().items()
            if "megatron-ext" not in thread  # those beside a staged transport are there to wait
        }
        device.synchronize()
        end_s = time.perf_counter()
        found.append(DeviceStep(Step(begin_s, end_s, *probe.take(), 0.0), waits))
    torch.distributed.barrier()  # nobody leaves while others still wait for its messages
    return found[sizes.warmup :]
