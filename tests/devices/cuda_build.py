"""Makes torch look like its CUDA build on a machine without a driver, whatever build is installed.

It names CUDA as its accelerator, and everything that it asks of the accelerator itself fails.
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
    """Tell whether the installed torch is such a build, and this such a machine."""
    return torch.version.cuda is not None and torch.cuda.device_count() == 0


def pretend() -> None:
    """Make this process's torch answer as that build does, where it is another; for good."""
    if is_real():
        return
    bindings: Any = torch._C
    bindings._accelerator_getAccelerator = lambda: torch.device("cuda")
    bindings._get_accelerator = lambda *_checked: torch.device("cuda")
    for name in _ASKED:
        if hasattr(bindings, f"_accelerator_{name}"):  # some are younger than torch 2.7
            setattr(bindings, f"_accelerator_{name}", _refuse)


def _refuse(*_args: Any) -> NoReturn:
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
