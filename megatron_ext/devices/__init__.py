"""Device backends: `cpu`, `cuda` and `musa`, and which one this process uses.

The choice is made once, before upstream is imported, from `MEGATRON_EXT_DEVICE` or from
`--device-backend` on the command line; `auto` takes the first whose software stack is there.
The modules of this package are the only ones that spell devices and collective backends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from megatron_ext.devices.base import Device, Redirect, Rule
from megatron_ext.disaggregation.devices import FLAG as FORWARD_FLAG
from megatron_ext.disaggregation.devices import of_forward_rank
from megatron_ext.errors import DeviceError

__all__ = [
    "CHOICES",
    "Device",
    "Redirect",
    "Rule",
    "current",
    "on_cuda",
    "requested",
    "reset",
    "select",
]

CHOICES = ("auto", "cuda", "musa", "cpu")
"""Values of `--device-backend` and `MEGATRON_EXT_DEVICE`."""

_VARIABLE = "MEGATRON_EXT_DEVICE"
_FLAG = "--device-backend"

_current: Device | None = None


def requested(argv: Sequence[str] | None = None) -> str:
    """Return the name that the user asked for, or `auto`.

    The device has to be known before upstream's parser exists, so the flag is looked up in the
    plain command line; the parser checks later that both agree. Forward ranks of a disaggregated
    job may have a device of their own, which comes before all else.

    Args:
        argv: The command line; `sys.argv` if left out.

    Raises:
        DeviceError: The name is none of `CHOICES`.
    """
    words = sys.argv if argv is None else argv
    name, source = of_forward_rank(words, os.environ) or "", FORWARD_FLAG
    if not name:
        name, source = os.environ.get(_VARIABLE, ""), _VARIABLE
    if not name:
        name, source = _from_command_line(words), _FLAG
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
    global _current
    if _current is None:
        _current = select(requested())
    return _current


def on_cuda() -> bool:
    """Tell whether this process computes on what upstream was written for."""
    return current().name == "cuda"


def reset() -> None:
    """Forget the selection, so that the next `current()` decides anew."""
    global _current
    _current = None


def _from_command_line(argv: Sequence[str]) -> str:
    """Return the last value of the flag: argparse lets the last one win, too."""
    name = "auto"
    for position, argument in enumerate(argv):
        if argument == _FLAG:
            name = argv[position + 1] if position + 1 < len(argv) else ""
        elif argument.startswith(_FLAG + "="):
            name = argument.partition("=")[2]
    return name


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
