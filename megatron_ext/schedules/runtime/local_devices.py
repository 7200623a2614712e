"""The device that a rank computes on, and whether those of a job reach each other."""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING

from megatron_ext import devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["device_of", "reach_each_other"]


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Return the device of a rank's model; a layout may leave chunks, or all of them, empty."""
    parameter = next(chain.from_iterable(chunk.parameters() for chunk in chunks), None)
    if parameter is not None:
        return parameter.device
    import torch  # flags ask this module before torch is needed

    return torch.empty(0, device=torch.cuda.current_device()).device


def reach_each_other(world_size: int) -> bool:
    """Tell whether all ranks are on one host, with devices that reach each other.

    A schedule whose order is fixed then needs nothing that torch.distributed lacks.

    Args:
        world_size: Ranks of the job.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return devices.current().reaches_peers and per_node >= world_size
