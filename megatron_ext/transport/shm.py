"""The transport between processes of one host: arenas in shared memory, one copy for each message.

The receiver owns the memory that a message is written to. A message that fits a slot is received
without another copy: the tensor stands on the slot, which is free again when the last tensor that
shares it is gone. Whoever keeps half of all slots that way gets copies from then on, so keeping
tensors never stops a sender.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_ext.errors import (
    MessageMismatch,
    PeerAborted,
    PeerClosed,
    PeerDied,
    TransportError,
    TransportTimeout,
)
from megatron_ext.transport.base import Expected, Key, Stats
from megatron_ext.transport.native import require_native
from megatron_ext.transport.rendezvous import Store, connect_local

if TYPE_CHECKING:
    from megatron_ext.transport._C import Endpoint, Message

__all__ = ["SharedMemoryTransport"]

# A tag is, from the highest bit: kind 2, part 3, stage 12, micro-batch 24, step 23.
_KINDS = {"F": 0, "B": 1, "C": 2}
_MAX_PARTS, _MAX_STAGES, _MAX_MICROBATCHES, _NUM_STEPS = 1 << 3, 1 << 12, 1 << 24, 1 << 23

# DLPack's type codes.
_CODES = {
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0,
    torch.uint8: 1, torch.uint16: 1, torch.uint32: 1, torch.uint64: 1,
    torch.float16: 2, torch.float32: 2, torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5, torch.complex128: 5,
    torch.bool: 6,
    torch.float8_e4m3fn: 10, torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12, torch.float8_e5m2fnuz: 13,
}  # fmt: skip
_DTYPE_TO_CODE = {dtype: (code, dtype.itemsize * 8) for dtype, code in _CODES.items()}
_CODE_TO_DTYPE = {code: dtype for dtype, code in _DTYPE_TO_CODE.items()}


class SharedMemoryTransport:
    """Tensors between processes of one host, in any order.

    A send is done when it returns if the receiver has a free slot; otherwise the tensor is kept and
    goes on whenever this process calls anything here. All peers are connected by the constructor,
    so all of them have to construct theirs.

    Args:
        store: Where processes find each other, for example the store of torch.distributed.
        rank: Global rank of this process.
        peers: Global ranks that it exchanges messages with; each has to name this one. A rank may
            send to itself without being named.
        run_id: Sets jobs apart that share a store. The same on all ranks.
        device: Where tensors are. Only the CPU's memory can be shared so far.
        slots: Room for messages of each peer, 2 or more. Half of it can be held by tensors that
            were received; the other half carries what comes meanwhile.
        slot_bytes: Room for each. Best is the usual size of a message: longer ones go through in
            pieces and are copied once more.
        connect_timeout_s: How long to wait for the peers.
        checksums: Whether messages carry a checksum, to find faulty memory. Costs about a copy.

    Raises:
        TransportError: The native core is missing, a peer does not come or is on another host,
            there is not enough memory, or the device is not the CPU.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        peers: Iterable[int],
        *,
        run_id: str,
        device: torch.device,
        slots: int = 16,
        slot_bytes: int = 1 << 20,
        connect_timeout_s: float = 60.0,
        checksums: bool = False,
    ) -> None:
        _require_cpu(device)
        self._rank = rank
        self._slots = slots
        self._host = socket.gethostname()
        self._endpoint: Endpoint | None = require_native().Endpoint(
            rank, slots, slot_bytes, checksums
        )
        self._given_up: str | None = None
        self._step = 0
        self._expected: dict[tuple[int, int], Expected] = {}
        """By source and tag: what was announced and not received."""
        self._told: dict[tuple[int, int], None] = {}
        """Arrivals that the core named and that `poll` did not return, in order."""
        self._stats = Stats()
        sockets = connect_local(store, rank, peers, run_id=run_id, timeout_s=connect_timeout_s)
        self._connect(sockets, connect_timeout_s)

    def _connect(self, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        endpoint = self._usable()
        try:
            native = require_native()
            links = {peer: native.ShmLink(endpoint, peer, link) for peer, link in sockets.items()}
            for peer, offered in links.items():
                offered.accept(timeout_s)
                endpoint.add(peer, offered)
        finally:
            for link in sockets.values():
                link.close()

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step. Messages of peers that are ahead may be here already."""
        self._usable()
        if self._expected:
            left = next(iter(self._expected.values()))
            raise TransportError(f"{left.key} of the step before was never received")
        self._step = (self._step + 1) % _NUM_STEPS
        self._expected = {(item.source, self._tag(item.key)): item for item in expected}

    def isend(self, tensor: torch.Tensor, target: int, key: Key) -> None:
        """Send a tensor. It is copied at once, or kept until there is room for it."""
        endpoint = self._usable()
        _require_cpu(tensor.device)
        tensor = tensor.detach().contiguous()  # the caller may swap the `data` of its own
        code = _DTYPE_TO_CODE.get(tensor.dtype)
        if code is None:
            raise TransportError(f"{key}: tensors of {tensor.dtype} cannot be sent")
        try:
            endpoint.send(
                target, self._tag(key), code, tuple(tensor.shape),
                tensor.data_ptr(), tensor.nbytes, tensor,
            )  # fmt: skip
        except TransportError as error:
            raise self._failure(f"{key} cannot be sent to rank {target}", target, error) from error
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes

    def recv(self, source: int, key: Key, timeout_s: float) -> torch.Tensor:
        """Return a tensor when it is there; it shares its memory with nobody who writes."""
        endpoint = self._usable()
        name = (source, self._tag(key))
        expected = self._expected.get(name)
        if expected is None:
            raise TransportError(f"{key} is not expected from rank {source} in this step")
        begin = time.perf_counter()
        message = endpoint.take(*name, timeout_s)
        waited_s = time.perf_counter() - begin
        self._stats.waited_s += waited_s
        if message is None:
            what = f"{key} did not come from rank {source}: waited {waited_s:.1f} s"
            raise self._failure(what, source, timeout_s)
        del self._expected[name]
        self._told.pop(name, None)
        tensor = _tensor(message)
        if tensor.dtype != expected.dtype or expected.shape not in (None, tuple(tensor.shape)):
            raise MessageMismatch(
                f"{key} from rank {source} has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"expected shape {expected.shape or 'any'} and {expected.dtype}; give all ranks "
                f"the same flags"
            )
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Key]:
        """Return what arrived since the last call; sleep until there is something."""
        endpoint = self._usable()
        begin = time.perf_counter()
        while True:
            keys = [self._expected[name].key for name in self._told if name in self._expected]
            if keys:
                self._told = {name: None for name in self._told if name not in self._expected}
                break
            left_s = max(0.0, begin + timeout_s - time.perf_counter())
            arrivals = endpoint.arrivals(left_s)
            self._told.update(dict.fromkeys(arrivals))
            if not arrivals:
                self._require_peers(begin)
                if time.perf_counter() - begin >= timeout_s:
                    break
        self._stats.waited_s += time.perf_counter() - begin
        return keys

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is where its receiver can take it."""
        endpoint = self._usable()
        begin = time.perf_counter()
        flushed = endpoint.flush(timeout_s)
        waited_s = time.perf_counter() - begin
        self._stats.waited_s += waited_s
        if not flushed:
            target = next(peer.rank for peer in endpoint.peers() if peer.num_queued)
            what = f"rank {target} did not take what was sent to it: waited {waited_s:.1f} s"
            raise self._failure(what, target, timeout_s)

    def abort(self, reason: str) -> None:
        """Give up for good: peers that wait are told at once, and so is every later call here."""
        if self._endpoint is not None and self._given_up is None:
            self._given_up = reason
            self._expected.clear()
            self._endpoint.abort(f"rank {self._rank}: {reason}")

    def close(self) -> None:
        """Say farewell and let go of all memory but that of tensors that are still in use."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def stats(self) -> Stats:
        """Return what was done so far."""
        return self._stats

    def _usable(self) -> Endpoint:
        if self._endpoint is None:
            raise TransportError("the transport is closed")
        if self._given_up is not None:
            raise TransportError(f"the transport was given up: {self._given_up}")
        return self._endpoint

    def _tag(self, key: Key) -> int:
        if (
            key.stage >= _MAX_STAGES
            or key.microbatch >= _MAX_MICROBATCHES
            or key.part >= _MAX_PARTS
        ):
            raise TransportError(
                f"{key} has no tag: there are at most {_MAX_STAGES} stages, {_MAX_MICROBATCHES} "
                f"micro-batches and {_MAX_PARTS} tensors in one hand-over"
            )
        high = (_KINDS[key.kind] << 3 | key.part) << 12 | key.stage
        return (high << 24 | key.microbatch) << 23 | self._step

    def _require_peers(self, begin: float) -> None:
        """Raise if nothing can arrive any more."""
        reports = self._usable().peers()
        waited_s = time.perf_counter() - begin
        what = f"no message can arrive: waited {waited_s:.1f} s"
        if any(report.state in ("died", "aborted") for report in reports):
            raise self._failure(what, self._rank, 0.0)
        if reports and all(report.state == "closed" for report in reports):
            raise PeerClosed(f"{what}, all peers closed their transports")

    def _failure(self, what: str, peer: int, cause: float | TransportError) -> TransportError:
        """The exception for a call that failed because of the state of `peer`, or of any.

        Args:
            what: What did not happen.
            peer: The rank that it needed.
            cause: How many seconds it was to wait at most, or what the core says.
        """
        where = f"(shared memory of host {self._host})"
        reports = self._usable().peers()
        for report in reports:
            if report.state == "aborted":
                return PeerAborted(f"{what}; gave up {where}: {report.reason}")
        for report in reports:
            if report.state == "died":
                return PeerDied(f"{what}; rank {report.rank} died {where}")
            if report.state == "closed" and report.rank == peer:
                return PeerClosed(f"{what}; rank {peer} closed its transport {where}")
        if isinstance(cause, TransportError):
            return TransportError(f"{what}: {cause}")
        links = "; ".join(
            f"rank {report.rank} ({report.state}): {report.num_arrived} messages arrived and not "
            f"taken, {report.num_held} of {self._slots} slots in use, {report.num_queued} messages "
            f"to it queued"
            for report in reports
        )
        return TransportTimeout(f"{what} of {cause:g} s {where}; {links or 'no peers'}")


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise TransportError(
            f"tensors on {device} cannot go through shared memory, which holds those of the CPU "
            f"only; take --pipeline-transport torch"
        )


def _tensor(message: Message) -> torch.Tensor:
    """A tensor on the memory of a message. It is no view: Megatron refuses to free views."""
    dtype = _CODE_TO_DTYPE[message.dtype]
    tensor = torch.empty(0, dtype=dtype)
    if len(message) == 0:
        return tensor.reshape(message.shape)
    raw = torch.frombuffer(message, dtype=torch.uint8)
    shape = torch.Size(message.shape)
    return tensor.set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload, no-any-return]
