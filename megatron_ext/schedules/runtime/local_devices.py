"""Whether a job's devices exchange tensors past the memory of the host."""

from __future__ import annotations

import os

from megatron_ext import devices

__all__ = ["reach_each_other"]


def reach_each_other(world_size: int) -> bool:
    """Tell whether all ranks are on one host, with devices that reach each other.

    A schedule whose order is fixed then needs nothing that torch.distributed lacks.

    Args:
        world_size: Ranks of the job.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return devices.current().reaches_peers and per_node >= world_size
