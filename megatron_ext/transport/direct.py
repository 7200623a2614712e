"""Tensors from device to device of one host, past the memory of the host.

A send copies the tensor into a buffer of the sender's device that the receiver has mapped, and the
host's transport carries a few bytes that say which one. The receiver's device copies it out, and a
note tells the sender that the buffer may be used again. The order of these copies is between the
devices (`devices/sharing.py`): no thread waits for one.

A send never waits. It takes a buffer that is free, or makes one more. So there are as many as
messages were ever under way to a peer at a time, which the schedule bounds.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from megatron_ext.errors import MessageMismatch, TransportError
from megatron_ext.transport.dtypes import CODE_OF, DTYPE_OF

if TYPE_CHECKING:
    from megatron_ext.devices.backend import SharedBuffer, Sharing
    from megatron_ext.messages import Message
    from megatron_ext.transport.base import Expected, Stats
    from megatron_ext.transport.native_transport import NativeTransport

__all__ = ["NOTE_BYTES", "DirectTransport"]

_log = logging.getLogger(__name__)

NOTE_BYTES = 1024
"""Room for the longest of what goes through the host, choices aside."""

_HEAD = struct.Struct("<QHB")
"""Of a message: number of the buffer, dtype, dimensions. Sizes follow, and the buffer's handle
when it is used for the first time."""

_RELEASE = struct.Struct("<Q")
"""Of a note: number of the buffer. The reader's handle follows when it is the first time."""

_FAREWELL = (1 << 64) - 1
"""In place of a number: the reader has unmapped all buffers."""

_TAKEN_S = 10.0
"""How long `close` waits for peers to take what was sent."""

_UNMAPPED_S = 0.5
"""How long `close` then waits for peers that close as well, so that memory can be freed."""

_NAME = struct.Struct("32s")
"""Of the greeting: the name of the sender's device. The handle of its first buffer follows."""

_NOTICED_S = 0.5
"""How long the end of a process may take to be known after its memory has failed."""

_REMEDY = "take --pipeline-device-path staged"


class _Answer(NamedTuple):
    """What came of mapping a first buffer."""

    reason: str
    """Why it cannot be done; empty if it can."""
    handle: bytes = b""

    def dumps(self) -> bytes:
        return self.reason.encode() + b"\0" + self.handle

    @classmethod
    def parse(cls, text: bytes | None) -> _Answer:
        reason, _, handle = (text or b"").partition(b"\0")
        return cls(reason.decode(), handle)


@dataclass
class _Peer:
    """The buffers that go to and come from one rank, by number."""

    free: dict[int, SharedBuffer] = field(default_factory=dict)
    lent: dict[int, SharedBuffer] = field(default_factory=dict)
    """Own ones, in which a message may be that the peer did not take."""
    mapped: dict[int, SharedBuffer] = field(default_factory=dict)
    """The peer's."""
    has_unmapped: bool = False


