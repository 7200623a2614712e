"""The native core's transport: carries messages in any order, over the wire chosen for each peer.

Within a host, the sender writes messages into the receiver's memory. A message that fits in a slot
is received without another copy: the tensor uses the slot's memory, which is freed together with
the last tensor that shares it. Between hosts, messages use TCP or RDMA, with the same number of
slots per peer.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
from megatron_ext.message import Message, MessageKind
from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.dtypes import CAPSULE_CODE_OF, CODE_OF, plain, tensor_on
from megatron_ext.transport.native import require_native
from megatron_ext.transport.rendezvous import connect_peers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megatron_ext.transport._C import Endpoint, Link, PeerReport
    from megatron_ext.transport._C import Message as NativeMessage
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.rendezvous import Connection

_log = logging.getLogger(__name__)

# The public function looks for __dlpack__ first, which takes a third of the call's time
# if the argument is a capsule.
_from_dlpack = getattr(torch._C, "_from_dlpack", from_dlpack)

_EMPTY = torch.empty(0, dtype=torch.uint8)

# The arena's limit (csrc/core/arena.h). A gpipe table, for example, may need more slots.
_MAX_SLOTS = 1024

# How long `poll` sleeps before it checks for peers that have closed.
_TURN_S = 1.0

# How long to spin before sleeping, on a host with at least one CPU per rank.
_SPIN_S = 20e-6

# The fields of a tag, from the highest bit: kind (4 bits), launched (1), header (1),
# then the fields below. The step is in the low bits, so an OR turns a step-0 tag into
# any step's tag.
_KINDS: dict[MessageKind, int] = {
    "F": 0,
    "B": 1,
    "C": 2,
    "D": 3,
    "W": 4,
    "P": 5,
    "G": 6,
}
_PART_BITS = 3
_SLICE_BITS = 6
_STAGE_BITS = 11
_MICROBATCH_BITS = 17
_STEP_BITS = 21

NUM_STEPS = 1 << _STEP_BITS
"""Number of steps that tags distinguish. The low bits of a tag are the step modulo this number."""

NOTE = 15 << 60
"""Tag for notes between transports. No message kind has this value."""

WAKE = NOTE | 1
"""Tag for the message that a rank sends itself to wake its own `poll`."""


class Tags(dict[Message, int]):
    """The 64-bit message tags for step 0, cached because all steps have the same messages.

    Looking up a message raises TransportError if a field does not fit in its bits.
    """

    def __missing__(self, message: Message) -> int:
        """Compute and store a message's tag."""
        tag = _KINDS[message.kind]
        fields = (
            (int(message.launched), 1),
            (int(message.header), 1),
            (message.part, _PART_BITS),
            (message.slice, _SLICE_BITS),
            (message.stage, _STAGE_BITS),
            (message.microbatch, _MICROBATCH_BITS),
            (0, _STEP_BITS),
        )
        for value, num_bits in fields:
            if value >= 1 << num_bits:
                raise TransportError(
                    f"{message} exceeds the limits of message tags: a step has at most "
                    f"{1 << _STAGE_BITS} stages, {1 << _MICROBATCH_BITS} micro-batches, "
                    f"{1 << _SLICE_BITS} slices of each micro-batch and {1 << _PART_BITS} "
                    "tensors in each message; use fewer micro-batches or slices"
                )
            tag = tag << num_bits | value
        self[message] = tag
        return tag


class _RdmaPort(NamedTuple):
    """The RDMA port that a link uses on this host."""

    ip: str
    """The port's IP address; empty for any port."""
    rail: int
    """Index among equally suitable devices."""


