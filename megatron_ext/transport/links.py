"""The links of a native endpoint, each over the wire of its pair of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext.transport.native import require_native

if TYPE_CHECKING:
    from megatron_ext.transport._C import Endpoint, Link
    from megatron_ext.transport.rendezvous import Connection

__all__ = ["add_links", "default_spin_s", "why_no_rdma"]

_log = logging.getLogger(__name__)

_SPIN_S = 20e-6
"""How long a wait spins before it sleeps, on a host with a CPU for each rank."""


def add_links(
    endpoint: Endpoint,
    rank: int,
    connections: Mapping[int, Connection],
    *,
    ip: str | None,
    timeout_s: float,
    silence_s: float,
    rail: int,
) -> list[tuple[int, int]]:
    """Make the links to all peers and add them to an endpoint; close the sockets.

    It creates all links before it finishes any: both ends of a link have to take part in that.

    Args:
        endpoint: Of this process.
        rank: Of this process.
        connections: Wire and socket of each peer.
        ip: Address of this host, which selects an RDMA port.
        timeout_s: How long to wait for each peer.
        silence_s: How long a peer on another host may stay silent before it counts as dead.
        rail: Local rank, which selects one of several RDMA devices.

    Returns:
        Address and size in bytes of the slots that messages to and from the peers lie in.

    Raises:
        TransportError: A peer does not appear, or memory is short.
    """
    native = require_native()
    links: dict[int, Link] = {}
    memory: list[tuple[int, int]] = []
    try:
        for peer, (wire, _, socket) in connections.items():
            if wire == "shm":
                links[peer] = native.ShmLink(endpoint, peer, socket)
            elif wire == "tcp":
                links[peer] = native.TcpLink(endpoint, peer, socket, silence_s)
            else:
                links[peer] = native.RdmaLink(endpoint, peer, socket, ip or "", rail, silence_s)
        for peer, link in sorted(links.items()):
            if isinstance(link, native.ShmLink):
                link.accept(timeout_s)
            elif isinstance(link, native.RdmaLink):
                link.connect(timeout_s)
                _log.info("rank %d and rank %d: %s", rank, peer, link.text)
            if isinstance(link, (native.ShmLink, native.RdmaLink)):
                memory += [link.slots, link.peer_slots]
            endpoint.add(peer, link)
    finally:
        for connection in connections.values():
            connection.socket.close()
    return memory


def why_no_rdma(ip: str | None) -> str:
    """Return why this process cannot use RDMA; empty if it can."""
    from megatron_ext.transport.rdma_probe import probe

    result = probe(ip)
    return "" if result.usable else result.reason


def default_spin_s(connections: Mapping[int, Connection], ranks_per_node: int | None) -> float:
    """Return how long a wait spins before it sleeps: 0 if ranks may have to share a CPU."""
    local = 1 + sum(connection.wire == "shm" for connection in connections.values())
    num_ranks = local if ranks_per_node is None else ranks_per_node
    return _SPIN_S if num_ranks <= len(os.sched_getaffinity(0)) else 0.0
