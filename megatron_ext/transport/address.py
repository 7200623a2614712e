"""Publishes each process's address and chooses the wire between two ranks."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ext.errors import TransportError
from megatron_ext.version import __version__

Wire = Literal["auto", "shm", "tcp", "rdma"]


@dataclass(frozen=True)
class Address:
    """The address that a process publishes. Its name and port are public, but its secret is not."""

    version: str
    byte_order: str
    wire: str
    """The configured wire: auto, shm, tcp or rdma."""
    host: str
    boot_id: str
    network: int
    """Inode of the network namespace. Abstract socket names are valid only within one namespace."""
    name: str
    """The unix socket's name, in the abstract namespace."""
    secret: str
    ip: str = ""
    """IP address on which the process listens for TCP; empty if it does not listen."""
    port: int = 0
    no_rdma: str = "it was not probed"
    """Why the process cannot use RDMA; empty if it can."""

    @classmethod
    def new(cls, wire: Wire) -> Address:
        """Return this process's address before it listens for TCP or probes RDMA."""
        return cls(
            version=__version__,
            byte_order=sys.byteorder,
            wire=wire,
            host=socket.gethostname(),
            # Host names are not unique: containers, and machines cloned from the same image, may
            # share a host name.
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            network=Path("/proc/self/ns/net").stat().st_ino,
            name=f"megatron_ext-{secrets.token_hex(8)}",
            # Every connection starts with the secret. Ranks read it from the job's store; other
            # processes cannot.
            secret=secrets.token_hex(16),
        )

    def why_no_memory_with(self, other: Address) -> str | None:
        """Return why the two processes cannot share memory; None if they can."""
        is_same_host = other.host == self.host and other.boot_id == self.boot_id
        if not is_same_host:
            return f"it runs on host {other.host}, this one on {self.host}"
        if other.network != self.network:
            return "it is in another network namespace; use the host's network in both containers"
        return None


def choose_wire(
    rank: int,
    address: Address,
    peer: int,
    peer_address: Address,
) -> tuple[str, str]:
    """Choose the wire between this process (`rank`) and a peer: shm, tcp or rdma, with the reason.

    `address` is this process's own. The peer makes the same decision.

    Raises:
        TransportError: The configured wire is unavailable, or the two processes differ in their
            configured wire, version or byte order.
    """
    # Compare versions and byte orders here: messages contain neither, and message headers may
    # change in any release.
    is_same_version = peer_address.version == address.version
    is_same_byte_order = peer_address.byte_order == address.byte_order
    if not (is_same_version and is_same_byte_order):
        raise TransportError(
            f"rank {peer} runs megatron_ext {peer_address.version} ({peer_address.byte_order} "
            f"endian), but rank {rank} runs {address.version} ({address.byte_order} endian); "
            f"install the same version on all hosts"
        )
    if peer_address.wire != address.wire:
        raise TransportError(
            f"rank {peer} uses transport {peer_address.wire}, but rank {rank} uses {address.wire}; "
            f"use the same --pipeline-transport on all ranks"
        )
    no_memory = address.why_no_memory_with(peer_address)
    no_rdma = []
    for end in (address, peer_address):
        if end.no_rdma:
            no_rdma.append(f"host {end.host} has no RDMA: {end.no_rdma}")
    if address.wire == "shm" and no_memory is not None:
        raise TransportError(
            f"rank {rank} shares no memory with rank {peer}: {no_memory}; use "
            f"--pipeline-transport auto"
        )
    if address.wire == "rdma" and no_rdma:
        raise TransportError(
            f"rank {rank} cannot reach rank {peer} over RDMA: {'; '.join(no_rdma)}; use "
            f"--pipeline-transport auto, or fix RDMA"
        )
    # Both processes check both addresses, so that neither one waits for a peer that has already
    # raised an error.
    if no_memory is not None:
        _require_reachable(rank, address)
        _require_reachable(peer, peer_address)
    if address.wire != "auto":
        return address.wire, "as configured"
    if no_memory is None:
        return "shm", "they are on the same host"
    # RDMA is faster, but both processes must support it; TCP works between any two hosts.
    if no_rdma:
        return "tcp", "; ".join(no_rdma)
    return "rdma", no_memory


def _require_reachable(rank: int, address: Address) -> None:
    """Raise TransportError for a loopback address, since a host's own name may resolve to one."""
    if address.ip and ipaddress.ip_address(address.ip).is_loopback:
        raise TransportError(
            f"rank {rank} listens on {address.ip}, which only its own host {address.host} can "
            f"reach; set the hosts' addresses with --node-ips"
        )


def own_address(
    node_ips: Sequence[str],
    rank: int,
    world_size: int,
    ranks_per_node: int | None,
    rendezvous_host: str,
) -> str:
    """Return the IP address that other hosts use to reach this host.

    Args:
        node_ips: Addresses or host names (`--node-ips`), either one per node, in rank order, or one
            per rank. If empty, the source address of the route to `rendezvous_host` is used.
        rank: Global rank of this process.
        world_size: Number of ranks.
        ranks_per_node: Number of ranks on each node; None if all ranks are on one node.
        rendezvous_host: The job's rendezvous host (MASTER_ADDR).

    Raises:
        TransportError: The number of addresses is wrong, this host's address is unusable, or there
            is no route to the rendezvous host.
    """
    if not node_ips:
        try:
            return source_address(rendezvous_host)
        except OSError as error:
            raise TransportError(
                f"this host has no route to {rendezvous_host} ({error}); set the hosts' addresses "
                f"with --node-ips"
            ) from error
    local_world_size = ranks_per_node or world_size
    num_nodes = max(1, world_size // local_world_size)
    if len(node_ips) not in (num_nodes, world_size):
        raise TransportError(
            f"--node-ips has {len(node_ips)} addresses; give one for each of the {num_nodes} nodes "
            f"or one for each of the {world_size} ranks"
        )
    # The list has one address per host, or one per rank.
    index = rank // local_world_size
    if len(node_ips) == world_size:
        index = rank
    name = node_ips[index]
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        _, _, _, _, socket_address = answers[0]
        ip = str(socket_address[0])
    except OSError as error:
        raise TransportError(
            f"--node-ips: {name} is not an address or a known host ({error}); give the IP address "
            f"that the other hosts can reach"
        ) from error
    if ipaddress.ip_address(ip).is_unspecified:
        raise TransportError(
            f"--node-ips: {name} means every address of this host; give the one that the other "
            f"hosts can reach"
        )
    if num_nodes > 1 and ipaddress.ip_address(ip).is_loopback:
        raise TransportError(
            f"--node-ips: {name} is {ip} on this host, which the other {num_nodes - 1} cannot "
            f"reach; give the address that they can reach"
        )
    return ip


def source_address(peer: str) -> str:
    """Return the source IP address that this host uses to connect to a peer.

    Raises:
        OSError: The peer's name does not resolve, or there is no route to it.
    """
    # Ask the routing table, because the first network interface may be the wrong one. Connecting a
    # datagram socket does not send a packet.
    answers = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = answers[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
