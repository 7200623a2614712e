"""Makes any torch build look like the CUDA build on a machine without a driver.

torch then names CUDA as its accelerator, and every call that uses the accelerator fails.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_ASKED = (
    "exchangeDevice",
    "getDeviceCapability",
    "getDeviceIndex",
    "getMemoryInfo",
    "getStream",
    "maybeExchangeDevice",
    "setDeviceIndex",
    "setStream",
    "synchronizeDevice",
)


def is_real() -> bool:
    """Return whether the installed torch is such a build on such a machine."""
    return torch.version.cuda is not None and torch.cuda.device_count() == 0


def pretend() -> None:
    """Make this process's torch answer as that build does, permanently."""
    if is_real():
        return
    bindings: Any = torch._C
    bindings._accelerator_getAccelerator = lambda: torch.device("cuda")
    bindings._get_accelerator = lambda *_checked: torch.device("cuda")
    for name in _ASKED:
        if hasattr(bindings, f"_accelerator_{name}"):  # some were added after torch 2.7
            setattr(bindings, f"_accelerator_{name}", _refuse)


def _refuse(*_args: Any) -> NoReturn:
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
