"""Device backends: `cpu`, `cuda` and `musa`, and which one this process uses.

The choice is made once, before upstream is imported, from `MEGATRON_EXT_DEVICE` or from
`--device-backend` (`config/early.py`); `auto` takes the first whose software stack is there.
The modules of this package are the only ones that spell devices and collective backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from megatron_ext.devices.backend import Device, Redirect, Rule
from megatron_ext.errors import DeviceError

__all__ = [
    "CHOICES",
    "Device",
    "Redirect",
    "Rule",
    "current",
    "keep_for_ever",
    "on_cuda",
    "requested",
    "reset",
    "select",
    "state",
    "take",
]

CHOICES = ("auto", "cuda", "musa", "cpu")
"""Values of `--device-backend` and `MEGATRON_EXT_DEVICE`."""

_VARIABLE = "MEGATRON_EXT_DEVICE"
_FLAG = "--device-backend"

_State = TypeVar("_State")


@dataclass
class _Process:
    """What this process holds."""

    device: Device | None = None
    states: dict[type, object] = field(default_factory=dict)
    """What the functions of the device keep, by its class."""
    immortal: list[object] = field(default_factory=list)


_PROCESS = _Process()
"""The device of this process."""


def requested(argv: Sequence[str] | None = None) -> str:
    """Return the name that the user asked for, or `auto` (`config/early.py`).

    Args:
        argv: The command line; `sys.argv` if left out.

    Raises:
        DeviceError: The name is none of `CHOICES`.
    """
    from megatron_ext.config.early import requested_device

    name, source = requested_device(argv)
    if name not in CHOICES:
        raise DeviceError(
            f"{source} is {name!r}, but the device backends are {', '.join(CHOICES)}; "
            f"choose one of them"
        )
    return name


def select(name: str) -> Device:
    """Return the backend of a name; `auto` takes the first that can run of cuda, musa, cpu.

    Raises:
        DeviceError: The name is unknown, or the backend cannot run here; the message says why.
    """
    if name == "auto":
        return next(device for device in map(_make, CHOICES[1:]) if device.missing() is None)
    device = _make(name)
    reason = device.missing()
    if reason is not None:
        raise DeviceError(
            f"device backend {name} cannot run here: {reason}. Or choose another with {_FLAG} or "
            f"{_VARIABLE} ({', '.join(CHOICES)})"
        )
    return device


def current() -> Device:
    """Return the backend of this process; the first call selects it.

    Raises:
        DeviceError: See `requested` and `select`.
    """
    return _PROCESS.device or take(requested())


def take(name: str) -> Device:
    """Select a backend, unless one is in use already; return the one in use.

    Raises:
        DeviceError: See `select`.
    """
    if _PROCESS.device is None:
        _PROCESS.device = select(name)
    return _PROCESS.device


def on_cuda() -> bool:
    """Tell whether this process computes on what upstream was written for."""
    return current().name == "cuda"


def reset() -> None:
    """Forget the selection, so that the next `current()` decides anew."""
    _PROCESS.device = None
    _PROCESS.states.clear()


def state(kind: type[_State]) -> _State:
    """Return the one instance of a class that belongs to the device; made at the first call."""
    if kind not in _PROCESS.states:
        _PROCESS.states[kind] = kind()
    return cast("_State", _PROCESS.states[kind])


def keep_for_ever(what: object) -> None:
    """Keep something that torch knows by its address."""
    _PROCESS.immortal.append(what)


def _make(name: str) -> Device:
    backends: dict[str, Callable[[], Device]] = {"cuda": _cuda, "musa": _musa, "cpu": _cpu}
    if name not in backends:
        raise DeviceError(
            f"there is no device backend {name!r}; choose one of {', '.join(CHOICES)}"
        )
    return backends[name]()


def _cpu() -> Device:
    from megatron_ext.devices.cpu import CpuDevice

    return CpuDevice()


def _cuda() -> Device:
    from megatron_ext.devices.cuda import CudaDevice

    return CudaDevice()


def _musa() -> Device:
    from megatron_ext.devices.musa import MusaDevice

    return MusaDevice()
