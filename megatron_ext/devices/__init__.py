"""Defines the device backends `cpu`, `cuda` and `musa` and selects one for this process.

Each process selects its backend once, before Megatron is imported; `auto` picks the first backend
whose software stack is installed. Only modules in this package refer to specific devices and
collective backends.
"""

from __future__ import annotations

import logging
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ArgumentsError, DeviceError

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.backend import Device

CHOICES = ("auto", "cuda", "musa", "cpu")
"""Values of `--device-backend` and `MEGATRON_EXT_DEVICE`."""

_VARIABLE = "MEGATRON_EXT_DEVICE"
_FLAG = "--device-backend"

_LOG = logging.getLogger(__name__)


@dataclass
class _Selected:
    """The backend that this process has selected, if any."""

    device: Device | None = None


_PROCESS = _Selected()


def requested(argv: Sequence[str] | None = None) -> str:
    """Return the name from the environment, else from the command line (`sys.argv`), else `auto`.

    Raises:
        DeviceError: The name is not one of `CHOICES`.
    """
    name = os.environ.get(_VARIABLE)
    source = _VARIABLE
    if not name:
        # This runs before any Megatron parser, because Megatron copies device names while it is
        # being imported. Once the flags are parsed, `config/hosting.py` checks that the two values
        # agree.
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        # Accept the flag without a value, so that the error below lists the choices.
        parser.add_argument(_FLAG, dest="device", nargs="?", const="", default="auto")
        flags, _ = parser.parse_known_args(argv)
        name = str(flags.device)
        source = _FLAG
    if name not in CHOICES:
        raise DeviceError(
            f"{source} is {name!r}, but the device backends are {', '.join(CHOICES)}; "
            f"choose one of them"
        )
    return name


def select(name: str) -> Device:
    """Return a backend by name; `auto` picks the first of cuda, musa and cpu that can run.

    Raises:
        DeviceError: The name is unknown, or the backend cannot run here; the message says why.
    """
    if name == "auto":
        reasons = []
        for choice in CHOICES[1:]:
            device = named(choice)
            reason = device.missing()
            if reason is None:
                return device
            reasons.append(f"{choice}: {reason}")
        raise DeviceError(f"no device backend can run here: {'; '.join(reasons)}")
    device = named(name)
    reason = device.missing()
    if reason is not None:
        raise DeviceError(
            f"device backend {name} cannot run here: {reason}, or choose another backend with "
            f"{_FLAG} or {_VARIABLE} ({', '.join(CHOICES)})"
        )
    return device


def current() -> Device:
    """Return this process's backend; the first call selects it.

    Raises:
        DeviceError: See `requested` and `select`.
    """
    return _PROCESS.device or take(requested())


def take(name: str) -> Device:
    """Select a backend unless one is already in use; return the backend in use.

    Raises:
        DeviceError: See `select`.
    """
    # Keep the first backend: Megatron may already have copied that device's names.
    if _PROCESS.device is None:
        _PROCESS.device = select(name)
    return _PROCESS.device


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Return the device that holds a rank's model, even if its chunks have no parameters."""
    import torch

    parameters = chain.from_iterable(chunk.parameters() for chunk in chunks)
    parameter = next(parameters, None)
    if parameter is not None:
        return parameter.device
    # `torch.cuda` is redirected, so this is the current device on any backend.
    return torch.empty(0, device=torch.cuda.current_device()).device


def off_cuda() -> bool:
    """Return whether this process computes on a device other than CUDA, upstream's only target."""
    return current().name != "cuda"


def on_cpu() -> bool:
    """Return whether this process computes on the host."""
    return current().name == "cpu"


def named(name: str) -> Device:
    """Return a backend by name, even if it cannot run here. Does not import torch.

    Raises:
        DeviceError: The name is unknown.
    """
    from megatron_ext.devices.cpu import CpuDevice
    from megatron_ext.devices.cuda import CudaDevice
    from megatron_ext.devices.musa import MusaDevice

    for backend in (CudaDevice, MusaDevice, CpuDevice):
        if backend.name == name:
            return backend()
    raise DeviceError(
        f"there is no device backend {name!r}; choose one of {', '.join(CHOICES)}"
    )


def arguments_for(args: Namespace, chosen: str) -> dict[str, Any]:
    """Return corrected values for Megatron's arguments; reject values the device cannot accept.

    `chosen` is the backend that the user chose, one of `CHOICES`.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    device = current()
    if chosen not in {"auto", device.name}:
        raise ArgumentsError(
            f"--device-backend {chosen} was parsed after the {device.name} backend had been "
            "selected (Megatron was imported before the arguments were known); set "
            f"MEGATRON_EXT_DEVICE={chosen} too"
        )
    corrections: dict[str, Any] = {}
    errors: list[str] = []
    for dest, (needed, reason) in device.argument_defaults.items():
        requested_value = getattr(args, dest, needed)
        if requested_value == needed or not reason:
            continue
        # Only warn: scripts written for GPUs always name NCCL, and each device has only one
        # collective backend.
        if dest == "distributed_backend":
            _LOG.warning(
                "--distributed-backend %s: %s is used instead, because %s",
                requested_value,
                needed,
                reason,
            )
            corrections[dest] = needed
            continue
        flag = f"--{dest.replace('_', '-')}"
        errors.append(
            f"{flag} is {requested_value!r}, but {device.name} needs {needed!r}: {reason}"
        )
    errors.extend(device.argument_errors(args))
    if errors:
        raise ArgumentsError("\n".join(errors))
    return corrections


def name_and_memory() -> tuple[str, float | None]:
    """Return the name and memory (in GiB) of this process's device; the host's memory is None."""
    device = current()
    if device.is_host:
        return device.name, None
    properties = device.runtime.get_device_properties(0)
    return properties.name, properties.total_memory / 2**30


def name_by_driver(directory: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return the name of this machine's first accelerator; None if its driver does not report it.

    This does not import torch, so that commands that only plan stay fast.
    """
    if os.environ.get(_VARIABLE) == "cpu":
        return None
    for path in sorted(directory.glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            label, _, name = line.partition(":")
            if label == "Model":
                return name.strip()
    return None


VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")
"""Environment variables that limit a process to the listed devices."""


def count_devices(
    directory: Path = Path("/dev"), environ: Mapping[str, str] = os.environ
) -> int:
    """Return the number of accelerators that the environment allows, or that the drivers report.

    This does not import torch, so that commands that only plan stay fast.
    """
    # Check the environment first: the drivers also report devices that this job must
    # not use.
    if environ.get(_VARIABLE) == "cpu":
        return 0
    counts: list[int] = []
    for variable in VISIBLE_DEVICES:
        if variable in environ:
            numbers = environ[variable].split(",")
            # An empty value or -1 hides all devices; Slurm uses NoDevFiles.
            hidden = ("", "-1", "NoDevFiles")
            counts.append(sum(number not in hidden for number in numbers))
    if counts:
        return max(counts)
    # Drivers create one numbered node per device and others without a number, such as
    # nvidiactl.
    node = re.compile(r"nvidia\d+|mtgpu\.\d+")
    names = [entry.name for entry in directory.iterdir()]
    return sum(node.fullmatch(name) is not None for name in names)
