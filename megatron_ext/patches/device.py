"""Arms the device: turns its redirects into registry patches and sets its environment variables."""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.patches.point import Patch
from megatron_ext.patches.registry import REGISTRY

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Device


def arm() -> Device:
    """Select this process's device and register its redirects. Idempotent.

    Raises:
        DeviceError: The requested device is unknown or cannot run here.
    """
    # Runs just before `megatron.core` first executes, because its
    # `tensor_parallel/random.py` copies names from `torch.cuda` at import time. On a
    # later call, the registry finds the copies by identity and replaces them.
    device = devices.current()
    for variable, (value, _reason) in device.environment.items():
        if variable not in os.environ:  # keep values that the user has set
            os.environ[variable] = value
            REGISTRY.undo.callback(_unset, variable, value)
    if all(patch.feature != device.name for patch in REGISTRY):
        redirects = []
        for target, make_replacement, reason in device.redirects():
            # Use `set`: torch's factories are on the hot path, where a proxy would cost
            # more than the redirect itself.
            dotted_target = target.replace(":", ".")
            redirect = Patch(
                id=f"{device.name}.{dotted_target}",
                target=target,
                reason=reason,
                fn=make_replacement,
                kind="set",
                feature=device.name,
            )
            redirects.append(redirect)
        REGISTRY.register(redirects)
    if not isinstance(warnings.showwarning, _LacksOnce):
        lacks_once = _LacksOnce(device.known_lacks)
        warnings.showwarning = lacks_once
        REGISTRY.undo.callback(lacks_once.end)
    return device


def _unset(variable: str, value: str) -> None:
    """Remove an environment variable unless other code has changed it since."""
    if os.environ.get(variable) == value:
        del os.environ[variable]


class _LacksOnce:
    """Shows each warning about a missing device feature only once, on one rank."""

    # A warning filter would not work: whenever any code changes the filters, Python
    # forgets which warnings it has shown.
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        # Without beginnings, the pattern matches no text.
        pattern = "|".join(beginnings) or "(?!)"
        self._pattern = re.compile(pattern)
        self._show_warning = warnings.showwarning
        self._is_first_rank = os.environ.get("RANK", "0") == "0"
        self._shown_texts: set[str] = set()

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if self._pattern.match(text):
            if not self._is_first_rank or text in self._shown_texts:
                return
            self._shown_texts.add(text)
        self._show_warning(message, *args, **kwargs)

    def end(self) -> None:
        """Restore the previous `warnings.showwarning` unless other code has replaced it since."""
        if warnings.showwarning is self:
            warnings.showwarning = self._show_warning
