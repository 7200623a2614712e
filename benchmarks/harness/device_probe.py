"""The probe of a device that runs behind its host.

The emulated device of the tests takes the time of each op; the host only launches it. The kernel
that takes the time is the first of its op: in training too, a device starts on an op's first kernel
while its host still launches the others. Events before and after an op, in the device's stream,
give its times.
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
    """Lets the device take the time of ops, and reads it from events."""

    def __init__(self, times: OpTimes, device: torch.device) -> None:
        super().__init__(times, device)
        self.timed: list[tuple[tuple[int, Kind, int], torch.Event, torch.Event]] = []
        """Ops, and the events around them."""

    def meet(self) -> None:
        """Wait for all ranks, with the host's time of a point in the stream of an idle device."""
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
        """Let the device end the step; return how often the host waited for it before."""
        waits: int = sum(
            count
            for (_, _, thread), count in host_waits.by_line().items()
            if "megatron-ext" not in thread  # those beside a staged transport are there to wait
        )
        devices.current().synchronize()
        return waits

    def op(self, kind: Kind, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Enqueue the time of an op, and record what the device does inside as that op."""
        return TimedOp(self, (stage, kind, microbatch))

    def spend(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Do nothing: the op that runs has enqueued its time."""

    def enqueue(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Enqueue a kernel that takes the time of an op."""
        lasts_us = 1e6 * self.times.seconds(kind, stage, microbatch)
        torch.ops.fake_musa.spend(self.device.index, lasts_us)

    def take(self) -> tuple[list[Op], float]:
        """Return ops and peak since the last call; the device must have finished them."""
        ops = [Op(*name, self._at_s(begin), self._at_s(end)) for name, begin, end in self.timed]
        self.timed, peak, self.peak_live = [], self.peak_live, 0
        return ops, peak

    def _at_s(self, event: torch.Event) -> float:
        return self._zero_s + 1e-3 * self._zero.elapsed_time(event)


class TimedOp:
    """Puts an event before and after what is launched inside `with`: an op, or two of a pair."""

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
