"""The device that a rank computes on."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["device_of"]


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Return the device of a rank's model; a layout may leave its chunks without parameters."""
    parameter = next(chain.from_iterable(chunk.parameters() for chunk in chunks), None)
    if parameter is not None:
        return parameter.device
    return torch.empty(0, device=torch.cuda.current_device()).device
