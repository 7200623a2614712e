"""The probe for a device that runs behind its host.

The tests' emulated device spends the time of each op, and the host only launches it. The kernel
that spends the time is the first one of its op, because in real training, too, a device starts an
op's first kernel while the host is still launching the others. Events in the device's stream before
and after an op provide its times.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch_musa import host_waits

from megatron_ext import devices
from megatron_ext.schedules import Kind

from .ops import Op, OpTimes
from .stage import Probe

_CLOCK_SAMPLES = 10


class DeviceProbe(Probe):
    """Makes the device spend the time of ops, and reads that time from events."""

    def __init__(self, times: OpTimes, device: torch.device) -> None:
        super().__init__(times, device)
        self.timed: list[tuple[tuple[int, Kind, int], torch.Event, torch.Event]] = []
        """Ops with the events around them."""

    def meet(self) -> None:
        """Wait for all ranks, and relate the idle device's stream to the host's clock."""
        best_s = float("inf")
        for _ in range(_CLOCK_SAMPLES):
            event = devices.current().timing_event()
            begin_s = time.perf_counter()
            event.record()
            devices.current().synchronize()
            end_s = time.perf_counter()
            if end_s - begin_s < best_s:
                best_s = end_s - begin_s
                self._zero, self._zero_s = event, (begin_s + end_s) / 2
        super().meet()
        host_waits.reset()

    def finish(self) -> int:
        """Wait until the device finishes the step. Return how often the host had waited before."""
        waits = 0
        for (_, _, thread), count in host_waits.by_line().items():
            if (
                "megatron-ext" not in thread
            ):  # a staged transport's threads are supposed to wait
                waits += count
        devices.current().synchronize()
        return waits

    def op(
        self, kind: Kind, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Enqueue an op's time, and record the device's work in this context as that op."""
        return TimedOp(self, (stage, kind, microbatch))

    def spend(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Do nothing, because the running op has already enqueued its time."""

    def enqueue(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Enqueue a kernel that takes as long as an op."""
        lasts_us = 1e6 * self.times.seconds(kind, stage, microbatch)
        torch.ops.fake_musa.spend(self.device.index, lasts_us)

    def take(self) -> tuple[list[Op], float]:
        """Return the ops, which the device must have finished, and the peak since the last call."""
        ops = [
            Op(*name, self._at_s(begin), self._at_s(end))
            for name, begin, end in self.timed
        ]
        self.timed, peak, self.peak_live = [], self.peak_live, 0
        return ops, peak

    def _at_s(self, event: torch.Event) -> float:
        return self._zero_s + 1e-3 * self._zero.elapsed_time(event)


class TimedOp:
    """Records events before and after the work launched inside `with`: one op, or a pair's two."""

    def __init__(self, probe: DeviceProbe, *names: tuple[int, Kind, int]) -> None:
        self._probe, self._names = probe, names
        self._begin = devices.current().timing_event()
        self._end = devices.current().timing_event()

    def __enter__(self) -> None:
        self._begin.record()
        for stage, kind, microbatch in self._names:
            self._probe.current = stage, microbatch
            self._probe.enqueue(kind, stage, microbatch)

    def __exit__(self, *_: object) -> None:
        self._end.record()
        self._probe.timed += [(name, self._begin, self._end) for name in self._names]
