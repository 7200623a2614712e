"""Device-to-device transfers within one host, which bypass host memory.

A send copies the tensor into a buffer on the sender's device, which the receiver has mapped. The
host transport carries a short message with the buffer's number. The receiver's device copies the
tensor out of the buffer, and the receiver sends a note that the buffer is free. The devices order
these copies themselves (`devices/sharing.py`), so no thread waits for a copy.
"""

from __future__ import annotations

import atexit
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

from megatron_ext.errors import (
    DeviceError,
    MessageMismatch,
    PeerAborted,
    TransportError,
)
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
"""Size of a host slot, which fits all of this transport's messages and notes except decisions."""

# Header of a message: buffer number, dtype code, number of dimensions. The sizes follow
# (int64 each), then, when a buffer is first used, its handle.
_HEAD = struct.Struct("<QHB")

# Header of a release note: buffer number. When a buffer is first used, the reader's
# handle follows.
_RELEASE = struct.Struct("<Q")

# Sent instead of a buffer number after the reader has unmapped all buffers.
_FAREWELL = (1 << 64) - 1

# How long `close` waits for peers to receive their messages.
_TAKEN_S = 10.0

# How long `close` then waits for peers to unmap the buffers, so that it can free them.
_UNMAPPED_S = 0.5

# How long to wait for a report that a peer died after a copy from its memory has
# failed.
_NOTICED_S = 0.5


@dataclass
class _Peer:
    """The buffers for messages exchanged with one peer, by number."""

    free: dict[int, SharedBuffer] = field(default_factory=dict)
    """Buffers on this rank whose message the peer has received."""
    lent: dict[int, SharedBuffer] = field(default_factory=dict)
    """Buffers on this rank that may contain a message that the peer has not received yet."""
    mapped: dict[int, SharedBuffer] = field(default_factory=dict)
    """The peer's buffers."""
    has_unmapped: bool = False


