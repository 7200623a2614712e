"""Opens the native transport of a process in a job that torch.distributed's launcher started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_ext.transport.address import address_towards, node_address
from megatron_ext.transport.native_transport import NativeTransport

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.rendezvous import Store

__all__ = ["open_native"]


def open_native(
    store: Store,
    rank: int,
    peers: Iterable[int],
    *,
    run_id: str,
    world_size: int,
    ranks_per_node: int | None,
    rail: int,
    wire: Wire,
    node_ips: Sequence[str],
    rendezvous_host: str,
    slots: int,
    slot_bytes: int,
    timeout_s: float,
    checksums: bool,
) -> NativeTransport:
    """Connect this process with its peers; all of them have to call it, in the same order.

    Args:
        store: Through which the peers find each other.
        rank: Global rank of this process.
        peers: Global ranks that it exchanges tensors with.
        run_id: Tells jobs apart that share a store, and the transports of one job. The same on all
            peers.
        world_size: Processes that global ranks count.
        ranks_per_node: Those on each host; None: all.
        rail: Number of this process on its host.
        wire: What carries the messages.
        node_ips: Address of each node; empty: the one on the way to `rendezvous_host`.
        rendezvous_host: Where the processes of the job find each other.
        slots: Messages of one peer that have room here.
        slot_bytes: Room for each.
        timeout_s: How long to wait for the peers.
        checksums: Whether the bytes of tensors are checked on arrival.

    Raises:
        TransportError: A peer does not come, or cannot be reached by the wire.
    """
    ip = node_address(node_ips, rank, world_size, ranks_per_node or world_size)
    if ip is None and wire != "shm":
        ip = address_towards(rendezvous_host)
    return NativeTransport(
        store,
        rank,
        peers,
        run_id=run_id,
        device=torch.device("cpu"),
        wire=wire,
        ip=ip,
        slots=slots,
        slot_bytes=slot_bytes,
        connect_timeout_s=timeout_s,
        checksums=checksums,
        rail=rail,
        ranks_per_node=ranks_per_node,
    )
