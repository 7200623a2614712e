"""Opens the native transport of a process in a job that torch.distributed's launcher started."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_ext.transport.address import node_address
from megatron_ext.transport.native_transport import NativeTransport

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.rendezvous import Store

__all__ = ["open_native"]

_opened: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
"""By label: how many this process has opened, the same number on all peers."""


def open_native(
    store: Store,
    rank: int,
    peers: Iterable[int],
    *,
    label: str,
    world_size: int,
    wire: Wire,
    node_ips: Sequence[str],
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
        label: Tells jobs apart that share a store.
        world_size: Processes that global ranks count.
        wire: What carries the messages.
        node_ips: Address of each node; empty: found out.
        slots: Messages of one peer that have room here.
        slot_bytes: Room for each.
        timeout_s: How long to wait for the peers.
        checksums: Whether the bytes of tensors are checked on arrival.

    Raises:
        TransportError: A peer does not come, or cannot be reached by the wire.
    """
    launch = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return NativeTransport(
        store,
        rank,
        peers,
        # The number of the transport: a process that parses its arguments twice opens two.
        run_id="/".join([label, *launch, str(next(_opened[label]))]),
        device=torch.device("cpu"),
        wire=wire,
        ip=node_address(node_ips, rank, world_size, per_node),
        slots=slots,
        slot_bytes=slot_bytes,
        connect_timeout_s=timeout_s,
        checksums=checksums,
    )
