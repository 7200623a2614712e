"""Arms the device: turns its redirects into registry patches and sets its environment variables.

This runs just before the first execution of `megatron.core`, because `tensor_parallel/random.py`
copies names of `torch.cuda` at import. If it runs later, the registry's sweep by identity repairs
the copies.
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
    """The changes made for the device of this process."""

    redirects: list[Patch] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that `arm` has set."""


def arm() -> Device:
    """Select the device of this process and register its redirects. Idempotent.

    Raises:
        DeviceError: The requested device is unknown or cannot run here.
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
    """Reset the device: restore the originals; the next `arm()` selects again."""
    REGISTRY.remove([patch.id for patch in devices.state(_Done).redirects])
    restore_environment()
    devices.reset()


def restore_environment() -> None:
    """Remove the environment variables that `arm` has set, unless other code changed them since."""
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
