"""Device-to-device transfers within one host, which bypass host memory.

A send copies the tensor into a buffer of the sender's device that the receiver has mapped. The host
transport carries a short message that names the buffer. The receiver's device copies the tensor
out, and a note tells the sender that the buffer is free. The devices order these copies
(`devices/sharing.py`): no thread waits for one.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from megatron_ext.errors import DeviceError, MessageMismatch, PeerAborted, TransportError
from megatron_ext.transport.address import Address
from megatron_ext.transport.afterwards import Afterwards
from megatron_ext.transport.base import Expected, Stats, find_lost_peer
from megatron_ext.transport.dtypes import CODE_OF, DTYPE_OF
from megatron_ext.transport.native import require_native
from megatron_ext.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from megatron_ext.devices.sharing import SharedBuffer, Sharing
    from megatron_ext.message import Message
    from megatron_ext.transport.base import Transport
    from megatron_ext.transport.native_transport import NativeTransport

_log = logging.getLogger(__name__)

NOTE_BYTES = 1024
"""Size of a host slot: the longest message or note of this transport, decisions aside."""

# Header of a message: buffer number, dtype code, number of dimensions. The sizes follow (int64
# each), then the buffer's handle at its first use.
_HEAD = struct.Struct("<QHB")

# Header of a release note: buffer number. The reader's handle follows at the first use.
_RELEASE = struct.Struct("<Q")

# Instead of a buffer number: the reader has unmapped all buffers.
_FAREWELL = (1 << 64) - 1

# How long `close` waits for peers to receive their messages.
_TAKEN_S = 10.0

# How long `close` then waits for peers to unmap the buffers, so that it can free them.
_UNMAPPED_S = 0.5

# How long the death of a peer may stay undetected after a copy from its memory has failed.
_NOTICED_S = 0.5


@dataclass
class _Peer:
    """The buffers to and from one rank, by number."""

    free: dict[int, SharedBuffer] = field(default_factory=dict)
    lent: dict[int, SharedBuffer] = field(default_factory=dict)
    """Buffers of this rank that may hold a message the peer has not received."""
    mapped: dict[int, SharedBuffer] = field(default_factory=dict)
    """The peer's buffers."""
    has_unmapped: bool = False


