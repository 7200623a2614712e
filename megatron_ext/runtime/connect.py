"""Opens the transport of a configuration between the ranks whose messages a table has."""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext import devices
from megatron_ext.config.active import name_transport, required
from megatron_ext.errors import TransportError
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.transport.address import own_address
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport, find_reach
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport
from megatron_ext.transport.torch_dist import Pair, TorchTransport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import TransportName
    from megatron_ext.runtime.program import Peers, Shapes, Table
    from megatron_ext.schedules.table.actions import Route
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.base import Transport


def pairs_of(table: Table, peers: Peers) -> set[Pair]:
    """Return the global ranks (source, target) between which this rank's messages travel."""
    me, pairs = peers.pipeline[table.rank], set()
    for exchange in table.exchanges:
        for transfer in (*exchange.all_inputs, *exchange.all_outputs):
            if transfer.verb != "LOCAL":
                there = peers.of(transfer)
                pairs.add((me, there) if transfer.verb == "SEND" else (there, me))
    return pairs


_LOG = logging.getLogger(__name__)

# Slot size when message sizes are unknown. Longer messages are sent in pieces.
_SLOT_BYTES = 1 << 20


def open_transport(
    pipeline: Pipeline,
    device: torch.device,
    pairs: Set[Pair],
    shapes: Shapes,
    dtype: torch.dtype,
    routes: tuple[Route, ...] = (),
) -> Transport:
    """Connect this rank to its peers. Collective over all ranks of the job.

    `device` is where received tensors are allocated, and `pairs` has all (source, target) with
    this rank. Stages exchange tensors of `shapes`, `[s, b, h]` each, and `dtype`.

    Raises:
        TransportError: The transport, or the chosen path between devices, is not available; says
            why.
    """
    # On all ranks, though below only those with a direct peer may open the native transport.
    name = name_transport("pipeline")
    me, backend, timeout_s = dist.get_rank(), devices.current(), pipeline.timeout_s
    peers = {rank for pair in pairs for rank in pair} - {me}
    known = [shape for tensors in shapes.values() for shape in tensors]

    def over_torch(pairs: Set[Pair]) -> TorchTransport:
        """Open torch.distributed. Collective over all ranks of the job."""
        return TorchTransport(device, pairs, timeout_s=timeout_s, shapes_travel=None in known)

    def native(peers: Set[int], slot_bytes: int | None, wire: TransportName) -> NativeTransport:
        """Open the native transport to some peers, with slots for whole tensors by default."""
        assert wire != "torch"
        # Short slots hold notes about tensors, of which a dynamic order sends two for each: one
        # when the sender has launched it, one when it is there.
        num_notes = 2 if slot_bytes and pipeline.dynamic is not None else 1
        sizes = [math.prod(shape) * dtype.itemsize for shape in known if shape is not None]
        return open_native(
            name,
            dist.distributed_c10d._get_default_store(),
            me,
            dist.get_world_size(),
            peers,
            wire=wire,
            slots=slots_of(pipeline, routes) * num_notes,
            slot_bytes=slot_bytes or max(sizes, default=_SLOT_BYTES),
            timeout_s=timeout_s,
            device=device,
        )

    needs_ipc = pipeline.config.device_path == "ipc"
    if not (needs_ipc or (pipeline.config.tries_ipc and not backend.is_host)):
        if pipeline.transport == "torch":
            return over_torch(pairs)
        return through_host(native(peers, None, pipeline.transport), device, timeout_s)

    # By settings that are the same on all ranks: this branch is collective.
    reach = find_reach(peers, lambda: backend.sharing(device))
    if needs_ipc and not reach.is_complete:
        reasons = (f"with that of rank {peer}: {why}" for peer, why in reach.reasons.items())
        raise TransportError(
            f"rank {me}: its device cannot exchange tensors "
            f"{'; '.join(reasons) or 'where those of other ranks cannot'}; take "
            f"--pipeline-device-path staged"
        )
    direct = peers - reach.reasons.keys()
    # Only a dynamic order asks what has arrived, which torch.distributed cannot answer; under a
    # table it serves the other pairs, and the native core stays out of their way.
    rest: Transport | None = None
    if pipeline.transport == "torch":
        left = {pair for pair in pairs if direct.isdisjoint(pair)}
        others = over_torch(left)  # collective, even if this rank has no such pair
        rest = others if left or not direct else None
        host = native(direct, NOTE_BYTES, "shm") if direct else None
    else:
        # Slots have the same size on all ranks, so short ones are for jobs without another pair.
        host = native(peers, NOTE_BYTES if reach.is_complete else None, pipeline.transport)
        if reach.reasons or not direct:
            # Its exit hook runs after that of the direct transport, as hooks run in reverse.
            rest = through_host(host, device, timeout_s)
    transport = rest
    if direct:
        assert host is not None
        assert reach.sharing is not None
        transport = DirectTransport(
            host,
            reach.sharing,
            me,
            timeout_s=timeout_s,
            peers=direct,
            indirect=rest,
            reports_copies=pipeline.dynamic is not None,
        )
        atexit.register(transport.release)  # as in `through_host`
    assert transport is not None
    wires = transport.stats().wires
    for peer, reason in sorted(reach.reasons.items()):  # it logs itself which pairs are direct
        if me < peer:
            _LOG.info("rank %d and rank %d: %s, not ipc: %s", me, peer, wires[peer], reason)
    return transport


def slots_of(pipeline: Pipeline, routes: tuple[Route, ...] = ()) -> int:
    """Return the slots of the arena for each pair of ranks."""
    dynamic = pipeline.dynamic
    return arena_slots(
        replace(pipeline.full, routes=routes),
        None if dynamic is None else dynamic.margin,
        pipeline.config.stash_ratio,
    )


def open_native(
    name: str,
    store: Store,
    rank: int,
    num_ranks: int,
    peers: Iterable[int],
    *,
    wire: Wire,
    slots: int,
    slot_bytes: int,
    timeout_s: float,
    device: torch.device,
) -> NativeTransport:
    """Open the native core, on the address that the configuration and the launcher give this host.

    Ranks count all processes of the job, which find each other in `store` by the transport's name
    (`name_transport`); each of the `peers` names this one. `slots` is how many messages of each
    peer have room here. The core carries tensors of `device`, or copies.

    Raises:
        TransportError: See `NativeTransport`.
    """
    config, environment = required().config, required().environment
    local_world_size = environment.local_world_size
    ip = None  # no other host connects over shared memory
    if wire != "shm":
        host = environment.rendezvous_host
        ip = own_address(config.node_ips, rank, num_ranks, local_world_size, host)
    return NativeTransport(
        store,
        rank,
        peers,
        run_id="/".join([name, *environment.run]),
        wire=wire,
        ip=ip,
        rail=environment.local_rank,
        ranks_per_node=local_world_size,
        slots=slots,
        slot_bytes=slot_bytes,
        connect_timeout_s=timeout_s,
        checksums=config.checksums,
        for_device=device.type != "cpu",
    )


def through_host(host: NativeTransport, device: torch.device, timeout_s: float) -> Transport:
    """Return a transport for a device's tensors over one of the host, closed at exit at the latest.

    It closes `host` too. `timeout_s` is how long a step waits for the sends of the previous one.
    """
    transport: Transport = host
    if not (backend := devices.current()).is_host:
        transport = StagedTransport(host, backend.copies(device), timeout_s=timeout_s)
    # A process that just ends looks to its peers as if it had died.
    atexit.register(transport.close)
    return transport
