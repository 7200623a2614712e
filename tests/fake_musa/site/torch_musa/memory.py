"""Memory counters, which are exact because they come from the emulated allocator."""

import collections

import torch

from ._device import _lazy_init, device_index, is_initialized, musart

__all__ = [
    "empty_cache",
    "get_allocator_backend",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def empty_cache():
    """Do nothing: memory is either not cached, or kept for late readers (`csrc/pool.h`)."""


def memory_stats(device=None):
    if not is_initialized():
        return collections.OrderedDict()
    index = device_index(device, optional=True)
    live_bytes, peak_bytes, live_blocks, allocations = (
        torch.ops.fake_musa.memory_counters(index)
    )
    stats = {
        "allocation.all.current": live_blocks,
        "allocation.all.allocated": allocations,
    }
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = live_bytes
        stats[f"{kind}.all.peak"] = peak_bytes
    if torch.ops.fake_musa.is_async():
        reserved_bytes = torch.ops.fake_musa.reserved_bytes()
        stats["reserved_bytes.all.current"] = stats["reserved_bytes.all.peak"] = (
            reserved_bytes
        )
    return collections.OrderedDict(sorted(stats.items()))


def memory_allocated(device=None):
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device=None):
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device=None):
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device=None):
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device=None):
    torch.ops.fake_musa.reset_peak_memory(device_index(device, optional=True))


def reset_max_memory_allocated(device=None):
    reset_peak_memory_stats(device)


def mem_get_info(device=None):
    return musart().musaMemGetInfo(device_index(device, optional=True))


def memory_summary(device=None, abbreviated=False):
    return "\n".join(
        f"| {name} {value}" for name, value in memory_stats(device).items()
    )


def set_per_process_memory_fraction(fraction, device=None):
    _lazy_init()
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")


def get_allocator_backend():
    return "native"
