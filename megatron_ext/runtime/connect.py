"""Opens the configured transport between the ranks that exchange messages in a table."""

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
from megatron_ext.config.active import name_transport, required
from megatron_ext.errors import TransportError
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.transport.address import own_address
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport, Reach, find_reach
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport
from megatron_ext.transport.torch_dist import Link, TorchTransport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import TransportName
    from megatron_ext.runtime.program import Peers, Shapes, Table
    from megatron_ext.schedules.table.actions import Bypass
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.base import Transport


_LOG = logging.getLogger(__name__)

# Slot size if message sizes are unknown. Longer messages are sent in pieces.
_SLOT_BYTES = 1 << 20


def links_of(table: Table, peers: Peers) -> set[Link]:
    """Return the links, as global ranks (source, target), that carry this rank's messages."""
    me = peers.pipeline[table.rank]
    links = set()
    for exchange in table.exchanges:
        for transfer in (*exchange.all_inputs, *exchange.all_outputs):
            if transfer.verb == "SEND":
                links.add((me, peers.of(transfer)))
            elif transfer.verb == "RECV":
                links.add((peers.of(transfer), me))
    return links


def open_transport(
    pipeline: Pipeline,
    device: torch.device,
    links: Set[Link],
    shapes: Shapes,
    dtype: torch.dtype,
    bypasses: tuple[Bypass, ...] = (),
) -> Transport:
    """Connect this rank to its peers. Collective over all ranks in the job.

    Args:
        pipeline: The active pipeline.
        device: The device on which received tensors are allocated.
        links: Every (source, target) that includes this rank, as global ranks.
        shapes: Shapes of the tensors that stages exchange, `[s, b, h]` each.
        dtype: The tensors' dtype.
        bypasses: Messages that bypass stages.

    Raises:
        TransportError: The transport or the chosen device path is not available; the message says
            why.
    """
    shapes_of_all_kinds: list[tuple[int, ...] | None] = []
    for shapes_of_kind in shapes.values():
        shapes_of_all_kinds += shapes_of_kind
    connections = _Connections(
        pipeline=pipeline,
        device=device,
        links=links,
        shapes=shapes_of_all_kinds,
        dtype=dtype,
        bypasses=bypasses,
        # Number the transport on all ranks, so that names match even if some ranks do not open the
        # native transport.
        name=name_transport("pipeline"),
    )
    # Use only settings that are identical on all ranks, because finding direct peers is
    # collective.
    config = pipeline.config
    tries_ipc = config.tries_ipc and not devices.current().is_host
    if tries_ipc or config.device_path == "ipc":
        return connections.between_devices()
    return connections.through_host_memory()


