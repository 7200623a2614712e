"""Decides whether `auto` selects torch.distributed or the native core."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from megatron_ext import devices
from megatron_ext.config.environment import Environment

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig

__all__ = ["torch_is_best"]

_LOG = logging.getLogger(__name__)


def torch_is_best(config: PipelineConfig, world_size: int) -> bool:
    """Return whether `auto` selects torch.distributed: a static order between devices.

    torch.distributed offers all that a schedule with a fixed order needs. Tables take it for every
    pair of ranks that does not share device memory, on one host or several; Megatron's own
    schedules only on one host, where nothing of them has to be replaced.
    """
    if config.wire != "auto" or config.dynamic is not None:
        return False
    if config.device_path == "ipc" or config.checksums:  # torch.distributed has neither
        return False
    if not devices.current().reaches_peers:
        return False
    on_one_host = Environment.read().ranks_per_node(world_size) >= world_size
    if not on_one_host and config.schedule is None:
        return False
    _LOG.info(
        "--pipeline-transport auto: torch.distributed, which moves tensors between devices without "
        "the host's memory%s",
        ", for pairs of ranks that do not share device memory"
        if config.tries_ipc and config.schedule is not None
        else "",
    )
    return True