class DirectTransport:
    """Carries tensors between devices of the processes of one host, and the rest another way.

    Between these devices credits and decisions arrive on the host, which acts on them; all other
    messages arrive on the device. All calls come from one thread.

    Args:
        host: Carries the buffer numbers and notes, with slots of `NOTE_BYTES` or more; closed with
            this transport.
        sharing: The memory sharing of this process's device.
        rank: Global rank of this process.
        timeout_s: How long a step waits for the copies of the previous one.
        reports_copies: Whether a message arrives when its tensor is there, and the notice of its
            launch (`Message.notice`) before. Otherwise it arrives when the sender has launched
            its computation, which is enough for a receiver that follows a table.
        peers: Global ranks of the peers whose devices this one reaches (`find_reach`), all over
            shared memory; None: all of `host`.
        rest: For the other peers, closed with this transport: one over the same `host`, or a
            `TorchTransport`.
    """

    def __init__(
        self,
        host: NativeTransport,
        sharing: Sharing,
        rank: int,
        *,
        timeout_s: float,
        reports_copies: bool = False,
        peers: Collection[int] | None = None,
        rest: Transport | None = None,
    ) -> None:
        self._host = host
        self._sharing = sharing
        self._timeout_s = timeout_s
        self._rest = rest
        # torch.distributed counts also the calls that it does not carry.
        self._in_order = rest if isinstance(rest, TorchTransport) else None
        # Otherwise the rest starts the steps of `host`, and closes it.
        self._owns_host = rest is None or self._in_order is not None
        # A dynamic order chooses by what has arrived, so for it this thread sends one more message,
        # an empty one, once the tensor is in the buffer.
        self._copies = Afterwards("copies", self.abort) if reports_copies else None
        self._expected: dict[tuple[int, Message], Expected] = {}
        # Received messages whose tensors may not be there; the empty messages have yet to come.
        self._coming: list[tuple[int, Message]] = []
        self._given_up = self._closed = False
        self._peers = {
            peer: _Peer() for peer in host.stats().wires if peers is None or peer in peers
        }
        self._stats = Stats(wires=dict.fromkeys(self._peers, "ipc"))
        for peer in self._peers:
            if rank < peer:
                _log.info("rank %d and rank %d: ipc (from device to device)", rank, peer)
        # For `close`, which may run at exit, where Python starts no threads any more.
        self._last = Afterwards("last copies", self.abort)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step. For device tensors the host receives buffer numbers, as bytes (uint8)."""
        if self._copies is not None:
            self._copies.finish(self._timeout_s)  # their tags contain its number
        if self._rest is not None:
            # Before the notes: it starts the step of a host transport of both.
            others = [item for item in expected if item.source not in self._peers]
            self._rest.begin(others, slots)
            expected = [item for item in expected if item.source in self._peers]
        notes: list[Expected] = []
        for item in expected:
            source, message = item.source, item.message
            if message.for_host:
                notes.append(item)
            elif self._copies is None:
                notes.append(Expected(source, message, None, torch.uint8))
            else:
                notes.append(Expected(source, message.notice, None, torch.uint8))
                notes.append(Expected(source, message, (0,), torch.uint8))
        if self._owns_host:
            self._host.begin(notes, slots)
        else:
            self._host.expect(notes)
        self._expected = {
            (item.source, item.message): item for item in expected if not item.message.for_host
        }

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor. The device copies it once it has computed it."""
        if self._rest is not None and target not in self._peers:
            self._rest.isend(tensor, target, message)
            return
        self._push(tensor, target, message)
        if self._in_order is not None:
            self._in_order.count_call()

    def _push(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        if self._copies is not None:
            self._copies.check()
        if message.for_host:
            self._host.isend(tensor, target, message)
            return
        code = CODE_OF.get(tensor.dtype)
        if code is None:
            raise TransportError(f"{message}: tensors of {tensor.dtype} cannot be sent")
        peer, shape = self._peers[target], tuple(tensor.shape)
        try:
            self._take_back(target)
            number, handle = self._lend(peer, tensor.nbytes)
            self._sharing.push(peer.lent[number], tensor)
        except RuntimeError as error:
            self._fail(f"{message} could not be copied for rank {target}", error)
        head = _HEAD.pack(number, code, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
        text = torch.frombuffer(bytearray(head + handle), dtype=torch.uint8)
        if self._copies is None:
            self._host.isend(text, target, message)
        else:
            self._host.isend(text, target, message.notice)
            there = partial(self._host.isend, torch.empty(0, dtype=text.dtype), target, message)
            self._copies.after(self._sharing.pushed(peer.lent[number]), there, None)
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a message's tensor, on the device, whose later work waits for the copy.

        Raises:
            MessageMismatch: The tensor's shape or dtype is not the expected one.
            TransportError: The message did not arrive in time, the copy failed or the peer is gone.
        """
        if self._rest is not None and source not in self._peers:
            return self._rest.recv(source, message, timeout_s)
        tensor = self._pull(source, message, timeout_s)
        if self._in_order is not None:
            self._in_order.count_call()
        return tensor

    def _pull(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        if message.for_host:
            return self._host.recv(source, message, timeout_s)
        text = self._host.recv(
            source, message if self._copies is None else message.notice, timeout_s
        )
        if self._copies is not None:
            self._coming.append((source, message))
            self._coming = [name for name in self._coming if not self._host.drop(*name)]
        expected = self._expected.pop((source, message))
        content = text.numpy().tobytes()
        number, code, num_dims = _HEAD.unpack_from(content)
        sizes = struct.Struct(f"<{num_dims}q")
        shape, dtype = sizes.unpack_from(content, _HEAD.size), DTYPE_OF[code]
        handle = content[_HEAD.size + sizes.size :]
        if dtype != expected.dtype or expected.shape not in (None, shape):
            raise MessageMismatch(
                f"{message} from rank {source} has shape {shape} and {dtype}, expected shape "
                f"{expected.shape or 'any'} and {expected.dtype}; give all ranks the same flags"
            )
        try:
            mapped = self._peers[source].mapped
            if handle:
                mapped[number] = self._sharing.open(handle)
            buffer = mapped[number]
            if math.prod(shape) * dtype.itemsize > buffer.num_bytes:
                raise RuntimeError(f"{shape} of {dtype} is more than {buffer.num_bytes} bytes")
            tensor = self._sharing.pull(buffer, shape, dtype)
        except RuntimeError as error:
            self._fail(f"{message} could not be copied from the device of rank {source}", error)
        # The device orders the reuse behind this copy, so the note need not wait for it. The sender
        # may be gone by now.
        with suppress(TransportError):
            # The peer can wait for this process by its handle of a buffer that it has just lent.
            self._host.note(source, _RELEASE.pack(number) + (buffer.handle if handle else b""))
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived, in the sense of `reports_copies`."""
        if self._copies is not None:
            self._copies.check()
        return (self._rest or self._host).poll(timeout_s)

    def wake(self) -> None:
        """End a `poll`."""
        self._host.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all peers can receive their messages; devices order the reuse of buffers."""
        deadline_s = time.perf_counter() + timeout_s
        if self._rest is not None:
            self._rest.flush(timeout_s)
        if self._copies is not None:
            self._copies.finish(max(0.0, deadline_s - time.perf_counter()))
        while self._coming:
            self._host.recv(*self._coming[0], max(0.0, deadline_s - time.perf_counter()))
            self._coming.pop(0)
        self._host.flush(max(0.0, deadline_s - time.perf_counter()))

    def abort(self, reason: str) -> None:
        """Abort for good. Peers may still read the buffers, which stay until this process exits."""
        self._given_up = True
        self._host.abort(reason)
        if self._rest is not None:
            self._rest.abort(reason)

    def close(self) -> None:
        """Release the memory, then close the transport of the rest."""
        self.release()
        if self._rest is not None:
            self._rest.close()

    def release(self) -> None:
        """Wait for peers to receive their messages, then free the memory that nobody uses.

        To be called at exit at the latest.
        """
        if self._closed:
            return
        self._closed = True
        if self._copies is not None and not self._copies.stop(_TAKEN_S):
            _log.warning("the device did not finish its copies within %g s", _TAKEN_S)
        try:
            # Copies may wait for the device of a dead process: the driver frees the memory at exit.
            if self._given_up:
                self._last.stop(0.0)
                return
            self._await_peers(lambda peer: not peer.lent, _TAKEN_S)
            self._last.after(self._sharing.copied(), lambda: None, None)
            if not self._last.stop(_TAKEN_S):
                _log.warning("the device did not finish its copies within %g s", _TAKEN_S)
                return
            if self._last.error is not None:
                return
            for source, peer in self._peers.items():
                for buffer in peer.mapped.values():
                    self._sharing.unmap(buffer)
                peer.mapped.clear()
                with suppress(TransportError):
                    self._host.note(source, _RELEASE.pack(_FAREWELL))
            self._await_peers(lambda peer: peer.has_unmapped, _UNMAPPED_S)
            for peer in self._peers.values():
                # Others may still read; the driver frees their buffers at exit.
                if peer.has_unmapped:
                    for buffer in (*peer.free.values(), *peer.lent.values()):
                        self._sharing.free(buffer)
        finally:
            if self._owns_host:
                self._host.close()

    def stats(self) -> Stats:
        """Return the totals since the transport was opened."""
        found = replace(self._stats, waited_s=self._host.stats().waited_s)
        if self._rest is None:
            return found
        rest = self._rest.stats()
        wires = {**rest.wires, **found.wires}
        if not self._owns_host:  # the rest has counted the notes and waits of both
            return replace(rest, bytes=found.bytes + rest.bytes, wires=wires)
        return Stats(
            found.messages + rest.messages,
            found.bytes + rest.bytes,
            found.waited_s + rest.waited_s,
            wires,
        )

    def _lend(self, peer: _Peer, num_bytes: int) -> tuple[int, bytes]:
        """Lend the smallest fitting buffer, or a new one; return its number, and handle if new."""
        # It waits for no buffer that the peer's device has yet to read: on a device with one queue
        # the push would hold up messages that the peer's read waits for. So a peer has as many
        # buffers as it ever had messages in flight at once, which the schedule and the hosts'
        # run-ahead bound.
        fitting = [n for n, buffer in peer.free.items() if buffer.num_bytes >= num_bytes]
        fitting.sort(key=lambda n: peer.free[n].num_bytes)
        number = next((n for n in fitting if self._sharing.is_read(peer.free[n])), None)
        if number is not None:
            peer.lent[number] = peer.free.pop(number)
            return number, b""
        # Messages that become longer and longer would leave a row of buffers too short for all
        # later ones: none is freed before the end, because a device that frees makes its host wait.
        too_short = [b.num_bytes for b in peer.free.values() if b.num_bytes < num_bytes]
        number = len(peer.free) + len(peer.lent)
        peer.lent[number] = self._sharing.make(max(num_bytes, 3 * max(too_short, default=0) // 2))
        return number, peer.lent[number].handle

    def _take_back(self, source: int, timeout_s: float = 0.0) -> None:
        """Process the release notes of a peer. With a time-out, wait for the first one."""
        peer = self._peers[source]
        while (note := self._host.noted(source, timeout_s)) is not None:
            (number,) = _RELEASE.unpack_from(note)
            if number == _FAREWELL:
                peer.has_unmapped = True
            else:
                buffer = peer.free[number] = peer.lent.pop(number)
                handle = note[_RELEASE.size :]
                if handle and not self._closed:  # while closing, the peer may have exited
                    self._sharing.attach(buffer, handle)
            timeout_s = 0.0

    def _await_peers(self, is_done: Callable[[_Peer], bool], timeout_s: float) -> None:
        """Process notes until each peer is done, is gone or exceeds the time-out."""
        deadline = time.monotonic() + timeout_s
        for source, peer in self._peers.items():
            with suppress(TransportError):
                self._take_back(source)
                while not is_done(peer):
                    self._take_back(source, max(1e-3, deadline - time.monotonic()))

    def _fail(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise the cause of a failed copy: a peer's death if there was one, else the device."""
        try:
            find_lost_peer(self._host, _NOTICED_S)
        except PeerAborted as lost:
            raise PeerAborted(f"{what} ({error}); {lost}", lost.reason) from error
        except TransportError as lost:
            raise type(lost)(f"{what} ({error}); {lost}") from error
        self.abort(f"{what}: {error}")
        raise TransportError(f"{what}: {error}") from error


class Reach(NamedTuple):
    """How this rank's device reaches those of its peers."""

    sharing: Sharing | None
    """The memory sharing of this rank's device; None if it has none."""
    reasons: dict[int, str]
    """By global rank of each peer that it does not reach: why not."""
    is_complete: bool
    """Whether the devices of every pair of the job reach each other."""


class _Offer(NamedTuple):
    """A rank's device, for the ranks that try to reach it."""

    address: Address
    device: str
    """Name of its device, valid in all processes of its host."""
    handle: bytes
    """Of a buffer on its device."""
    problem: str
    """Why its device cannot share memory; empty if it can."""


def find_reach(peers: Collection[int], make_sharing: Callable[[], Sharing]) -> Reach:
    """Find by trying the peers whose devices this rank's device reaches. Collective over all ranks.

    Args:
        peers: Global ranks of the peers; each of them names this one.
        make_sharing: Makes the memory sharing of this rank's device; may raise DeviceError.
    """
    me, size = dist.get_rank(), dist.get_world_size()
    # Drivers answer this only when one process maps memory of the other, and both must agree. So
    # each rank offers a small buffer, its peers on the same host map it, and all ranks exchange the
    # results before any transport is opened.
    mine, sharing, buffer = Address.new("auto"), None, None
    try:
        require_native()  # carries the notes beside the memory
        sharing = make_sharing()
        buffer = sharing.make(1)
        offer = _Offer(mine, sharing.name, buffer.handle, "")
    except (DeviceError, RuntimeError, TransportError) as error:
        offer = _Offer(mine, "", b"", f"rank {me} cannot share memory of its device: {error}")
    offers = [offer] * size
    dist.all_gather_object(offers, offer)
    found = {}
    for peer in peers:
        theirs = offers[peer]
        reason = mine.why_no_memory_with(theirs.address) or offer.problem or theirs.problem
        if not reason and sharing is not None:
            try:
                reason = sharing.why_unreachable(theirs.device) or ""
                if not reason:
                    sharing.unmap(sharing.open(theirs.handle))
            except RuntimeError as error:
                reason = f"memory of device {theirs.device} cannot be mapped: {error}"
        if reason:
            found[peer] = reason
    everybody = [found] * size
    dist.all_gather_object(everybody, found)
    if sharing is not None and buffer is not None:
        sharing.free(buffer)  # its peers have unmapped it
    theirs_of_me = {peer: everybody[peer][me] for peer in peers if me in everybody[peer]}
    return Reach(sharing, theirs_of_me | found, not any(everybody))
