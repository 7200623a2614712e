"""The transport of the native core: messages in any order, over the wire that each pair has.

Between processes of one host the receiver owns the memory that a message is written to. A message
that fits a slot is received without another copy: the tensor stands on the slot, which is free
again when the last tensor that shares it is gone. Whoever keeps half of all slots that way gets
copies from then on, so keeping tensors never stops a sender. Between hosts messages go over TCP or
RDMA, with the same room for each peer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from megatron_ext.errors import (
    MessageMismatch,
    PeerAborted,
    PeerClosed,
    PeerDied,
    TransportError,
    TransportTimeout,
)
from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.dtypes import CAPSULE_CODE_OF, CODE_OF, plain, tensor_on
from megatron_ext.transport.native import require_native
from megatron_ext.transport.rendezvous import Connection, Store, connect_peers
from megatron_ext.transport.tags import NOTE, NUM_STEPS, Tags

if TYPE_CHECKING:
    from megatron_ext.messages import Message
    from megatron_ext.transport._C import Endpoint, Link, PeerReport
    from megatron_ext.transport._C import Message as Arrived
    from megatron_ext.transport.address import Wire

__all__ = ["NativeTransport"]

_log = logging.getLogger(__name__)

# The public function asks for __dlpack__ first, which for a capsule is a third of the time.
_from_dlpack = getattr(torch._C, "_from_dlpack", from_dlpack)

# How long a wait looks for news before it sleeps, where each process of the host has a CPU.
_SPIN_S = 20e-6


class NativeTransport:
    """Tensors between processes, in any order.

    All calls come from one thread, but `isend` and `abort` may come from another as well.

    A send is done when it returns if the receiver has room; otherwise the tensor is kept and a
    thread of the core goes on with it, whatever this process does meanwhile. All peers are
    connected by the constructor, so all of them have to construct theirs.

    Args:
        store: Where processes find each other, for example the store of torch.distributed.
        rank: Global rank of this process.
        peers: Global ranks that it exchanges messages with; each has to name this one. A rank may
            send to itself without being named.
        run_id: Sets jobs apart that share a store. The same on all ranks.
        device: Where tensors are. Only the CPU's are taken: see `staging.py` for others.
        wire: What carries messages: shm, tcp, rdma, or for each pair the best that it has (auto).
        slots: Room for messages of each peer, 2 or more. Half of it can be held by tensors that
            were received; the other half carries what comes meanwhile.
        slot_bytes: Room for each. Best is the usual size of a message: longer ones go through in
            pieces and are copied once more.
        connect_timeout_s: How long to wait for the peers.
        checksums: Whether the bytes of messages carry a checksum, which finds faulty memory and
            networks. Costs about a copy. The descriptors of messages always carry one.
        ip: Address of this host for peers on others; None: the one on the way to MASTER_ADDR.
        silence_s: A peer on another host that answers nothing for so long is taken for dead.
        spin_s: How long a wait looks for messages of processes on other CPUs before it sleeps.
            None: 20 us if every rank of this host can have a CPU, otherwise nothing.
        rail: Number of this rank on its host, by which it takes one of several RDMA devices.
        ranks_per_node: Ranks on this host; None: those that this one shares memory with.

    Raises:
        TransportError: The native core is missing, a peer does not come or cannot be reached over
            the wire, there is not enough memory, or the device is not the CPU.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        peers: Iterable[int],
        *,
        run_id: str,
        device: torch.device,
        wire: Wire = "auto",
        slots: int = 16,
        slot_bytes: int = 1 << 20,
        connect_timeout_s: float = 60.0,
        checksums: bool = False,
        ip: str | None = None,
        silence_s: float = 15.0,
        spin_s: float | None = None,
        rail: int = 0,
        ranks_per_node: int | None = None,
    ) -> None:
        _require_cpu(device)
        self._rank = rank
        self._slots = slots
        native = require_native()
        self._Arrived: type[Arrived] = native.Message
        self._endpoint: Endpoint | None = native.Endpoint(rank, slots, slot_bytes, checksums)
        self._open = self._endpoint
        """The endpoint, as long as messages may be sent and received."""
        self._stats = Stats()
        """As of the last look at the endpoint, which counts."""
        self._given_up: str | None = None
        self._warned = False
        self._step = 0
        self._tags = Tags()
        self._expected: dict[tuple[int, int], Expected] = {}
        """By source and tag: what was announced and not received."""
        self._told: dict[tuple[int, int], None] = {}
        """Arrivals that the core named and that `poll` did not return, in order."""
        connections = connect_peers(
            store, rank, peers, run_id=run_id, timeout_s=connect_timeout_s, wire=wire, ip=ip,
            no_rdma=_why_no_rdma(ip) if wire in ("auto", "rdma") else "it was not looked for",
        )  # fmt: skip
        self._hosts = {peer: connection.host for peer, connection in connections.items()}
        self._wires = {peer: connection.wire for peer, connection in connections.items()}
        self.arenas: list[tuple[int, int]] = []
        """Address and bytes of the shared memory that messages of peers arrive in."""
        self._connect(connections, ip, connect_timeout_s, silence_s, rail)
        if spin_s is None:
            spin_s = _default_spin_s(connections, ranks_per_node)
        self._usable().set_spin(spin_s)

    def _connect(
        self,
        connections: dict[int, Connection],
        ip: str | None,
        timeout_s: float,
        silence_s: float,
        rail: int,
    ) -> None:
        """Make the links. Those that peers make together are begun everywhere, then finished."""
        native, endpoint = require_native(), self._usable()
        links: dict[int, Link] = {}
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
                    self.arenas.append(link.slots)
                elif isinstance(link, native.RdmaLink):
                    link.connect(timeout_s)
                    _log.info("rank %d and rank %d: %s", self._rank, peer, link.text)
                endpoint.add(peer, link)
        finally:
            for connection in connections.values():
                connection.socket.close()

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step. Messages of peers that are ahead may be here already."""
        self._usable()
        if self._expected:
            left = next(iter(self._expected.values()))
            raise TransportError(f"{left.message} of the step before was never received")
        self._warn_if_narrow(slots)
        self._step = step = (self._step + 1) % NUM_STEPS
        tags = self._tags
        self._expected = {(item.source, tags[item.message] | step): item for item in expected}

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor. It is copied at once, or kept until there is room for it."""
        endpoint = self._open or self._usable()
        if not tensor.is_cpu:
            _require_cpu(tensor.device)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = plain(tensor)
        code = CODE_OF.get(tensor.dtype)
        if code is None:
            raise TransportError(f"{message}: tensors of {tensor.dtype} cannot be sent")
        tag = self._tags[message] | self._step
        try:
            # The storage is what has to stay: the caller may swap the `data` of the tensor.
            endpoint.send(
                target, tag, code, tensor.shape, tensor.data_ptr(), tensor.untyped_storage()
            )
        except TransportError as error:
            what = f"{message} cannot be sent to rank {target}"
            raise self._failure(what, target, message, error) from error

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a tensor when it is there; it shares its memory with nobody who writes."""
        endpoint = self._open or self._usable()
        tag = self._tags[message] | self._step
        name = (source, tag)
        expected = self._expected.get(name)
        if expected is None:
            raise TransportError(f"{message} is not expected from rank {source} in this step")
        shape, dtype = expected.shape, expected.dtype
        try:
            arrived = endpoint.take(source, tag, timeout_s, CAPSULE_CODE_OF.get(dtype, 0))
        except TransportError as error:  # what came is damaged, of whatever message
            raise TransportError(
                f"{message} cannot be received from rank {source}: {error}"
            ) from error
        if arrived is None:
            what = f"{message} did not come from rank {source}: {self._waited(endpoint)}"
            raise self._failure(what, source, message, timeout_s)
        self._expected.pop(name, None)  # gone if another thread gave up meanwhile
        if self._told:
            self._told.pop(name, None)
        if type(arrived) is self._Arrived:
            tensor = tensor_on(arrived)
            fits = tensor.dtype == dtype and shape in (None, tensor.shape)
        else:  # a capsule, which is of the dtype that was asked for
            tensor = _from_dlpack(arrived)
            fits = shape is None or shape == tensor.shape
        if not fits:
            raise MessageMismatch(
                f"{message} from rank {source} has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"expected shape {shape or 'any'} and {dtype}; give all ranks the same flags"
            )
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return what arrived since the last call; sleep until there is something."""
        endpoint = self._usable()
        begin = time.perf_counter()
        while True:
            # Looked up once: another thread that gives up clears what is expected.
            found = (self._expected.get(name) for name in self._told)
            messages = [item.message for item in found if item is not None]
            if messages:
                self._told = {name: None for name in self._told if name not in self._expected}
                break
            left_s = max(0.0, begin + timeout_s - time.perf_counter())
            arrivals = endpoint.arrivals(left_s)
            self._told.update(dict.fromkeys(arrivals))
            if not arrivals:
                if not timeout_s:
                    break  # who waits will be told if nothing can arrive
                self._require_peers(begin)
                if time.perf_counter() - begin >= timeout_s:
                    break
        return messages

    def note(self, target: int, content: bytes) -> None:
        """Tell a peer something besides messages, in or between steps."""
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        code = CODE_OF[text.dtype]
        self._usable().send(target, NOTE, code, text.shape, text.data_ptr(), text)

    def noted(self, source: int, timeout_s: float = 0.0) -> bytes | None:
        """Return the next note of a peer; None if there is none and no time to wait for one."""
        endpoint = self._usable()
        arrived = endpoint.take(source, NOTE, timeout_s)
        if arrived is None and timeout_s > 0:
            what = f"rank {source} did not answer: {self._waited(endpoint)}"
            raise self._failure(what, source, None, timeout_s)
        return None if arrived is None else bytes(memoryview(arrived))  # type: ignore[arg-type]

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is where its receiver can take it."""
        endpoint = self._usable()
        if not endpoint.flush(timeout_s):
            target = next((peer.rank for peer in endpoint.peers() if peer.num_queued), None)
            if target is None:
                return  # the last message left after the time-out, and before this look
            what = f"rank {target} did not take what was sent to it: {self._waited(endpoint)}"
            raise self._failure(what, target, None, timeout_s)

    def abort(self, reason: str) -> None:
        """Give up for good: peers that wait are told at once, and so is every later call here."""
        if self._endpoint is not None and self._given_up is None:
            self._given_up = reason
            self._open = None
            self._expected.clear()
            # Names of files may hold what is no text; an error here would hide the one that counts.
            text = reason.encode(errors="replace").decode()
            self._endpoint.abort(f"rank {self._rank}: {text}")

    def close(self) -> None:
        """Say farewell and let go of all memory but that of tensors that are still in use."""
        if self._endpoint is not None:
            self._endpoint.close()
            self.stats()
            self._endpoint = self._open = None

    def stats(self) -> Stats:
        """Return what was done so far."""
        if self._endpoint is not None:
            counts = self._endpoint.counts()
            self._stats = Stats(
                counts.num_messages, counts.num_bytes, counts.waited_s, dict(self._wires)
            )
        return self._stats

    def _usable(self) -> Endpoint:
        if self._endpoint is None:
            raise TransportError("the transport is closed")
        if self._given_up is not None:
            raise TransportError(f"the transport was given up: {self._given_up}")
        return self._endpoint

    @staticmethod
    def _waited(endpoint: Endpoint) -> str:
        return f"waited {endpoint.counts().last_wait_s:.1f} s"

    def _require_peers(self, begin: float) -> None:
        """Raise if nothing can arrive any more."""
        reports = self._usable().peers()
        waited_s = time.perf_counter() - begin
        what = f"no message can arrive: waited {waited_s:.1f} s"
        if any(report.state in ("died", "aborted") for report in reports):
            raise self._failure(what, self._rank, None, 0.0)
        if reports and all(report.state == "closed" for report in reports):
            raise PeerClosed(f"{what}, all peers closed their transports")

    def _failure(
        self, what: str, peer: int, message: Message | None, cause: float | TransportError
    ) -> TransportError:
        """The exception for a call that failed because of the state of `peer`, or of any.

        Args:
            what: What did not happen.
            peer: The rank that it needed.
            message: The message that it needed.
            cause: How many seconds it was to wait at most, or what the core says.
        """
        if message is not None:
            what = f"{what} (tag {self._tags[message] | self._step:#x})"
        # The one that was needed first: others may have ended because of it.
        reports = sorted(self._usable().peers(), key=lambda report: report.rank != peer)
        for report in reports:
            if report.state == "aborted":
                return PeerAborted(f"{what}; {self._place(report)} gave up: {report.reason}")
        for report in reports:
            why = f" ({report.reason})" if report.reason else ""
            if report.state == "died":
                return PeerDied(f"{what}; {self._place(report)} died{why}")
            if report.state == "closed" and report.rank == peer:
                return PeerClosed(f"{what}; {self._place(report)} closed its transport")
        if isinstance(cause, TransportError):
            return TransportError(f"{what}: {cause}")
        links = "; ".join(
            f"{self._place(report)} is {report.state}: {report.num_arrived} messages arrived and "
            f"not taken, {report.num_held} of {self._slots} slots in use, {report.num_queued} "
            f"messages to it queued"
            for report in reports
        )
        return TransportTimeout(f"{what} of {cause:g} s; {links or 'there are no peers'}")

    def _place(self, report: PeerReport) -> str:
        return f"rank {report.rank} on host {self._hosts[report.rank]} (wire {report.wire})"

    def _warn_if_narrow(self, slots: int) -> None:
        """Say once if messages will wait at their sender: `slots` of each of two kinds."""
        if 2 * slots > self._slots and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d has room for %d messages of each peer, and up to %d may be under way: "
                "some will wait at their sender, and cross while it computes",
                self._rank, self._slots, 2 * slots,
            )  # fmt: skip


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise TransportError(
            f"tensors on {device} cannot be sent by the native core, which takes those of the CPU "
            f"only; send them through a StagedTransport"
        )


def _why_no_rdma(ip: str | None) -> str:
    """Why this process cannot use RDMA; empty if it can."""
    from megatron_ext.transport.rdma_probe import probe

    result = probe(ip)
    return "" if result.usable else result.reason


def _default_spin_s(connections: dict[int, Connection], ranks_per_node: int | None) -> float:
    """How long to look for news before a sleep: nothing if ranks may have to share a CPU."""
    local = 1 + sum(connection.wire == "shm" for connection in connections.values())
    num_ranks = local if ranks_per_node is None else ranks_per_node
    return _SPIN_S if num_ranks <= len(os.sched_getaffinity(0)) else 0.0
