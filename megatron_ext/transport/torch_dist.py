"""The transport over torch.distributed's own point-to-point operations: gloo, NCCL, MCCL.

Receives are posted ahead, in the order in which each source sends, so that a send finds its room.
gloo matches messages by tag. NCCL and MCCL ignore tags and run the operations of one communicator
one after the other, so there each direction and kind of each pair gets a communicator of its own.

What this wire cannot do is tell whether a message is there before it waits for it, so it serves
static schedules only. And a wait on gloo that times out breaks the group, so that is final.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.errors import TransportError
from megatron_ext.transport.base import Expected, Key, Stats

__all__ = ["Channel", "TorchTransport"]

_AHEAD = 2
"""Receives that are posted on each channel before they are asked for."""
_MAX_DIMS = 7


class Channel(NamedTuple):
    """One direction and kind of traffic between two global ranks: a queue of messages."""

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


@dataclass
class _Inbound:
    """The receiving end of a channel: what is still to be posted and what is under way."""

    waiting: deque[Expected] = field(default_factory=deque)
    posted: dict[Key, _Posted] = field(default_factory=dict)


class TorchTransport:
    """Tensors over the process groups that torch.distributed has.

    Args:
        group: Group of all ranks that exchange messages.
        device: Where received tensors are made.
        channels: All channels that this rank has an end of. Where tags are ignored, every rank of a
            channel must name it at the same time, since a communicator is made for it.
        shapes_travel: Whether each message is preceded by its shape. Both ends must agree.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        channels: Iterable[Channel],
        *,
        shapes_travel: bool = False,
    ) -> None:
        self._device = device
        self._shapes_travel = shapes_travel
        self._matches_tags = dist.get_backend(group) == dist.Backend.GLOO
        self._groups = self._connect(group, sorted(set(channels)))
        self._inbound: dict[Channel, _Inbound] = defaultdict(_Inbound)
        self._sent: dict[Channel, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        self._me = dist.get_rank()
        self._slots = 1
        self._step = 0
        wire = f"torch.distributed, {dist.get_backend(group)}"
        peers = {rank for channel in self._groups for rank in channel[:2]} - {self._me}
        self._stats = Stats(wires=dict.fromkeys(peers, wire))

    def _connect(
        self, group: dist.ProcessGroup, channels: Sequence[Channel]
    ) -> Mapping[Channel, dist.ProcessGroup]:
        """One group for all channels, or one for each, connected in the same order everywhere."""
        if self._matches_tags:
            return dict.fromkeys(channels, group)
        groups = {}
        for channel in channels:
            ends = sorted({channel.source, channel.target})
            groups[channel] = dist.new_group(ends, use_local_synchronization=True)
            # Communicators are made at first use, which waits for the other end: do that now.
            probe = torch.zeros(1, device=self._device)
            if channel.source == dist.get_rank():
                dist.send(probe, channel.target, groups[channel])
            else:
                dist.recv(probe, channel.source, groups[channel])
        return groups

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step: post the first receives of each channel."""
        left = [key for inbound in self._inbound.values() for key in inbound.posted]
        if left:
            raise TransportError(f"{left[0]} of the step before was never received")
        self._slots = max(slots, 1)
        self._step += 1
        for item in expected:
            self._inbound[self._channel_from(item.source, item.key)].waiting.append(item)
        for channel in self._inbound:
            for _ in range(_AHEAD):
                self._post_next(channel)

    def isend(self, tensor: torch.Tensor, target: int, key: Key) -> None:
        """Send a tensor; its storage is kept until it has left."""
        channel = Channel(self._me, target, key.kind)
        # An alias: the caller may swap the `data` of its own tensor to free the output.
        tensor = tensor.detach().contiguous()
        if self._shapes_travel:
            self._start_send(channel, self._header(tensor), key, is_header=True)
        self._start_send(channel, tensor, key)
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes
        sent = self._sent[channel]
        limit = self._slots * (2 if self._shapes_travel else 1)
        while len(sent) > limit:  # these have been received, or the receiver would hold too much
            self._wait_sent(channel, sent.popleft()[0], None)

    def recv(self, source: int, key: Key, timeout_s: float) -> torch.Tensor:
        """Return a tensor when it is there, and post the next receive of its channel."""
        channel = self._channel_from(source, key)
        inbound = self._inbound[channel]
        while key not in inbound.posted:
            if not inbound.waiting:
                raise TransportError(f"{key} is not expected from rank {source} in this step")
            self._post_next(channel)
        posted = inbound.posted.pop(key)
        self._wait(posted.work, source, key, timeout_s)
        tensor = posted.tensor
        if self._shapes_travel:
            tensor = self._empty(self._shape(posted.tensor), posted.expected.dtype)
            work = self._start_recv(channel, tensor, key)
            self._wait(work, source, key, timeout_s)
        self._post_next(channel)
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Key]:
        """Raise: torch.distributed cannot say what has arrived."""
        raise TransportError(
            "torch.distributed cannot tell whether a message has arrived, so it carries static "
            "schedules only; take --pipeline-transport auto for dynamic ones"
        )

    def flush(self, timeout_s: float) -> None:
        """Wait until every tensor sent has left."""
        for channel, sent in self._sent.items():
            while sent:
                self._wait_sent(channel, sent.popleft()[0], timeout_s)

    def abort(self, reason: str) -> None:
        """Drop what is under way. Peers notice by their time-outs, or when this process ends."""
        self._inbound.clear()
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

    def _channel_from(self, source: int, key: Key) -> Channel:
        return Channel(source, self._me, key.kind)

    def _post_next(self, channel: Channel) -> None:
        inbound = self._inbound[channel]
        if not inbound.waiting:
            return
        item = inbound.waiting.popleft()
        if self._shapes_travel:
            tensor = self._empty((1 + _MAX_DIMS,), torch.int64)
        elif item.shape is None:
            raise TransportError(f"{item.key}: shapes do not travel on this transport, name it")
        else:
            tensor = self._empty(item.shape, item.dtype)
        work = self._start_recv(channel, tensor, item.key, is_header=self._shapes_travel)
        inbound.posted[item.key] = _Posted(work, tensor, item)

    def _start_send(
        self, channel: Channel, tensor: torch.Tensor, key: Key, *, is_header: bool = False
    ) -> None:
        work = dist.isend(
            tensor, channel.target, self._groups[channel], tag=self._tag(key, is_header)
        )
        assert work is not None
        self._sent[channel].append((work, tensor))

    def _start_recv(
        self, channel: Channel, tensor: torch.Tensor, key: Key, *, is_header: bool = False
    ) -> dist.Work:
        tag = self._tag(key, is_header)
        work = dist.irecv(tensor, channel.source, self._groups[channel], tag=tag)
        assert work is not None
        return work

    def _tag(self, key: Key, is_header: bool) -> int:
        """31 bits: two steps apart, the same tag is free again. Never 0, which others use."""
        if not self._matches_tags:
            return 0
        if key.stage >= 1 << 10 or key.microbatch >= 1 << 15 or key.part >= 4:
            raise TransportError(
                f"{key} has no tag: there are at most 1024 stages, 32768 micro-batches and 4 "
                f"tensors in one hand-over"
            )
        tag = ((key.microbatch << 10 | key.stage) << 2 | key.part) << 3
        return tag | (key.kind == "B") << 2 | is_header << 1 | self._step & 1 | 1 << 30

    def _header(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > _MAX_DIMS:
            raise TransportError(f"a message has at most {_MAX_DIMS} dimensions, got {tensor.ndim}")
        padding = [0] * (_MAX_DIMS - tensor.ndim)
        header = [tensor.ndim, *tensor.shape, *padding]
        return torch.tensor(header, dtype=torch.int64, device=self._device)

    def _shape(self, header: torch.Tensor) -> tuple[int, ...]:
        ndim, *shape = header.tolist()
        return tuple(shape[:ndim])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _wait_sent(self, channel: Channel, work: dist.Work, timeout_s: float | None) -> None:
        """Wait until a tensor has left; without a time-out of its own, that of the group holds."""
        begin = time.perf_counter()
        try:
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"rank {channel.target} did not take what rank {channel.source} sent it: waited "
                f"{time.perf_counter() - begin:.1f} s; {_first_line(error)}"
            ) from error

    def _wait(self, work: dist.Work, source: int, key: Key, timeout_s: float) -> None:
        begin = time.perf_counter()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited_s = time.perf_counter() - begin
            raise TransportError(
                f"{key} did not come from rank {source}: waited {waited_s:.1f} s of "
                f"{timeout_s:g} s; {_first_line(error)}"
            ) from error
        self._stats.waited_s += time.perf_counter() - begin


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