class DirectTransport:
    """Carries tensors between devices on one host and delegates to `indirect` for other peers.

    Credits and decisions arrive in host memory; all other messages arrive on the device. All calls
    must come from one thread.

    Args:
        host: Carries buffer numbers and notes and has slots of at least `NOTE_BYTES`; closed
            together with this transport.
        sharing: Memory sharing for this process's device.
        rank: Global rank of this process.
        timeout_s: How long a step waits for the previous step's copies.
        reports_copies: If true, a message is reported as arrived once its tensor is complete, after
            a notice of the launch (`Message.notice`). Otherwise, a message is reported as arrived
            once the sender has launched the computation, which suffices for a receiver that follows
            a table.
        peers: Global ranks of the peers whose devices this device can reach (`find_reach`), all
            over shared memory. Defaults to all of `host`'s peers.
        indirect: Carries messages for all other peers and is closed together with this transport.
            Either a transport over the same `host`, or a `TorchTransport`; or None if there are no
            other peers.
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
        indirect: Transport | None = None,
    ) -> None:
        self._host = host
        self._sharing = sharing
        self._timeout_s = timeout_s
        self._indirect = indirect
        # At most one of these two is set. `_over_torch` must also count the calls for
        # direct peers, because all ranks start its receives in a shared order.
        # `_over_host` starts `host`'s steps and closes it.
        self._over_torch: TorchTransport | None = None
        self._over_host: Transport | None = None
        if isinstance(indirect, TorchTransport):
            self._over_torch = indirect
        else:
            self._over_host = indirect
        # A dynamic order depends on which tensors are complete, so this thread sends another, empty
        # message once the tensor is in the buffer.
        self._copies: Afterwards | None = None
        if reports_copies:
            self._copies = Afterwards("copies", self.abort)
        self._expected: dict[tuple[int, Message], Expected] = {}
        # Source and message of received tensors whose empty completion messages have not arrived.
        self._incomplete: list[tuple[int, Message]] = []
        self._is_aborted = False
        self._is_closed = False
        self._peers: dict[int, _Peer] = {}
        for peer in host.stats().wires:
            if peers is None or peer in peers:
                self._peers[peer] = _Peer()
        self._stats = Stats(wires=dict.fromkeys(self._peers, "ipc"))
        for peer in self._peers:
            if rank < peer:
                _log.info(
                    "rank %d and rank %d: ipc (from device to device)", rank, peer
                )
        # `close` needs this thread. Start it now: `close` may run at exit, when Python can no
        # longer start threads.
        self._final_copies = Afterwards("last copies", self.abort)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step.

        For each device tensor, the host transport receives a buffer number, as bytes (uint8).
        """
        if self._copies is not None:
            # Send the previous step's completion messages first, because their tags contain that
            # step's number.
            self._copies.finish(self._timeout_s)
        if self._indirect is not None:
            # Begin this step before announcing the notes: a transport over the same host also
            # starts the host's step.
            expected_indirectly = [
                item for item in expected if item.source not in self._peers
            ]
            self._indirect.begin(expected_indirectly, slots)
        notes: list[Expected] = []
        self._expected = {}
        for item in expected:
            source = item.source
            message = item.message
            if source not in self._peers:
                continue
            if message.for_host:
                notes.append(item)
                continue
            self._expected[source, message] = item
            if self._copies is None:
                notes.append(Expected(source, message, None, torch.uint8))
            else:
                notes.append(Expected(source, message.notice, None, torch.uint8))
                notes.append(Expected(source, message, (0,), torch.uint8))
        if self._over_host is None:
            self._host.begin(notes, slots)
        else:
            self._host.expect(notes)

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor. The device copies the tensor after its computation."""
        if self._indirect is not None and target not in self._peers:
            self._indirect.isend(tensor, target, message)
            return
        self._push(tensor, target, message)
        if self._over_torch is not None:
            self._over_torch.count_call()

    def _push(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        if self._copies is not None:
            self._copies.check()
        if message.for_host:
            self._host.isend(tensor, target, message)
            return
        code = CODE_OF.get(tensor.dtype)
        if code is None:
            raise TransportError(f"{message}: tensors of {tensor.dtype} cannot be sent")
        peer = self._peers[target]
        shape = tuple(tensor.shape)
        try:
            self._take_back(target)
            number, handle = self._lend(peer, tensor.nbytes)
            self._sharing.push(peer.lent[number], tensor)
        except RuntimeError as error:
            self._fail(f"{message} could not be copied for rank {target}", error)
        num_dims = len(shape)
        head = _HEAD.pack(number, code, num_dims)
        sizes = struct.pack(f"<{num_dims}q", *shape)
        text = torch.frombuffer(bytearray(head + sizes + handle), dtype=torch.uint8)
        if self._copies is None:
            self._host.isend(text, target, message)
        else:
            self._host.isend(text, target, message.notice)
            empty = torch.empty(0, dtype=text.dtype)
            say_complete = partial(self._host.isend, empty, target, message)
            pushed = self._sharing.pushed(peer.lent[number])
            self._copies.after(pushed, say_complete, None)
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a message's tensor on the device; later work on the device waits for the copy.

        Raises:
            MessageMismatch: The tensor does not have the expected shape and dtype.
            TransportError: The message did not arrive in time, the copy failed or the peer is gone.
        """
        if self._indirect is not None and source not in self._peers:
            return self._indirect.recv(source, message, timeout_s)
        tensor = self._pull(source, message, timeout_s)
        if self._over_torch is not None:
            self._over_torch.count_call()
        return tensor

    def _pull(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        if message.for_host:
            return self._host.recv(source, message, timeout_s)
        if self._copies is None:
            text = self._host.recv(source, message, timeout_s)
        else:
            text = self._host.recv(source, message.notice, timeout_s)
            self._incomplete.append((source, message))
            self._incomplete = [
                received
                for received in self._incomplete
                if not self._host.drop(*received)
            ]
        expected = self._expected.pop((source, message))
        content = text.numpy().tobytes()
        number, code, num_dims = _HEAD.unpack_from(content)
        sizes = struct.Struct(f"<{num_dims}q")
        shape = sizes.unpack_from(content, _HEAD.size)
        dtype = DTYPE_OF[code]
        # A buffer's first message ends with its handle.
        head_bytes = _HEAD.size + sizes.size
        handle = content[head_bytes:]
        has_expected_shape = expected.shape in (None, shape)
        if dtype != expected.dtype or not has_expected_shape:
            raise MessageMismatch(
                f"{message} from rank {source} has shape {shape} and {dtype}, expected shape "
                f"{expected.shape or 'any'} and {expected.dtype}; give all ranks the same flags"
            )
        try:
            mapped = self._peers[source].mapped
            if handle:
                mapped[number] = self._sharing.open(handle)
            buffer = mapped[number]
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > buffer.num_bytes:
                raise RuntimeError(
                    f"{shape} of {dtype} exceeds {buffer.num_bytes} bytes"
                )
            tensor = self._sharing.pull(buffer, shape, dtype)
        except RuntimeError as error:
            self._fail(
                f"{message} could not be copied from the device of rank {source}", error
            )
        # The devices reuse the buffer only after this copy, so the note does not have to wait for
        # the copy.
        note = _RELEASE.pack(number)
        if handle:
            # When a buffer is first used, send the handle that lets the peer wait for this copy.
            note += buffer.handle
        with suppress(TransportError):  # the sender may already be gone
            self._host.note(source, note)
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived, as defined by `reports_copies`."""
        if self._copies is not None:
            self._copies.check()
        # An indirect transport that can be polled uses the same host and reports both
        # transports' arrivals.
        return (self._indirect or self._host).poll(timeout_s)

    def wake(self) -> None:
        """Make the current or next `poll` return early."""
        self._host.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all peers can receive their messages.

        This does not wait for the devices, which order the reuse of buffers.
        """
        deadline_s = time.perf_counter() + timeout_s
        if self._indirect is not None:
            self._indirect.flush(timeout_s)
        if self._copies is not None:
            self._copies.finish(_remaining_s(deadline_s))
        while self._incomplete:
            source, message = self._incomplete[0]
            self._host.recv(source, message, _remaining_s(deadline_s))
            self._incomplete.pop(0)
        self._host.flush(_remaining_s(deadline_s))

    def abort(self, reason: str) -> None:
        """Abort. The transport cannot be used afterwards.

        Peers may still read the buffers, so they are not freed until this process exits.
        """
        self._is_aborted = True
        self._host.abort(reason)
        if self._indirect is not None:
            self._indirect.abort(reason)

    def close(self) -> None:
        """Release the memory, then close the transport for the other peers."""
        self.release()
        if self._indirect is not None:
            self._indirect.close()

    def release(self) -> None:
        """Wait until peers have received their messages, then free all memory that is not in use.

        Call this no later than at exit.
        """
        if self._is_closed:
            return
        atexit.unregister(self.release)  # atexit would keep the transport alive
        self._is_closed = True
        if self._copies is not None and not self._copies.stop(_TAKEN_S):
            _log.warning("the device did not finish its copies within %g s", _TAKEN_S)
        try:
            # After an abort, copies may be waiting for a dead process's device. The driver frees
            # the memory at exit.
            if self._is_aborted:
                self._final_copies.stop(0.0)
                return
            self._await_peers(lambda peer: not peer.lent, _TAKEN_S)
            copied = self._sharing.copied()
            self._final_copies.after(copied, lambda: None, None)
            if not self._final_copies.stop(_TAKEN_S):
                _log.warning(
                    "the device did not finish its copies within %g s", _TAKEN_S
                )
                return
            if self._final_copies.error is None:
                self._free_buffers()
        finally:
            if self._over_host is None:
                self._host.close()

    def _free_buffers(self) -> None:
        """Unmap all peers' buffers, and free the buffers on this rank that no peer has mapped."""
        for source, peer in self._peers.items():
            for buffer in peer.mapped.values():
                self._sharing.unmap(buffer)
            peer.mapped.clear()
            with suppress(TransportError):
                self._host.note(source, _RELEASE.pack(_FAREWELL))
        self._await_peers(lambda peer: peer.has_unmapped, _UNMAPPED_S)
        for peer in self._peers.values():
            # A peer that has not answered may still be reading its buffers; the driver frees them
            # at exit.
            if peer.has_unmapped:
                buffers = [*peer.free.values(), *peer.lent.values()]
                for buffer in buffers:
                    self._sharing.free(buffer)

    def stats(self) -> Stats:
        """Return the totals since the transport was opened."""
        host = self._host.stats()
        direct = replace(self._stats, waited_s=host.waited_s)
        if self._indirect is None:
            return direct
        indirect = self._indirect.stats()
        num_bytes = direct.bytes + indirect.bytes
        wires = {**indirect.wires, **direct.wires}
        if self._over_host is not None:  # it counts the notes and waits for both
            return replace(indirect, bytes=num_bytes, wires=wires)
        return Stats(
            messages=direct.messages + indirect.messages,
            bytes=num_bytes,
            waited_s=direct.waited_s + indirect.waited_s,
            wires=wires,
        )

    def _lend(self, peer: _Peer, num_bytes: int) -> tuple[int, bytes]:
        """Lend the smallest free buffer that is large enough, or a new one.

        Return its number, and the handle if the buffer is new.
        """
        # Never wait for a buffer that the peer's device has yet to read: on a device with one
        # queue, the push would block messages that the peer's read depends on. The number of
        # buffers thus equals the peak number of messages in flight, which is bounded by the
        # schedule and by how far hosts run ahead.
        longest_too_short = 0
        by_size = sorted(peer.free, key=lambda number: peer.free[number].num_bytes)
        for number in by_size:
            buffer = peer.free[number]
            if buffer.num_bytes < num_bytes:
                longest_too_short = buffer.num_bytes
            elif self._sharing.is_read(buffer):
                peer.lent[number] = peer.free.pop(number)
                return number, b""
        # Make the buffer at least 1.5 times as large as the largest free one. Otherwise, steadily
        # growing messages would leave behind many buffers that are too small for later messages. No
        # buffer is freed before the end, because freeing device memory blocks the host.
        number = len(peer.free) + len(peer.lent)
        lower_bound = 3 * longest_too_short // 2
        buffer = self._sharing.make(max(num_bytes, lower_bound))
        peer.lent[number] = buffer
        return number, buffer.handle

    def _take_back(self, source: int, timeout_s: float = 0.0) -> None:
        """Process a peer's release notes. If `timeout_s` is not 0, wait for the first note."""
        peer = self._peers[source]
        while (note := self._host.noted(source, timeout_s)) is not None:
            (number,) = _RELEASE.unpack_from(note)
            if number == _FAREWELL:
                peer.has_unmapped = True
            else:
                buffer = peer.lent.pop(number)
                peer.free[number] = buffer
                handle = note[_RELEASE.size :]
                # While this transport is closing, the peer may already have exited, which
                # invalidates its handle.
                if handle and not self._is_closed:
                    self._sharing.attach(buffer, handle)
            timeout_s = 0.0

    def _await_peers(self, is_done: Callable[[_Peer], bool], timeout_s: float) -> None:
        """Process notes until every peer is done or gone, or the time-out expires."""
        deadline = time.monotonic() + timeout_s
        for source, peer in self._peers.items():
            with suppress(TransportError):
                self._take_back(source)
                while not is_done(peer):
                    remaining_s = deadline - time.monotonic()
                    # Never 0: only a time-out above 0 raises the error that ends this loop.
                    self._take_back(source, max(1e-3, remaining_s))

    def _fail(self, problem: str, error: RuntimeError) -> NoReturn:
        """Raise the cause of a failed copy: a lost peer, or else the device's error."""
        try:
            find_lost_peer(self._host, _NOTICED_S)
        except PeerAborted as lost:
            raise PeerAborted(f"{problem} ({error}); {lost}", lost.reason) from error
        except TransportError as lost:
            error_class = type(lost)
            raise error_class(f"{problem} ({error}); {lost}") from error
        self.abort(f"{problem}: {error}")
        raise TransportError(f"{problem}: {error}") from error


def _remaining_s(deadline_s: float) -> float:
    """Return the seconds until a deadline (time.perf_counter), or 0 after it."""
    return max(0.0, deadline_s - time.perf_counter())


class Reach(NamedTuple):
    """Whether this rank's device can reach its peers' devices."""

    sharing: Sharing | None
    """Memory sharing for this rank's device; None if the device does not support it."""
    reasons: dict[int, str]
    """Global rank of a peer that the device cannot reach -> the reason."""
    is_complete: bool
    """Whether all peers in the job can reach each other's devices."""


class _Offer(NamedTuple):
    """Information about a rank's device, for ranks that try to reach it."""

    address: Address
    device: str
    """The device's name, which is valid in all processes on its host."""
    handle: bytes
    """Handle to a buffer on the device."""
    problem: str
    """Why the device cannot share memory; empty if it can."""


def find_reach(peers: Collection[int], make_sharing: Callable[[], Sharing]) -> Reach:
    """Probe which peers' devices this rank's device can reach. Collective over all ranks.

    Args:
        peers: Global ranks of the peers; each of them lists this rank too.
        make_sharing: Creates the memory sharing for this rank's device; may raise DeviceError.
    """
    me = dist.get_rank()
    world_size = dist.get_world_size()
    # Drivers report problems only when one process maps another's memory, and both
    # processes must reach the same decision. So each rank offers a small buffer, its
    # peers on the same host map it, and all ranks exchange the results before any
    # transport is opened.
    my_address = Address.new("auto")
    sharing: Sharing | None = None
    buffer: SharedBuffer | None = None
    try:
        require_native()  # the native core carries the notes
        sharing = make_sharing()
        buffer = sharing.make(1)
        my_offer = _Offer(my_address, sharing.name, buffer.handle, "")
    except (DeviceError, RuntimeError, TransportError) as error:
        problem = f"rank {me} cannot share its device's memory: {error}"
        my_offer = _Offer(my_address, "", b"", problem)
    offers = [my_offer] * world_size
    dist.all_gather_object(offers, my_offer)
    my_reasons: dict[int, str] = {}
    for peer in peers:
        offer = offers[peer]
        reason = (
            my_address.why_no_memory_with(offer.address)
            or my_offer.problem
            or offer.problem
        )
        if not reason and sharing is not None:
            reason = _why_not_mapped(sharing, offer)
        if reason:
            my_reasons[peer] = reason
    reasons_by_rank = [my_reasons] * world_size
    dist.all_gather_object(reasons_by_rank, my_reasons)
    if sharing is not None and buffer is not None:
        sharing.free(buffer)  # all peers have unmapped it
    reasons: dict[int, str] = {}
    for peer in peers:
        reasons_of_peer = reasons_by_rank[peer]
        if me in reasons_of_peer:
            reasons[peer] = reasons_of_peer[me]
    # If both ranks have a reason, prefer this rank's, because it says more about this
    # rank's device.
    reasons.update(my_reasons)
    return Reach(sharing, reasons, not any(reasons_by_rank))


def _why_not_mapped(sharing: Sharing, offer: _Offer) -> str:
    """Try to map and unmap a peer's buffer. Return the reason on failure, or an empty string."""
    try:
        reason = sharing.why_unreachable(offer.device)
        if reason is None:
            sharing.unmap(sharing.open(offer.handle))
    except RuntimeError as error:
        return f"memory of device {offer.device} cannot be mapped: {error}"
    return reason or ""