class NativeTransport:
    """Carries CPU tensors between processes, in any order.

    Call it from one thread; a second thread may also call `isend`, `publish` and `abort`.

    The constructor connects to all peers, so each of them must construct its transport too.

    Args:
        store: Key-value store through which processes find each other, such as torch.distributed's.
        rank: Global rank of this process.
        peers: Global ranks of the peers; each must list this rank too. A rank may always send to
            itself.
        run_id: Distinguishes jobs that share a store, and the transports within a job. Must be
            identical on all ranks.
        wire: shm, tcp, rdma, or auto, which picks the best wire for each peer.
        slots: Number of messages from each peer that this rank has room for, at least 2. Above
            1024, further messages wait at the sender. Received tensors may occupy half of the
            slots; the other half stays available for new messages.
        slot_bytes: Slot size, ideally the usual message size: a longer message is sent in pieces,
            which costs an additional copy.
        connect_timeout_s: How long to wait for the peers.
        checksums: Whether to checksum message contents. Checksums detect faulty memory and networks
            and cost about as much as a copy. Descriptors always have a checksum.
        ip: This host's address for peers on other hosts. Defaults to an address that only this host
            can reach.
        silence_s: How long a peer on another host may be silent before it is considered dead.
        spin_s: How long to spin before sleeping. Defaults to 20 us if this host has a CPU for each
            of its ranks, otherwise to 0.
        rail: Local rank, which selects one of several RDMA devices.
        ranks_per_node: Number of ranks on this host. Defaults to this rank and the peers that share
            memory with it.
        for_device: Whether a device copies the messages (see `fixed_memory`).

    Raises:
        TransportError: The native core is missing, a peer did not appear or cannot be reached over
            the wire, or there is not enough memory.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        peers: Iterable[int],
        *,
        run_id: str,
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
        for_device: bool = False,
    ) -> None:
        self._rank = rank
        self._slots = slots = min(slots, _MAX_SLOTS)
        native = require_native()
        self._native_type: type[NativeMessage] = native.Message
        # Once this rank's tensors occupy half of a peer's slots, the endpoint copies further
        # messages. Tensors that a schedule keeps therefore never block a sender.
        self._endpoint: Endpoint | None = native.Endpoint(
            rank, slots, slot_bytes, checksums
        )
        # The endpoint; None after `abort` or `close`.
        self._open = self._endpoint
        # The latest snapshot of the endpoint's counters.
        self._stats = Stats()
        self._given_up: str | None = None
        self._warned = False
        self._step = 0
        self._tags = Tags()
        # (source, tag) -> message that was announced but has not been received yet.
        self._expected: dict[tuple[int, int], Expected] = {}
        # (source, tag) of arrivals that `poll` has not returned yet, in order of arrival.
        self._unreported: dict[tuple[int, int], None] = {}
        self._wake_name = (rank, WAKE)
        connections = connect_peers(
            store,
            rank,
            peers,
            run_id=run_id,
            timeout_s=connect_timeout_s,
            wire=wire,
            ip=ip,
        )
        self._hosts = {
            peer: connection.host for peer, connection in connections.items()
        }
        self._wires = {
            peer: connection.wire for peer, connection in connections.items()
        }
        self._for_device = for_device
        # (address, size in bytes) of the buffers, and of the slots on all links.
        self._memory: list[tuple[int, int]] = []
        wires = list(self._wires.values())
        num_over_tcp = wires.count("tcp")
        if for_device and num_over_tcp > 0:
            # Allocate fixed memory for TCP arrivals before any peer can send.
            num_buffers_per_peer = (slots + 1) // 2
            num_buffers = num_over_tcp * num_buffers_per_peer
            self._memory.append(self._endpoint.add_buffers(num_buffers))
        rdma_port = _RdmaPort(ip or "", rail)
        try:
            self._link_peers(connections, connect_timeout_s, silence_s, rdma_port)
        finally:
            for connection in connections.values():
                connection.socket.close()  # the links have duplicated the descriptors
        # By default, spin only if each rank has its own CPU: a spinning rank slows down other ranks
        # on the same CPU.
        if spin_s is None:
            num_local = ranks_per_node or 1 + wires.count("shm")
            num_cpus = len(os.sched_getaffinity(0))
            spin_s = _SPIN_S if num_local <= num_cpus else 0.0
        self._endpoint.set_spin(spin_s)

    def _link_peers(
        self,
        connections: Mapping[int, Connection],
        connect_timeout_s: float,
        silence_s: float,
        rdma_port: _RdmaPort,
    ) -> None:
        """Create a link from each connection. The peer does the same at the same time."""
        native = require_native()
        endpoint = self._usable()
        links: dict[int, Link] = {}
        try:
            # Create all links before connecting any of them, because each connection needs the
            # peer's link.
            for peer, connection in connections.items():
                if connection.wire == "shm":
                    links[peer] = native.ShmLink(endpoint, peer, connection.socket)
                elif connection.wire == "tcp":
                    links[peer] = native.TcpLink(
                        endpoint, peer, connection.socket, silence_s
                    )
                else:
                    links[peer] = native.RdmaLink(
                        endpoint,
                        peer,
                        connection.socket,
                        rdma_port.ip,
                        rdma_port.rail,
                        silence_s,
                    )
            for peer, link in sorted(links.items()):
                if isinstance(link, native.ShmLink):
                    link.accept(connect_timeout_s)
                elif isinstance(link, native.RdmaLink):
                    link.connect(connect_timeout_s)
                    _log.info("rank %d and rank %d: %s", self._rank, peer, link.text)
                if isinstance(link, (native.ShmLink, native.RdmaLink)):
                    self._memory += [link.slots, link.peer_slots]
                endpoint.add(peer, link)
        # The cause may be a failure on the peer, such as a lack of memory.
        except TransportError as error:
            raise TransportError(
                f"rank {self._rank} has no link to rank {peer} on host {self._hosts[peer]}: {error}"
            ) from error

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step. Messages from peers that are ahead may already have arrived."""
        self._usable()
        if self._expected:
            missing = next(iter(self._expected.values()))
            raise TransportError(
                f"{missing.message} of the previous step was never received"
            )
        # `slots` counts messages of one kind, and two kinds may be in flight.
        if 2 * slots > self._slots and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d has room for %d messages from each peer, but up to %d may be in flight: "
                "some wait at their sender and are sent while it computes",
                self._rank, self._slots, 2 * slots,
            )  # fmt: skip
        self._step = (self._step + 1) % NUM_STEPS
        self.expect(expected)

    def expect(self, expected: Iterable[Expected]) -> None:
        """Announce more messages in the current step."""
        tags = self._tags
        step = self._step
        for item in expected:
            self._expected[item.source, tags[item.message] | step] = item

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a CPU tensor. Its bytes are copied now, or as soon as the receiver has room."""
        endpoint = self._open or self._usable()
        if not tensor.is_cpu:
            raise TransportError(
                f"the native core only sends CPU tensors, not those on {tensor.device}; send them "
                f"through a StagedTransport"
            )
        # The core copies raw bytes, which differ from the values of conjugated and negated views.
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = plain(tensor)
        code = CODE_OF.get(tensor.dtype)
        if code is None:
            raise TransportError(f"{message}: tensors of {tensor.dtype} cannot be sent")
        tag = self._tags[message] | self._step
        try:
            # If the receiver has no room, a thread in the core sends the message while this process
            # computes. Pass the storage, not the tensor, as the object to keep alive, because the
            # caller may replace the tensor's `data`.
            endpoint.send(
                target,
                tag,
                code,
                tensor.shape,
                tensor.data_ptr(),
                tensor.untyped_storage(),
            )
        except TransportError as error:
            raise self._unsent(target, message, error) from error

    def fixed_memory(self) -> Sequence[tuple[int, int]]:
        """Return the address and size in bytes of the memory for messages that fit in a slot.

        A device registers this memory, which includes peers' memory on this host. For messages over
        TCP, a transport opened with `for_device` has enough memory for half of the slots.

        Raises:
            TransportError: The transport was not opened with `for_device`.
        """
        if not self._for_device:
            raise TransportError(
                "only a transport opened with for_device=True has fixed memory"
            )
        return self._memory

    def reserve(
        self,
        target: int,
        message: Message,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> NativeMessage | None:
        """Return a message for a device to fill, in memory that can be sent without a copy.

        When the message is complete, pass it to `publish`. If it is not published, its memory is
        never reused.

        Returns:
            None if the wire has no such memory or no free slot is large enough; in that case, use
            `isend`.

        Raises:
            TransportError: The peer is gone.
        """
        code = CODE_OF.get(dtype)
        if code is None:
            return None  # `isend` raises the error for an unsupported dtype
        tag = self._tags[message] | self._step
        try:
            return self._usable().reserve(target, tag, code, shape)
        except TransportError as error:
            raise self._unsent(target, message, error) from error

    def publish(self, target: int, message: Message, reserved: NativeMessage) -> None:
        """Send a message that `reserve` returned.

        Raises:
            TransportError: The peer is gone.
        """
        try:
            self._usable().publish(target, reserved)
        except TransportError as error:
            raise self._unsent(target, message, error) from error

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Wait for a message and return its CPU tensor, whose memory no other process writes to.

        Raises:
            MessageMismatch: The tensor's shape or dtype is not the expected one.
            PeerAborted, PeerClosed, PeerDied: The peer is gone and did not send the message.
            TransportTimeout: The message did not arrive in time.
            TransportError: The message was not announced, or a received message is damaged.
        """
        endpoint = self._open or self._usable()
        tag = self._tags[message] | self._step
        name = (source, tag)
        expected = self._expected.get(name)
        if expected is None:
            raise TransportError(
                f"{message} is not expected from rank {source} in this step"
            )
        shape = expected.shape
        dtype = expected.dtype
        capsule_code = CAPSULE_CODE_OF.get(dtype, 0)
        try:
            arrived = endpoint.take(source, tag, timeout_s, capsule_code)
        # Some received message is damaged, but not necessarily this one.
        except TransportError as error:
            raise TransportError(
                f"{message} cannot be received from rank {source}: {error}"
            ) from error
        if arrived is None:
            problem = (
                f"{message} did not come from rank {source}: {self._waited(endpoint)}"
            )
            raise self._failure(problem, source, message, timeout_s)
        self._expected.pop(name, None)  # absent if another thread has aborted
        if self._unreported:
            self._unreported.pop(name, None)
        if type(arrived) is self._native_type:
            tensor = tensor_on(arrived)
            fits = tensor.dtype == dtype and shape in (None, tensor.shape)
        else:  # a DLPack capsule with the requested dtype
            tensor = _from_dlpack(arrived)
            fits = shape is None or shape == tensor.shape
        if not fits:
            raise MessageMismatch(
                f"{message} from rank {source} has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"expected shape {shape or 'any'} and {dtype}; give all ranks the same flags"
            )
        return tensor

    def drop(self, source: int, message: Message) -> bool:
        """If a message has arrived, receive it without returning its tensor.

        Return whether it had arrived.
        """
        tag = self._tags[message] | self._step
        if self._usable().take(source, tag, 0.0) is None:
            return False
        name = (source, tag)
        self._expected.pop(name, None)
        self._unreported.pop(name, None)
        return True

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived since the last call; sleep until one arrives."""
        endpoint = self._usable()
        begin_s = time.perf_counter()
        while True:
            messages: list[Message] = []
            # Messages that this step does not expect come from a peer that has begun the next step.
            of_next_step: dict[tuple[int, int], None] = {}
            for name in self._unreported:
                # Look up each message only once: `abort` in another thread may clear `_expected` at
                # any time.
                item = self._expected.get(name)
                if item is None:
                    of_next_step[name] = None
                else:
                    messages.append(item.message)
            self._unreported = of_next_step
            if messages:
                return messages
            remaining_s = max(0.0, begin_s + timeout_s - time.perf_counter())
            # Sleep for a limited time: the core keeps waiting if only some peers have closed.
            arrivals = endpoint.arrivals(min(remaining_s, _TURN_S))
            self._unreported.update(dict.fromkeys(arrivals))
            if self._wake_name in self._unreported:
                del self._unreported[self._wake_name]
                while endpoint.take(self._rank, WAKE, 0.0) is not None:
                    pass  # several calls to `wake` end only one sleep
                timeout_s = 0.0  # check once more without sleeping
            if arrivals:
                continue
            # Only calls that wait check whether anything can still arrive.
            if timeout_s == 0.0:
                return []
            self._require_peers(begin_s)
            if time.perf_counter() - begin_s >= timeout_s:
                return []

    def wake(self) -> None:
        """Make the current or next `poll` return early; any thread may call this.

        A message that the rank sends to itself rings the endpoint's bell.
        """
        self._send(self._rank, WAKE, b"")

    def note(self, target: int, content: bytes) -> None:
        """Send a note to a peer, at any time: bytes that are not part of the schedule."""
        self._send(target, NOTE, content)

    def _send(self, target: int, tag: int, content: bytes) -> None:
        text = _EMPTY
        if content:  # `frombuffer` rejects an empty buffer
            text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        code = CODE_OF[text.dtype]
        self._usable().send(target, tag, code, text.shape, text.data_ptr(), text)

    def noted(self, source: int, timeout_s: float = 0.0) -> bytes | None:
        """Return the next note from a peer; None if none has arrived and the time-out is 0.

        Raises:
            TransportError: No note arrived in time, or the peer is gone.
        """
        endpoint = self._usable()
        arrived = endpoint.take(source, NOTE, timeout_s)
        if arrived is None and timeout_s > 0:
            problem = f"rank {source} did not answer: {self._waited(endpoint)}"
            raise self._failure(problem, source, None, timeout_s)
        if arrived is None:
            return None
        return bytes(memoryview(arrived))  # type: ignore[arg-type]

    def flush(self, timeout_s: float) -> None:
        """Wait until the receivers can take all messages that were sent."""
        endpoint = self._usable()
        if not endpoint.flush(timeout_s):
            peers = self._usable().peers()  # raises if another thread has aborted
            targets = [peer.rank for peer in peers if peer.num_queued]
            if not targets:
                return  # the last message was sent between the time-out and this check
            target = targets[0]
            waited = self._waited(endpoint)
            problem = f"rank {target} did not receive the messages sent to it: {waited}"
            raise self._failure(problem, target, None, timeout_s)

    def abort(self, reason: str) -> None:
        """Abort: waiting peers and later calls fail immediately."""
        if self._endpoint is not None and self._given_up is None:
            self._given_up = reason
            self._open = None
            self._expected.clear()
            # File names may contain bytes that are not UTF-8, and an error here would hide the
            # original one.
            text = reason.encode(errors="replace").decode()
            # Forward a peer's reason unchanged; otherwise each rank along the way would add a
            # prefix.
            reasons = [report.reason for report in self._endpoint.peers()]
            if text not in reasons:
                text = f"rank {self._rank}: {text}"
            self._endpoint.abort(text)

    def close(self) -> None:
        """Close all links and release all memory, except for tensors still in use."""
        atexit.unregister(self.close)  # atexit would keep the transport alive
        if self._endpoint is not None:
            self._endpoint.close()
            self.stats()
            self._endpoint = self._open = None

    def stats(self) -> Stats:
        """Return the totals since the transport was opened."""
        if self._endpoint is not None:
            counts = self._endpoint.counts()
            self._stats = Stats(
                counts.num_messages,
                counts.num_bytes,
                counts.waited_s,
                dict(self._wires),
            )
        return self._stats

    def _usable(self) -> Endpoint:
        if self._endpoint is None:
            raise TransportError("the transport is closed")
        if self._given_up is not None:
            raise TransportError(
                f"the transport was aborted: {self._given_up}; start the job again, or call "
                "megatron_ext.configure again on all ranks"
            )
        return self._endpoint

    @staticmethod
    def _waited(endpoint: Endpoint) -> str:
        return f"waited {endpoint.counts().last_wait_s:.1f} s"

    def _require_peers(self, begin_s: float) -> None:
        """Raise an error about lost peers if messages in this step can no longer arrive."""
        reports = self._usable().peers()
        waited_s = time.perf_counter() - begin_s
        problem = f"no message can arrive: waited {waited_s:.1f} s"
        states = {report.state for report in reports}
        if "died" in states or "aborted" in states:
            raise self._failure(problem, self._rank, None, 0.0)
        if states == {"closed"}:
            raise PeerClosed(f"{problem}; all peers closed their transports")
        # Copy the names at once: `abort` in another thread may clear `_expected` at any time.
        names = list(self._expected)
        expected = Counter(source for source, _ in names)
        for report in reports:
            if report.state == "closed" and report.num_arrived < expected[report.rank]:
                problem = f"messages from rank {report.rank} cannot arrive: waited {waited_s:.1f} s"
                raise self._failure(problem, report.rank, None, 0.0)

    def _failure(
        self,
        problem: str,
        peer: int,
        message: Message | None,
        cause: float | TransportError,
    ) -> TransportError:
        """Return the exception for a failed call.

        A peer that has aborted or died is always the cause. A peer that has closed its transport is
        the cause only if the call depended on it (`peer`). Otherwise, the cause is `cause`: the
        time-out in seconds, or the core's error.
        """
        if message is not None:
            problem = f"{problem} (tag {self._tags[message] | self._step:#x})"

        def place(report: PeerReport) -> str:
            return f"rank {report.rank} on host {self._hosts[report.rank]} (wire {report.wire})"

        # Put `peer` first: losing `peer` may have caused the loss of other peers.
        reports = list(self._usable().peers())
        reports.sort(key=lambda report: report.rank != peer)
        for report in reports:
            if report.state == "aborted":
                text = f"{problem}; {place(report)} gave up: {report.reason}"
                return PeerAborted(text, report.reason)
        for report in reports:
            why = f" ({report.reason})" if report.reason else ""
            if report.state == "died":
                return PeerDied(f"{problem}; {place(report)} died{why}")
            if report.state == "closed" and report.rank == peer:
                return PeerClosed(f"{problem}; {place(report)} closed its transport")
        if isinstance(cause, TransportError):
            return TransportError(f"{problem}: {cause}")
        lines = []
        for report in reports:
            lines.append(
                f"{place(report)} is {report.state}: {report.num_arrived} messages arrived but not "
                f"received, {report.num_held} of {self._slots} slots in use, {report.num_queued} "
                f"messages queued for it"
            )
        links = "; ".join(lines)
        return TransportTimeout(
            f"{problem} of {cause:g} s; {links or 'there are no peers'}"
        )

    def _unsent(
        self, target: int, message: Message, error: TransportError
    ) -> TransportError:
        problem = f"{message} cannot be sent to rank {target}"
        return self._failure(problem, target, message, error)
