"""Opens the native transport of a process in a torch.distributed job."""

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
    for_device: bool,
) -> NativeTransport:
    """Connect this process to its peers, all of which have to call this, in the same order.

    Args:
        store: Key-value store in which the peers find each other.
        rank: Global rank of this process.
        peers: Global ranks of the peers.
        run_id: Distinguishes the jobs of one store and the transports of one job. The same on all
            peers.
        world_size: Number of ranks of the job.
        ranks_per_node: Number of ranks on each node; None: all.
        rail: Local rank, which selects one of several RDMA devices.
        wire: shm, tcp, rdma or auto.
        node_ips: IP address or name of each node; empty: the address on the route to
            `rendezvous_host`.
        rendezvous_host: Host of the job's rendezvous (MASTER_ADDR).
        slots: Messages of each peer that have room here.
        slot_bytes: Size of a slot.
        timeout_s: How long to wait for the peers.
        checksums: Whether the bytes of tensors carry a checksum.
        for_device: Whether the tensors are a device's, whose copies are staged.

    Raises:
        TransportError: A peer does not appear, or is unreachable over the wire.
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
        for_device=for_device,
    )
