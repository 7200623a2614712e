"""Opens the transport of a configuration on the channels that a placement needs."""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext import devices
from megatron_ext.config.active import count_transport, required
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.transport.address import own_address
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport, Reach, find_reach
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.paired import PairedTransport
from megatron_ext.transport.staging import staged
from megatron_ext.transport.torch_dist import Channel, TorchTransport

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.devices.backend import Sharing
    from megatron_ext.runtime.program import Peers, Shapes
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.base import Transport
    from megatron_ext.transport.rendezvous import Store


def channels_of(placement: Placement, rank: int, peers: Peers) -> list[Channel]:
    """Return every channel on which this rank sends or receives under a placement."""
    me, channels = peers.pipeline[rank], []
    for stage, hop in enumerate(placement.hops):
        here, there = placement.rank_of[stage], placement.rank_of[stage + 1]
        if hop == "twin" and here == rank:
            assert peers.twin is not None
            ends = [(me, peers.twin), (peers.twin, me)]
        elif hop == "rank" and rank in (here, there):
            ends = [(peers.pipeline[here], peers.pipeline[there])]
        else:
            continue
        for source, target in ends:
            channels += [Channel(source, target, "F"), Channel(target, source, "B")]
    return channels


_LOG = logging.getLogger(__name__)

# Slot size when message sizes are unknown. Longer messages are sent in pieces.
_SLOT_BYTES = 1 << 20


def open_transport(
    pipeline: Pipeline,
    device: torch.device,
    channels: Sequence[Channel],
    shapes: Shapes,
    dtype: torch.dtype,
    routes: tuple[Route, ...] = (),
) -> Transport:
    """Connect this rank to its peers. Collective over all ranks of the job.

    Args:
        pipeline: The pipeline of this run.
        device: Where to allocate received tensors.
        channels: Every channel on which this rank sends or receives.
        shapes: Shapes of the tensors that stages exchange, `[s, b, h]` each.
        dtype: Their dtype.
        routes: The model's routes.

    Raises:
        TransportError: The transport is not available here; says why.
        DeviceError: The direct path between devices is not available.
    """
    me = dist.get_rank()
    backend = devices.current()
    opening = _Opening(
        pipeline,
        me,
        device,
        {rank for channel in channels for rank in channel[:2]} - {me},
        [shape for tensors in shapes.values() for shape in tensors],
        dtype,
        routes,
    )
    transport: Transport
    # By settings that are the same on all ranks: each branch is collective.
    if pipeline.config.tries_ipc and backend.reaches_peers:
        reach = find_reach(opening.peers, lambda: backend.sharing(device))
        transport = _between_devices(opening, reach, channels)
        wires = transport.stats().wires
        for peer, reason in sorted(reach.reasons.items()):  # it logs itself which pairs are direct
            if me < peer:
                _LOG.info("rank %d and rank %d: %s, not ipc: %s", me, peer, wires[peer], reason)
    elif pipeline.transport == "torch":
        transport = opening.over_torch(channels)
    elif pipeline.config.device_path == "ipc":
        sharing = backend.sharing(device)
        transport = opening.direct(opening.native(opening.peers, NOTE_BYTES), sharing)
    else:
        transport = opening.staged(opening.native(opening.peers))
    return transport


