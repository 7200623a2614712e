"""Finds the pairs of ranks whose devices can map each other's memory, by trying it.

Whether two devices can is known only after one process has mapped memory of the other, and both
must agree. So each rank offers a small buffer, its peers on the same host map it, and all ranks
exchange the results before any transport is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_ext.errors import DeviceError, TransportError
from megatron_ext.transport.address import Address
from megatron_ext.transport.native import require_native

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Sharing

__all__ = ["Reach", "find_reach"]


@dataclass(frozen=True)
class Reach:
    """Which peers' devices this rank's device reaches directly."""

    sharing: Sharing | None
    """The memory sharing of this rank's device; None if it has none."""
    direct: frozenset[int]
    """Global ranks of the peers that it reaches."""
    reasons: dict[int, str]
    """By global rank of each other peer: why not."""
    is_complete: bool
    """Whether every pair of the job is direct."""


@dataclass(frozen=True)
class _Offer:
    """Description of a rank for the others."""

    address: Address
    device: str = ""
    """Name of its device, valid in all processes of its host."""
    handle: bytes = b""
    """Of a buffer on its device."""
    problem: str = ""
    """Why its device cannot share memory; empty if it can."""


def find_reach(peers: Collection[int], make_sharing: Callable[[], Sharing]) -> Reach:
    """Find out which peers' devices this rank's device reaches. Collective over the job's ranks.

    Args:
        peers: Global ranks of the peers; each of them names this one.
        make_sharing: Makes the memory sharing of this rank's device; may raise DeviceError.
    """
    me, size = dist.get_rank(), dist.get_world_size()
    mine, sharing, buffer = Address.new("auto"), None, None
    try:
        require_native()  # carries the notes beside the memory
        sharing = make_sharing()
        buffer = sharing.make(1)
        offer = _Offer(mine, sharing.name, buffer.handle)
    except (DeviceError, RuntimeError, TransportError) as error:
        offer = _Offer(mine, problem=f"rank {me} cannot share memory of its device: {error}")
    offers: list[_Offer] = [offer] * size
    dist.all_gather_object(offers, offer)
    found = {peer: _why_not(sharing, offer, offers[peer]) for peer in peers}
    everybody: list[dict[int, str]] = [found] * size
    dist.all_gather_object(everybody, found)
    if sharing is not None and buffer is not None:
        sharing.free(buffer)  # its peers have unmapped it
    reasons = {peer: found[peer] or everybody[peer].get(me, "") for peer in peers}
    return Reach(
        sharing,
        frozenset(peer for peer, reason in reasons.items() if not reason),
        {peer: reason for peer, reason in reasons.items() if reason},
        not any(reason for theirs in everybody for reason in theirs.values()),
    )


def _why_not(sharing: Sharing | None, mine: _Offer, theirs: _Offer) -> str:
    """Map the buffer of a peer and unmap it; return the reason if that fails, else nothing."""
    reason = mine.address.why_no_memory_with(theirs.address) or mine.problem or theirs.problem
    if reason or sharing is None:
        return reason
    reason = sharing.why_unreachable(theirs.device) or ""
    if not reason:
        try:
            sharing.unmap(sharing.open(theirs.handle))
        except RuntimeError as error:
            reason = f"memory of device {theirs.device} cannot be mapped: {error}"
    return reason