@dataclass(frozen=True, kw_only=True)
class _Connections:
    """Opens one rank's connections."""

    pipeline: Pipeline
    device: torch.device
    """Where received tensors are allocated."""
    links: Set[Link]
    """Every (source, target) that includes this rank, as global ranks."""
    shapes: Sequence[tuple[int, ...] | None]
    """Shapes of all tensors that stages exchange; None if the shape is sent with the tensor."""
    dtype: torch.dtype
    bypasses: tuple[Bypass, ...]
    name: str
    """The transport's name in the job's store."""

    @property
    def peers(self) -> set[int]:
        """Global ranks of all peers."""
        ranks = set[int]().union(*self.links)
        return ranks - {dist.get_rank()}

    def through_host_memory(self) -> Transport:
        """Open a transport without direct paths between devices. Collective over the job."""
        if self.pipeline.transport == "torch":
            return self._over_torch(self.links)
        host = self._native(
            self.peers,
            self.pipeline.transport,
            for_notes=False,
        )
        return through_host(host, self.device, self.pipeline.timeout_s)

    def between_devices(self) -> Transport:
        """Open direct paths to the peers that have them, and another transport for all other peers.

        Collective over the job.

        Raises:
            TransportError: A link has no direct path, but the configuration requires one.
        """
        backend = devices.current()
        reach = find_reach(self.peers, lambda: backend.sharing(self.device))
        requires_ipc = self.pipeline.config.device_path == "ipc"
        if requires_ipc and not reach.is_complete:
            raise TransportError(_no_direct_path(reach))
        direct_peers = self.peers - reach.reasons.keys()
        if self.pipeline.transport == "torch":
            host, indirect = self._beside_torch(direct_peers)
        else:
            host, indirect = self._beside_native(direct_peers, reach)
        if direct_peers:
            transport = self._direct(host, reach, direct_peers, indirect)
        else:
            assert indirect is not None
            transport = indirect
        self._log_indirect(transport, reach)
        return transport

    def _beside_torch(
        self, direct_peers: Set[int]
    ) -> tuple[NativeTransport | None, Transport | None]:
        """Open torch.distributed for indirect links, and the native core for notes on direct links.

        Either result is None if no link needs that transport. Collective over the job.
        """
        # torch.distributed does not report arrivals, which only a dynamic order needs.
        # With a static table, torch.distributed can handle the indirect links without
        # the native core.
        indirect_links = set()
        for link in self.links:
            if direct_peers.isdisjoint(link):
                indirect_links.add(link)
        over_torch = self._over_torch(indirect_links)  # collective, so always called
        if not direct_peers:
            return None, over_torch
        host = self._native(direct_peers, "shm", for_notes=True)
        if not indirect_links:
            return host, None
        return host, over_torch

    def _beside_native(
        self,
        direct_peers: Set[int],
        reach: Reach,
    ) -> tuple[NativeTransport, Transport | None]:
        """Open the native core for all peers, and a transport on top; None if all are direct."""
        # All ranks must use the same slot size, so use small slots only if no link in the job is
        # indirect.
        host = self._native(
            self.peers,
            self.pipeline.transport,
            for_notes=reach.is_complete,
        )
        if direct_peers and not reach.reasons:
            return host, None
        # `through_host` registers an exit hook. Exit hooks run in reverse order, so this hook runs
        # after the direct transport's, which is registered later.
        return host, through_host(host, self.device, self.pipeline.timeout_s)

    def _direct(
        self,
        host: NativeTransport | None,
        reach: Reach,
        direct_peers: Set[int],
        indirect: Transport | None,
    ) -> Transport:
        """Return the transport for direct links, which uses `indirect` for all other links."""
        assert host is not None
        assert reach.sharing is not None
        transport = DirectTransport(
            host,
            reach.sharing,
            dist.get_rank(),
            timeout_s=self.pipeline.timeout_s,
            peers=direct_peers,
            indirect=indirect,
            reports_copies=self.pipeline.dynamic is not None,
        )
        atexit.register(transport.release)  # as in `through_host`
        return transport

    def _over_torch(self, links: Set[Link]) -> TorchTransport:
        """Open torch.distributed for these links. Collective over all ranks in the job."""
        return TorchTransport(
            self.device,
            links,
            timeout_s=self.pipeline.timeout_s,
            shapes_travel=None in self.shapes,
        )

    def _native(
        self,
        peers: Set[int],
        wire: TransportName,
        *,
        for_notes: bool,
    ) -> NativeTransport:
        """Open the native transport to these peers, with slots for tensors or only for notes."""
        assert wire != "torch"
        num_slots = slots_of(self.pipeline, self.bypasses)
        slot_bytes = self._tensor_bytes()
        if for_notes:
            slot_bytes = NOTE_BYTES
            if self.pipeline.dynamic is not None:
                # With a dynamic order, the sender sends two notes about each tensor:
                # one after launching the computation, and one when the tensor is ready.
                num_slots *= 2
        return open_native(
            self.name,
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_world_size(),
            peers,
            wire=wire,
            slots=num_slots,
            slot_bytes=slot_bytes,
            timeout_s=self.pipeline.timeout_s,
            device=self.device,
        )

    def _tensor_bytes(self) -> int:
        """Return the size in bytes of the largest tensor whose size is known."""
        known_shapes = [shape for shape in self.shapes if shape is not None]
        if not known_shapes:
            return _SLOT_BYTES
        largest_numel = max(math.prod(shape) for shape in known_shapes)
        return largest_numel * self.dtype.itemsize

    @staticmethod
    def _log_indirect(transport: Transport, reach: Reach) -> None:
        """Log the links without a direct path; the transport logs the direct ones itself."""
        me = dist.get_rank()
        wires = transport.stats().wires
        for peer, reason in sorted(reach.reasons.items()):
            if me < peer:  # log one line for both ranks
                _LOG.info(
                    "rank %d and rank %d: %s, not ipc: %s",
                    me,
                    peer,
                    wires[peer],
                    reason,
                )


def _no_direct_path(reach: Reach) -> str:
    """Return the error message for devices that must exchange tensors directly but cannot."""
    reasons = [
        f"with rank {peer}'s device: {reason}" for peer, reason in reach.reasons.items()
    ]
    between = "; ".join(reasons) or "because other ranks' devices cannot"
    return (
        f"rank {dist.get_rank()}'s device cannot exchange tensors {between}; use "
        "--pipeline-device-path staged"
    )


def slots_of(pipeline: Pipeline, bypasses: tuple[Bypass, ...] = ()) -> int:
    """Return the number of arena slots per link."""
    margin = None
    if pipeline.dynamic is not None:
        margin = pipeline.dynamic.margin
    schedule = replace(pipeline.full, bypasses=bypasses)
    slots = arena_slots(schedule, margin, pipeline.config.stash_ratio)
    if pipeline.config.has_table_per_step:
        # If the longest micro-batch has two slices per rank, its slices and those that
        # fill the pipeline are about 3 pp messages in flight. Allow for both directions,
        # and twice as many. With more slices, messages wait at the sender.
        slots = max(slots, 4 * 3 * pipeline.pp)
    return slots


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
    """Open the native core on this host's address, from the configuration or the launcher.

    `rank` and `num_ranks` count all processes in the job. The processes find each other in `store`
    by the transport's name (`name_transport`), and each of the `peers` must list this rank as a
    peer. `slots` is the number of messages from each peer that this rank has room for. The core
    carries tensors on `device`, or copies of them.

    Raises:
        TransportError: See `NativeTransport`.
    """
    config = required().config
    environment = required().environment
    local_world_size = environment.local_world_size
    ip = None  # shared memory needs no address
    if wire != "shm":
        host = environment.rendezvous_host
        # A reserve rank takes over the number of a lost rank on another host, so the
        # number does not identify the host.
        ip = environment.host_address or own_address(
            config.node_ips,
            rank,
            num_ranks,
            local_world_size,
            host,
        )
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


def through_host(
    host: NativeTransport,
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """Return a transport for device tensors on top of a host transport, closed at exit.

    Closing it also closes `host`. `timeout_s` limits how long a step waits for the previous step's
    sends.
    """
    transport: Transport = host
    backend = devices.current()
    if not backend.is_host:
        copies = backend.copies(device)
        transport = StagedTransport(host, copies, timeout_s=timeout_s)
    # If a process exits without closing its transport, its peers report a crash.
    atexit.register(transport.close)
    return transport
