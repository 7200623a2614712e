"""Host versions of `torch.cuda`'s streams, events, random numbers and memory counters.

The "device" generator is torch's default generator. Memory counters report the operating system's
numbers.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _is_done(*_args: Any) -> bool:
    """Return True: on the host, an event's or a stream's work is always done."""
    return True


def _nothing(*_args: Any) -> None:
    """Return immediately: on the host, an event's or a stream's work is always done."""


# On the host, every operation is complete when its call returns. So there is only one stream, waits
# do nothing, and an event is a point in time. `elapsed_time` is a real measurement.
class Event:
    """A point in time on the host's clock."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.recorded_s: float | None = None

    def record(self, _stream: Any = None) -> None:
        """Record the current time; all earlier work is done by then."""
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`.

        Raises:
            RuntimeError: One of the two events was not recorded.
        """
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError(
                "elapsed_time needs two recorded events: call record() on both first"
            )
        return (end.recorded_s - self.recorded_s) * 1e3

    query = _is_done
    synchronize = _nothing
    wait = _nothing


class Stream:
    """The host's stream, which runs everything in order.

    The constructor always returns the same object.
    """

    cuda_stream = 0
    stream_id = 0

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Stream:
        """Return the shared stream, for any device and priority."""
        return STREAM

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and greatest priorities."""
        return 0, 0

    @property
    def device(self) -> Any:
        """The host."""
        import torch

        return torch.device("cpu")

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, and return it."""
        event = Event() if event is None else event
        event.record()
        return event

    query = _is_done
    synchronize = _nothing
    wait_event = _nothing
    wait_stream = _nothing


# `Stream()` would return this object, which does not exist yet.
STREAM: Stream = object.__new__(Stream)
"""The only stream, for all threads."""


class Generators:
    """`torch.cuda.default_generators`: every index returns the host's default generator."""

    def __getitem__(self, _index: Any) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        return local_world_size()


def local_world_size() -> int:
    """Return the number of this job's processes on this host; each process is a "device"."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def properties() -> SimpleNamespace:
    """Return the host's properties, named like those of a CUDA device."""
    return SimpleNamespace(
        # On many Linux systems, the first of these names is empty.
        name=platform.processor() or platform.machine(),
        major=8,  # the lowest capability for which upstream has no special cases
        minor=0,
        total_memory=total_memory_bytes(),
        multi_processor_count=os.cpu_count() or 1,
    )


def total_memory_bytes() -> int:
    """Return the size of the host's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rss_bytes() -> int:
    """Return this process's resident memory."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return this process's peak resident memory since it started or since `reset_peak_rss`."""
    return _status_bytes("VmHWM")


def reset_peak_rss() -> None:
    """Reset the peak to the current memory, if the kernel allows it."""
    # If the kernel does not allow it, the peak covers the process's whole life, which is still an
    # upper bound.
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")  # see proc(5), /proc/pid/clear_refs


def memory_stats() -> defaultdict[str, int]:
    """Return the counters that upstream logs; any other counter is 0."""
    resident = rss_bytes()
    peak = peak_rss_bytes()
    stats: defaultdict[str, int] = defaultdict(int)
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = resident
        stats[f"{kind}_bytes.all.peak"] = peak
    return stats


def _status_bytes(field: str) -> int:
    """Return a field of /proc/self/status; without that file, return the peak from getrusage."""
    with suppress(OSError):
        status = _STATUS.read_text(errors="replace")
        match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.M)
        if match is not None:
            return int(match[1]) * 1024
    # Linux counts this in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