class DirectTransport:
    """Carries tensors of a device to those of other processes of this host.

    Credits and decisions arrive on the host, which acts on them; all else on the device. All calls
    come from one thread. All peers are asked by the constructor, which they all have to call.

    Args:
        host: Carries what says where tensors are, with slots of `NOTE_BYTES`; closed with this.
        sharing: Of the device of this process.
        rank: Global rank of this process.
        timeout_s: How long to wait for the peers.

    Raises:
        TransportError: A peer is on another host or not reached over shared memory, or its device
            and this one cannot read each other's memory: says why. The same on both sides.
    """

    def __init__(
        self, host: NativeTransport, sharing: Sharing, rank: int, *, timeout_s: float
    ) -> None:
        self._host = host
        self._sharing = sharing
        self._expected: dict[tuple[int, Message], Expected] = {}
        self._num_messages = self._num_bytes = 0
        self._given_up = self._closed = False
        self._peers = {peer: _Peer() for peer in host.stats().wires}
        try:
            self._meet(rank, timeout_s)
        except (RuntimeError, TransportError) as error:
            host.abort(str(error))
            host.close()
            raise TransportError(f"rank {rank}: {error}") from error

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step. What arrives through the host says where tensors are."""
        self._host.begin(
            [
                item if item.message.for_host else item._replace(shape=None, dtype=torch.uint8)
                for item in expected
            ],
            slots,
        )
        self._expected = {
            (item.source, item.message): item for item in expected if not item.message.for_host
        }

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor; it is copied when the device has computed it."""
        if message.for_host:
            self._host.isend(tensor, target, message)
            return
        peer, code = self._peers.get(target), CODE_OF.get(tensor.dtype)
        if peer is None or code is None:
            raise TransportError(
                f"{message} cannot be sent to rank {target}, which is no peer"
                if peer is None
                else f"{message}: tensors of {tensor.dtype} cannot be sent"
            )
        shape = tuple(tensor.shape)
        try:
            self._take_back(target)
            number, handle = self._lend(peer, tensor.nbytes)
            self._sharing.push(peer.lent[number], tensor)
        except RuntimeError as error:
            self._fail(f"{message} could not be copied for rank {target}", error)
        place = _HEAD.pack(number, code, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
        text = torch.frombuffer(bytearray(place + handle), dtype=torch.uint8)
        self._host.isend(text, target, message)
        self._num_messages += 1
        self._num_bytes += tensor.nbytes

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a tensor on the device; what the device does with it waits for the copy."""
        text = self._host.recv(source, message, timeout_s)
        if message.for_host:
            return text
        expected = self._expected.pop((source, message))
        number, shape, dtype, handle = _parsed(text)
        if dtype != expected.dtype or expected.shape not in (None, shape):
            raise MessageMismatch(
                f"{message} from rank {source} has shape {shape} and {dtype}, expected shape "
                f"{expected.shape or 'any'} and {expected.dtype}; give all ranks the same flags"
            )
        try:
            answer = self._map(source, number, handle) if handle else b""
            buffer = self._peers[source].mapped[number]
            if math.prod(shape) * dtype.itemsize > buffer.num_bytes:
                raise RuntimeError(f"{shape} of {dtype} is more than {buffer.num_bytes} bytes")
            tensor = self._sharing.pull(buffer, shape, dtype)
        except RuntimeError as error:
            self._fail(f"{message} could not be copied from the device of rank {source}", error)
        with suppress(TransportError):  # who sent it may be gone by now
            self._host.note(source, _RELEASE.pack(number) + answer)
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return what was sent here; the device may still be computing it at the sender."""
        return self._host.poll(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until all peers can take what was sent. Its memory is free in the device's order."""
        self._host.flush(timeout_s)

    def abort(self, reason: str) -> None:
        """Give up for good. Peers may still be reading: the memory goes when the process ends."""
        self._given_up = True
        self._host.abort(reason)

    def close(self) -> None:
        """Let peers take what was sent, and give up all memory that nobody can be using.

        After `abort` that is left to the driver: copies may wait for the device of a dead process.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._given_up:
                self._await_peers(lambda peer: not peer.lent, _TAKEN_S)
                if self._sharing.settle(_TAKEN_S):
                    self._free()
                else:
                    _log.warning("the device did not finish its copies within %g s", _TAKEN_S)
        finally:
            self._host.close()

    def stats(self) -> Stats:
        """Return what was done so far."""
        return replace(
            self._host.stats(),
            messages=self._num_messages,
            bytes=self._num_bytes,
            wires=dict.fromkeys(self._peers, "ipc"),
        )

    def _meet(self, rank: int, timeout_s: float) -> None:
        """Exchange the names of devices and a first buffer with each peer, then what came of it."""
        for target, wire in self._host.stats().wires.items():
            if wire != "shm":
                raise TransportError(
                    f"rank {target} is reached over {wire}, and devices share memory within one "
                    f"host and beside shared memory only; {_REMEDY}"
                )
        for target, peer in self._peers.items():
            number, handle = self._lend(peer, 1)
            peer.free[number] = peer.lent.pop(number)
            self._host.note(target, _NAME.pack(self._sharing.name.encode()) + handle)
        answers = {source: self._answer(source, timeout_s) for source in self._peers}
        for source, peer in self._peers.items():
            theirs = _Answer.parse(self._host.noted(source, timeout_s))
            reason = answers[source].reason or theirs.reason
            if reason:
                raise TransportError(
                    f"tensors cannot go between its device and that of rank {source}: {reason}; "
                    f"{_REMEDY}"
                )
            self._sharing.attach(peer.free[0], theirs.handle)
            if rank < source:
                _log.info("rank %d and rank %d: ipc (from device to device)", rank, source)

    def _answer(self, source: int, timeout_s: float) -> _Answer:
        """Map a peer's first buffer, and tell it whether that worked."""
        hello = self._host.noted(source, timeout_s) or b""
        name = _NAME.unpack_from(hello)[0].rstrip(b"\0").decode()
        answer = _Answer(self._sharing.why_unreachable(name) or "")
        if not answer.reason:
            try:
                answer = _Answer("", self._map(source, 0, hello[_NAME.size :]))
            except RuntimeError as error:
                answer = _Answer(f"memory of device {name} cannot be mapped: {error}")
        self._host.note(source, answer.dumps())
        return answer

    def _lend(self, peer: _Peer, num_bytes: int) -> tuple[int, bytes]:
        """Take the tightest free buffer, or make one; return its number, and its handle if new."""
        fitting = [n for n, buffer in peer.free.items() if buffer.num_bytes >= num_bytes]
        if fitting:
            number = min(fitting, key=lambda n: peer.free[n].num_bytes)
            peer.lent[number] = peer.free.pop(number)
            return number, b""
        number = len(peer.free) + len(peer.lent)
        peer.lent[number] = self._sharing.make(num_bytes)
        return number, peer.lent[number].handle

    def _map(self, source: int, number: int, handle: bytes) -> bytes:
        """Map a buffer of a peer; return what the peer needs to wait for this process."""
        buffer = self._peers[source].mapped[number] = self._sharing.open(handle)
        return buffer.handle

    def _take_back(self, source: int, timeout_s: float = 0.0) -> None:
        """Look through the notes of a peer; if there is time, wait for one."""
        peer = self._peers[source]
        while (note := self._host.noted(source, timeout_s)) is not None:
            (number,) = _RELEASE.unpack_from(note)
            if number == _FAREWELL:
                peer.has_unmapped = True
            else:
                buffer = peer.free[number] = peer.lent.pop(number)
                handle = note[_RELEASE.size :]
                if handle and not self._closed:  # or the peer may have ended by now
                    self._sharing.attach(buffer, handle)
            timeout_s = 0.0

    def _await_peers(self, is_done: Callable[[_Peer], bool], timeout_s: float) -> None:
        """Wait for notes until peers are done, gone or late."""
        deadline = time.monotonic() + timeout_s
        for source, peer in self._peers.items():
            with suppress(TransportError):
                self._take_back(source)
                while not is_done(peer):
                    self._take_back(source, max(1e-3, deadline - time.monotonic()))

    def _free(self) -> None:
        """Unmap the buffers of peers, and free the own ones of peers that have done so."""
        for source, peer in self._peers.items():
            for buffer in peer.mapped.values():
                self._sharing.unmap(buffer)
            peer.mapped.clear()
            with suppress(TransportError):
                self._host.note(source, _RELEASE.pack(_FAREWELL))
        self._await_peers(lambda peer: peer.has_unmapped, _UNMAPPED_S)
        for peer in self._peers.values():
            if peer.has_unmapped:  # others may be reading: theirs go with this process
                for buffer in (*peer.free.values(), *peer.lent.values()):
                    self._sharing.free(buffer)

    def _fail(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise what a copy failed of: the end of a peer if there was one, or else the device."""
        try:
            self._host.poll(_NOTICED_S)
        except TransportError as found:
            raise type(found)(f"{what} ({error}); {found}") from error
        self.abort(f"{what}: {error}")
        raise TransportError(f"{what}: {error}") from error


def _parsed(content: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype, bytes]:
    """Return number of the buffer, shape, dtype and handle, which may be empty."""
    text = content.numpy().tobytes()
    number, code, num_dims = _HEAD.unpack_from(text)
    sizes = struct.Struct(f"<{num_dims}q")
    end = _HEAD.size + sizes.size
    return number, sizes.unpack_from(text, _HEAD.size), DTYPE_OF[code], text[end:]