@dataclass(frozen=True)
class _Opening:
    """Settings with which the transports of a rank are opened."""

    pipeline: Pipeline
    rank: int
    """Global rank of this process."""
    device: torch.device
    peers: Set[int]
    """Global ranks of the peers."""
    known: Sequence[tuple[int, ...] | None]
    """Shapes of the tensors that stages exchange."""
    dtype: torch.dtype
    routes: tuple[Route, ...]
    """The model's routes."""

    @property
    def slots(self) -> int:
        """Slots of the arena for each pair of ranks."""
        dynamic = self.pipeline.dynamic
        return arena_slots(
            replace(self.pipeline.full, routes=self.routes),
            None if dynamic is None else dynamic.margin,
            self.pipeline.config.stash_ratio,
        )

    def over_torch(self, channels: Sequence[Channel]) -> TorchTransport:
        """Open torch.distributed for some channels. Collective over all ranks of the job."""
        assert dist.group.WORLD is not None
        return TorchTransport(
            dist.group.WORLD,
            self.device,
            channels,
            timeout_s=self.pipeline.timeout_s,
            shapes_travel=None in self.known,
        )

    def native(
        self, peers: Set[int], slot_bytes: int | None = None, *, wire: Wire | None = None
    ) -> NativeTransport:
        """Open the native transport to some peers, with slots for whole tensors by default."""
        name = self.pipeline.transport if wire is None else wire
        assert name != "torch"
        # Short slots hold notes about tensors, of which a dynamic order sends two for each: one
        # when the sender has launched it, one when it is there.
        num_notes = 2 if slot_bytes and self.pipeline.dynamic is not None else 1
        sizes = [
            math.prod(shape) * self.dtype.itemsize for shape in self.known if shape is not None
        ]
        return open_native(
            "pipeline",
            dist.distributed_c10d._get_default_store(),
            self.rank,
            dist.get_world_size(),
            peers,
            config=self.pipeline.config,
            wire=name,
            slots=self.slots * num_notes,
            slot_bytes=slot_bytes or max(sizes, default=_SLOT_BYTES),
            timeout_s=self.pipeline.timeout_s,
            device=self.device,
        )

    def direct(
        self, host: NativeTransport, sharing: Sharing, peers: Set[int] | None = None
    ) -> DirectTransport:
        """Open the direct transport; with `peers` it shares its host transport with another one."""
        transport = DirectTransport(
            host,
            sharing,
            self.rank,
            timeout_s=self.pipeline.timeout_s,
            peers=peers,
            owns_host=peers is None,
            reports_copies=self.pipeline.dynamic is not None,
        )
        # At exit too, see `through_host`.
        atexit.register(transport.close)
        return transport

    def staged(self, host: NativeTransport) -> Transport:
        """Return a transport that carries the device's tensors over a host transport."""
        return through_host(host, self.device, self.pipeline.timeout_s)


def open_native(
    label: str,
    store: Store,
    rank: int,
    num_ranks: int,
    peers: Iterable[int],
    *,
    config: PipelineConfig,
    wire: Wire,
    slots: int,
    slot_bytes: int,
    timeout_s: float,
    device: torch.device,
) -> NativeTransport:
    """Open the native core, on the address that the configuration and the launcher give this host.

    Args:
        label: Names the transports of one purpose, which are numbered.
        store: Key-value store in which processes find each other.
        rank: Rank of this process among those of the job.
        num_ranks: Processes of the job.
        peers: Ranks of its peers; each of them names this one.
        config: Has the addresses of hosts, and says whether messages carry checksums.
        wire: shm, tcp, rdma or auto.
        slots: Messages of each peer that have room here.
        slot_bytes: Size of a slot.
        timeout_s: How long to wait for the peers.
        device: Of the tensors that it will carry, itself or copies of them.

    Raises:
        TransportError: See `NativeTransport`.
    """
    environment = required().environment
    local_world_size = environment.local_world_size
    host = environment.rendezvous_host
    # The number tells a transport from those that earlier configurations opened in this store.
    run_id = "/".join([label, *environment.run, str(count_transport(label))])
    return NativeTransport(
        store,
        rank,
        peers,
        run_id=run_id,
        wire=wire,
        ip=own_address(wire, config.node_ips, rank, num_ranks, local_world_size, host),
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

    Args:
        host: Carries host tensors; closed with the result.
        device: The device.
        timeout_s: How long a step waits for the sends of the previous one.
    """
    transport = staged(host, devices.current().copies(device), timeout_s=timeout_s)
    # A process that just ends looks to its peers as if it had died.
    atexit.register(transport.close)
    return transport


def _between_devices(opening: _Opening, reach: Reach, channels: Sequence[Channel]) -> Transport:
    """Open the best path for each pair of ranks: direct where devices reach each other."""
    # Only a dynamic order asks what has arrived, which torch.distributed cannot answer; under a
    # table it serves the other pairs, and the native core stays out of their way.
    if opening.pipeline.transport == "torch":
        left = [channel for channel in channels if not reach.direct & {*channel[:2]}]
        over_torch = opening.over_torch(left)  # collective, even if this rank has no such pair
        if not reach.direct:
            return over_torch
        assert reach.sharing is not None
        host = opening.native(reach.direct, NOTE_BYTES, wire="shm")
        direct = opening.direct(host, reach.sharing)
        return PairedTransport(direct, over_torch) if left else direct
    # Slots have the same size on all ranks, so short ones are for jobs without another pair.
    host = opening.native(opening.peers, NOTE_BYTES if reach.is_complete else None)
    if not reach.direct:
        return opening.staged(host)
    assert reach.sharing is not None
    if not reach.reasons:
        return opening.direct(host, reach.sharing)
    # First: exit hooks run in reverse, so it closes last, and the host transport with it.
    rest = opening.staged(host)
    return PairedTransport(opening.direct(host, reach.sharing, reach.direct), rest)
