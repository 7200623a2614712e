"""Selects and describes devices, and initialises the runtime on first use."""

import os
from dataclasses import dataclass

import torch

import torch_musa

__all__ = [
    "_DeviceGuard",
    "_exchange_device",
    "_get_device_properties",
    "_is_in_bad_fork",
    "_lazy_call",
    "_lazy_init",
    "_maybe_exchange_device",
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "musart",
    "set_device",
    "synchronize",
]

_initialized = False
_bad_fork = False
_queued_calls = []


def _is_in_bad_fork():
    return _bad_fork


def _mark_bad_fork():
    global _bad_fork
    _bad_fork = True


def is_initialized():
    return _initialized and not _bad_fork


def _lazy_init():
    """Start the runtime. A process forked after this cannot use the device, as on the real one."""
    global _initialized
    if is_initialized():
        return
    if _bad_fork:
        raise RuntimeError(
            "Cannot re-initialize MUSA in forked subprocess. To use MUSA with multiprocessing, you "
            "must use the 'spawn' start method"
        )
    _initialized = True
    os.register_at_fork(after_in_child=_mark_bad_fork)
    torch_musa.default_generators = tuple(
        torch.ops.fake_musa.default_generator(index) for index in range(device_count())
    )
    while _queued_calls:
        _queued_calls.pop(0)()


def _lazy_call(call, **kwargs):
    if is_initialized():
        call()
    else:
        _queued_calls.append(call)


def device_index(device, optional=False):
    """Convert any way to name a device into its index; reject other kinds of devices."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, Device):
        return device.idx
    if device.type != "musa":
        raise ValueError(f"Expected a musa device, but got: {device}")
    if device.index is None:
        if not optional:
            raise ValueError(
                f"Expected a torch.device with a specified index, but got: {device}"
            )
        return current_device()
    return device.index


def device_count():
    return torch.ops.fake_musa.device_count()


def is_available():
    return device_count() > 0


def current_device():
    _lazy_init()
    return torch.ops.fake_musa.current_device()


def set_device(device):
    index = (
        current_device()
        if device in ("musa", torch.device("musa"))
        else device_index(device)
    )
    if index >= 0:
        torch.ops.fake_musa.set_device(index)


def synchronize(device=None):
    _lazy_init()
    with Device(device):
        torch.ops.fake_musa.synchronize()


def _exchange_device(index):
    previous = torch.ops.fake_musa.current_device()
    if index >= 0:
        torch.ops.fake_musa.set_device(index)
    return previous


_maybe_exchange_device = _exchange_device


class _DeviceGuard:
    def __init__(self, index):
        self.idx = index
        self.prev_idx = -1

    def __enter__(self):
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_):
        self.idx = _maybe_exchange_device(self.prev_idx)
        return False


class Device(_DeviceGuard):
    """Context manager that selects a device."""

    def __init__(self, device):
        super().__init__(device_index(device, optional=True))


class DeviceOf(Device):
    """Context manager that selects the device of a tensor, if it is on one."""

    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.device.type == "musa" else -1)


@dataclass(frozen=True)
class _MusaDeviceProperties:
    name: str
    major: int
    minor: int
    is_multi_gpu_board: int
    is_integrated: int
    multi_processor_count: int
    total_memory: int


def _get_device_properties(index):
    return _MusaDeviceProperties("MTT S5000 (emulated)", 3, 1, 0, 0, 56, 80 * 2**30)


device, device_of = Device, DeviceOf  # the public names


def get_device_properties(device):  # no default, unlike torch.cuda's
    _lazy_init()
    index = device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _get_device_properties(index)


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_capability(device=None):
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device, peer_device):
    return device_index(device, optional=True) != device_index(peer_device)


def get_arch_list():
    return ["mp_31"] if is_available() else []


def is_bf16_supported(including_emulation=True):
    return is_available()


def is_tf32_supported():
    return is_available()


class _Musart:
    """Binding of the runtime library; names start with `musa`, so CUDA's names are missing."""

    @staticmethod
    def musaMemGetInfo(index):
        total = _get_device_properties(index).total_memory
        return total - torch.ops.fake_musa.memory_counters(index)[0], total

    @staticmethod
    def musaHostRegister(address, num_bytes, _flags):
        return 0 if torch.ops.fake_musa.host_register(address, num_bytes) else 712

    @staticmethod
    def musaHostUnregister(address):
        return 0 if torch.ops.fake_musa.host_unregister(address) else 713


def musart():
    _lazy_init()
    return _Musart
