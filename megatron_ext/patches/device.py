"""Arms the device: turns its redirects into registry patches and sets its environment variables."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.patches.registry import REGISTRY, Patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.devices import Device


@dataclass
class _Done:
    """The changes made for the device of this process."""

    redirects: list[Patch] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that `arm` has set."""
    shown: tuple[Any, Any] | None = None
    """`warnings.showwarning` before `arm`, and since then."""


def arm() -> Device:
    """Select the device of this process and register its redirects. Idempotent.

    Raises:
        DeviceError: The requested device is unknown or cannot run here.
    """
    # Just before `megatron.core` first executes, whose `tensor_parallel/random.py` copies names of
    # `torch.cuda` at import. Later the registry's sweep by identity repairs the copies.
    device, done = devices.current(), devices.state(_Done)
    # What the user has set stays, and `restore_environment` must not touch it.
    for variable, (value, _reason) in device.environment.items():
        if variable not in os.environ:
            done.environment[variable] = os.environ[variable] = value
    if not done.redirects:
        done.redirects = list(_patches(device))
        REGISTRY.register(done.redirects)
        done.shown = _show_lacks_once(device.known_lacks)
    return device


def _show_lacks_once(beginnings: tuple[str, ...]) -> tuple[Any, Any]:
    """Show warnings about what the device cannot have on one rank, and each of them once."""
    # Not by a filter: torch and others change the filters again and again, and each time Python
    # forgets what it has shown once.
    known, before = re.compile("|".join(beginnings) or "(?!)"), warnings.showwarning
    is_first, seen = os.environ.get("RANK", "0") == "0", set[str]()

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if not known.match(text):
            before(message, *args, **kwargs)
        elif is_first and text not in seen:
            seen.add(text)
            before(message, *args, **kwargs)

    warnings.showwarning = show
    return before, show


def disarm() -> None:
    """Reset the device: restore the originals; the next `arm()` selects again."""
    done = devices.state(_Done)
    REGISTRY.remove([patch.id for patch in done.redirects])
    if done.shown is not None and warnings.showwarning is done.shown[1]:
        warnings.showwarning = done.shown[0]
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
    # As `set`: redirected factories are on the hot path, where a proxy costs more than the
    # redirect.
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
