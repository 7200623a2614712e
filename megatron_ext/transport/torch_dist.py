"""The transport over torch.distributed's own point-to-point operations: gloo, NCCL, MCCL.

Receives are started in the order that all ranks share (`schedules/search/queues.py`), each as soon
as the sends and receives before it were.

gloo matches messages by tag. NCCL and MCCL ignore tags and run the operations of one communicator
one after the other, so there each direction of each pair gets a communicator of its own. Their
waits hold up the device and not the host; if a message does not come, the time-out of the group
ends the process.

What this wire cannot do is tell whether a message is there before it waits for it, so it serves
static schedules only. And a wait that times out breaks the group, so that is final.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.errors import TransportError
from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.dtypes import plain
from megatron_ext.transport.pairs import Pair, groups_of_pairs

if TYPE_CHECKING:
    from megatron_ext.messages import Message, MessageKind

__all__ = ["Channel", "TorchTransport"]

_MAX_DIMS = 7

_KINDS: tuple[MessageKind, ...] = ("F", "B", "P", "G")
"""What this wire carries."""


class Channel(NamedTuple):
    """One direction and kind of traffic between two global ranks."""

    source: int
    target: int
    kind: str


@dataclass
class _Posted:
    """A receive under way."""

    work: dist.Work
    tensor: torch.Tensor
    """What arrives: the message, or the header that gives its shape."""
    expected: Expected
    is_header: bool


class TorchTransport:
    """Tensors over the process groups that torch.distributed has.

    Args:
        group: Group of all ranks that exchange messages.
        device: Where received tensors are made.
        channels: All channels that this rank has an end of.
        timeout_s: How long an operation may last; gloo has that of each `recv` besides.
        shapes_travel: Whether each message is preceded by its shape. Both ends must agree.

    All ranks of the job make their transports at the same time, and all together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        channels: Iterable[Channel],
        *,
        timeout_s: float,
        shapes_travel: bool = False,
    ) -> None:
        self._device = device
        self._shapes_travel = shapes_travel
        self._timeout_s = timeout_s
        self._matches_tags = dist.get_backend(group) == dist.Backend.GLOO
        self._one_by_one = shapes_travel and not self._matches_tags
        """Whether a shape has to be known here before anything else is received from its source:
        then a receive is started by the next call, since what was computed before has begun."""
        self._me = dist.get_rank()
        self._groups = self._connect(group, {(channel[0], channel[1]) for channel in channels})
        self._waiting: deque[Expected] = deque()
        """Receives of this step that were not started yet."""
        self._posted: dict[tuple[int, Message], _Posted] = {}
        """By source."""
        self._sent: dict[Pair, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        self._slots = 1
        self._step = 0
        self._calls = 0
        """Of `isend` and `recv` in this step."""
        wire = f"torch.distributed, {dist.get_backend(group)}"
        peers = {rank for pair in self._groups for rank in pair} - {self._me}
        self._stats = Stats(wires=dict.fromkeys(peers, wire))

    def _connect(
        self, group: dist.ProcessGroup, pairs: set[Pair]
    ) -> Mapping[Pair, dist.ProcessGroup]:
        """One group for all, or one for each source and target, in the same order everywhere."""
        if self._matches_tags:
            return dict.fromkeys(pairs, group)
        groups = groups_of_pairs(pairs, self._timeout_s)
        for (source, target), made in sorted(groups.items(), key=itemgetter(0)):
            # Communicators are made at first use, which waits for the other end: do that now.
            probe = torch.zeros(1, device=self._device)
            if source == self._me:
                dist.send(probe, target, made)
            else:
                dist.recv(probe, source, made)
        return groups

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step, and the receives that come before all else."""
        if self._posted or self._waiting:
            left = [*self._posted, *((item.source, item.message) for item in self._waiting)]
            raise TransportError(f"{left[0][1]} of the step before was never received")
        self._slots = max(slots, 1)
        self._step += 1
        self._calls = 0
        self._waiting.extend(expected)
        if not self._one_by_one:
            self._post_due()

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor; its storage is kept until it has left."""
        if self._one_by_one:
            self._post_due()
        pair = (self._me, target)
        # An alias: the caller may swap the `data` of its own tensor to free the output.
        tensor = plain(tensor.detach())
        if self._shapes_travel:
            self._start_send(pair, self._header(tensor), message, is_header=True)
        self._start_send(pair, tensor, message)
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes
        self._forget_sent(pair)
        self._count_call()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a tensor when it is there, or when the device will have it."""
        if self._one_by_one:
            self._post_due()
        while (source, message) not in self._posted:
            if not self._waiting:
                raise TransportError(f"{message} is not expected from rank {source} in this step")
            self._post(self._waiting.popleft())
        posted = self._posted.pop((source, message))
        if posted.is_header:
            posted = self._post_message(posted, timeout_s)
        self._count_call()
        self._wait(posted, timeout_s)
        return posted.tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Raise: torch.distributed cannot say what has arrived."""
        raise TransportError(
            "torch.distributed cannot tell whether a message has arrived, so it carries static "
            "schedules only; take --pipeline-transport auto for dynamic ones"
        )

    def flush(self, timeout_s: float) -> None:
        """Wait until every tensor sent has left."""
        for pair, sent in self._sent.items():
            while sent:
                self._wait_sent(pair, sent.popleft()[0], timeout_s)

    def abort(self, reason: str) -> None:
        """Drop what is under way. Peers notice by their time-outs, or when this process ends."""
        self._waiting.clear()
        self._posted.clear()
        self._sent.clear()

    def close(self) -> None:
        """Drop what is under way and the communicators that were made."""
        self.abort("closed")
        if not self._matches_tags:
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups = {}

    def stats(self) -> Stats:
        """Return what was done so far."""
        return self._stats

    def _count_call(self) -> None:
        self._calls += 1
        if not self._one_by_one:
            self._post_due()

    def _post_due(self) -> None:
        """Start the receives whose turn has come."""
        while self._waiting and self._waiting[0].after <= self._calls:
            self._post(self._waiting.popleft())

    def _post(self, item: Expected) -> None:
        source, message, shape, dtype, _ = item
        if not self._shapes_travel:
            if shape is None:
                raise TransportError(f"{message}: shapes do not travel on this transport, name it")
            self._posted[source, message] = self._start_recv(item, self._empty(shape, dtype))
            return
        header = self._empty((1 + _MAX_DIMS,), torch.int64)
        posted = self._start_recv(item, header, is_header=True)
        if self._one_by_one:
            posted = self._post_message(posted, self._timeout_s)
        self._posted[source, message] = posted

    def _post_message(self, header: _Posted, timeout_s: float) -> _Posted:
        """Wait for a header, and start to receive the message that it announces."""
        self._wait(header, timeout_s)
        ndim, *shape = header.tensor.tolist()
        tensor = self._empty(tuple(shape[:ndim]), header.expected.dtype)
        return self._start_recv(header.expected, tensor)

    def _start_send(
        self, pair: Pair, tensor: torch.Tensor, message: Message, *, is_header: bool = False
    ) -> None:
        work = dist.isend(tensor, pair[1], self._groups[pair], tag=self._tag(message, is_header))
        assert work is not None
        self._sent[pair].append((work, tensor))

    def _start_recv(
        self, item: Expected, tensor: torch.Tensor, *, is_header: bool = False
    ) -> _Posted:
        group = self._groups[item.source, self._me]
        work = dist.irecv(tensor, item.source, group, tag=self._tag(item.message, is_header))
        assert work is not None
        return _Posted(work, tensor, item, is_header)

    def _forget_sent(self, pair: Pair) -> None:
        """Give up what has left; wait for what was received long ago, or nothing bounds it."""
        sent = self._sent[pair]
        while sent and sent[0][0].is_completed():
            sent.popleft()
        # Both kinds, and their headers.
        limit = 2 * self._slots * (2 if self._shapes_travel else 1)
        while len(sent) > limit:
            self._wait_sent(pair, sent.popleft()[0], None)

    def _tag(self, message: Message, is_header: bool) -> int:
        """31 bits: two steps apart, the same tag is free again. Never 0, which others use."""
        if not self._matches_tags:
            return 0
        if message.stage >= 1 << 9 or message.microbatch >= 1 << 14 or message.part >= 8:
            raise TransportError(
                f"{message} has no tag: there are at most 512 stages, 16384 micro-batches and 8 "
                f"tensors in one hand-over"
            )
        tag = ((message.microbatch << 9 | message.stage) << 3 | message.part) << 2
        tag |= _KINDS.index(message.kind)
        return tag << 2 | is_header << 1 | self._step & 1 | 1 << 30

    def _header(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > _MAX_DIMS:
            raise TransportError(f"a message has at most {_MAX_DIMS} dimensions, got {tensor.ndim}")
        padding = [0] * (_MAX_DIMS - tensor.ndim)
        header = [tensor.ndim, *tensor.shape, *padding]
        return torch.tensor(header, dtype=torch.int64, device=self._device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _wait_sent(self, pair: Pair, work: dist.Work, timeout_s: float | None) -> None:
        """Wait until a tensor has left; without a time-out of its own, that of the group holds."""
        begin = time.perf_counter()
        try:
            self._wait_work(work, timeout_s)
        except RuntimeError as error:
            raise TransportError(
                f"rank {pair[1]} did not take what rank {pair[0]} sent it: waited "
                f"{time.perf_counter() - begin:.1f} s; {_first_line(error)}"
            ) from error

    def _wait(self, posted: _Posted, timeout_s: float) -> None:
        begin = time.perf_counter()
        try:
            self._wait_work(posted.work, timeout_s)
        except RuntimeError as error:
            waited_s = time.perf_counter() - begin
            limit_s = timeout_s if self._matches_tags else self._timeout_s
            raise TransportError(
                f"{posted.expected.message} did not come from rank {posted.expected.source}: "
                f"waited {waited_s:.1f} s of {limit_s:g} s; {_first_line(error)}"
            ) from error
        self._stats.waited_s += time.perf_counter() - begin

    def _wait_work(self, work: dist.Work, timeout_s: float | None) -> None:
        """Wait; where the device waits instead, a time-out would make the host poll it."""
        if timeout_s is None or not self._matches_tags:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
