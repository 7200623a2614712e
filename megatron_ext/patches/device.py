"""Arms the device: its redirects become registry patches, its environment needs are met.

Called just before `megatron.core` is first executed, because `tensor_parallel/random.py` copies
names of `torch.cuda` while it is imported. Called later, the registry's sweep by identity mends the
copies.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_ext import devices
from megatron_ext.patches.registry import REGISTRY, Patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.devices import Device

__all__ = ["arm", "disarm", "restore_environment"]

_LOG = logging.getLogger(__name__)


@dataclass
class _Done:
    """What was done for the device of this process."""

    redirects: list[Patch] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that were set."""


def arm() -> Device:
    """Select the device of this process and register what it redirects. Idempotent.

    Raises:
        DeviceError: The device that was asked for is unknown or cannot run here.
    """
    device, done = devices.current(), devices.state(_Done)
    for variable, (value, _reason) in device.environment.items():
        if variable not in os.environ:
            done.environment[variable] = os.environ[variable] = value
    if not done.redirects:
        done.redirects = list(_patches(device))
        REGISTRY.register(done.redirects)
        _LOG.info("device %s: %d redirects", device.name, len(done.redirects))
    return device


def disarm() -> None:
    """Forget the device: originals come back, and the next `arm()` selects anew."""
    REGISTRY.remove([patch.id for patch in devices.state(_Done).redirects])
    restore_environment()
    devices.reset()


def restore_environment() -> None:
    """Take out of the environment what `arm` put there, and what nobody has changed since."""
    environment = devices.state(_Done).environment
    for variable, value in environment.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
    environment.clear()


def _patches(device: Device) -> Iterator[Patch]:
    for redirect in device.redirects():
        yield Patch(
            id=f"{device.name}.{redirect.target.replace(':', '.')}",
            target=redirect.target,
            reason=redirect.reason,
            fn=redirect.make,
            kind="set",
            feature=device.name,
            creates=redirect.creates,
        )
