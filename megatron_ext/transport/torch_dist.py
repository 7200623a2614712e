"""The transport over torch.distributed's point-to-point operations: gloo, NCCL, MCCL.

torch.distributed cannot report an arrival before the receive is posted, so this transport supports
only static schedules. Once a wait has timed out, its group cannot be used again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_ext.errors import TransportError
from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.dtypes import plain

if TYPE_CHECKING:
    from megatron_ext.message import Message, MessageKind

    # A target's sends in progress, oldest first, each with the tensor that it reads.
    _Sends = deque[tuple[dist.Work, torch.Tensor]]

_MAX_DIMS = 7
# Prefix of the store keys under which ranks publish why they abort.
_ABORTED = "megatron_ext/aborted"
_STORE_S = 5.0  # maximum wait for the store, whose calls have no time-out

# The message kinds that this wire carries.
_KINDS: tuple[MessageKind, ...] = ("F", "B", "P", "G")


Link = tuple[int, int]
"""Source and target, as global ranks. (0, 1) and (1, 0) have separate groups."""

_Members = TypeVar("_Members", bound=tuple[int, ...])


@dataclass
class _Posted:
    """A receive in progress."""

    work: dist.Work
    tensor: torch.Tensor
    """Buffer for the message, or for the header that contains its shape (int64, [8])."""
    expected: Expected
    is_header: bool


class TorchTransport:
    """Carries tensors over torch.distributed process groups.

    The constructor is collective over all ranks in the job.

    Args:
        device: Device on which received tensors are allocated.
        links: All links that have this rank as source or target.
        timeout_s: Time-out of an operation. With gloo, it applies to each `recv` separately.
        shapes_travel: Whether a header with the shape precedes each message; identical on all
            ranks.
    """

    def __init__(
        self,
        device: torch.device,
        links: Iterable[Link],
        *,
        timeout_s: float,
        shapes_travel: bool,
    ) -> None:
        self._device = device
        self._shapes_travel = shapes_travel
        self._timeout_s = timeout_s
        self._matches_tags = dist.get_backend() == dist.Backend.GLOO
        # Whether a receive needs the shape from the preceding header and therefore
        # blocks the host. If so, the receives that are due are started at the beginning
        # of the next call rather than at the end of the previous one, because by then
        # the computation between the two calls has been launched.
        self._one_by_one = shapes_travel and not self._matches_tags
        self._me = dist.get_rank()
        links = set(links)
        # None stands for the group of all ranks.
        self._groups: dict[Link, dist.ProcessGroup | None] = dict.fromkeys(links)
        # gloo matches messages by tag. NCCL and MCCL ignore tags and run a
        # communicator's operations one after another, so each direction of each link
        # needs a separate group.
        if not self._matches_tags:
            self._groups.update(groups_of_ranks(links, timeout_s))
            # Use each group once, in the same order on all ranks: the first use of a group creates
            # its communicator and waits for the peer.
            for source, target in sorted(links):
                group = self._groups[source, target]
                probe = torch.zeros(1, device=device)
                if source == self._me:
                    dist.send(probe, target, group)
                else:
                    dist.recv(probe, source, group)
        # This step's receives that have not started.
        self._waiting: deque[Expected] = deque()
        # Receives in progress, by source and message.
        self._posted: dict[tuple[int, Message], _Posted] = {}
        # Sends in progress, by target.
        self._sent: dict[int, _Sends] = defaultdict(deque)
        self._slots = 1
        # Largest number of tensors in any message from this rank so far.
        self._parts = 1
        self._step = 0
        # Number of calls to `isend` and `recv` in this step.
        self._calls = 0
        # An earlier transport in this job may have set this key.
        _store().delete_key(f"{_ABORTED}/{self._me}")
        wire = f"torch.distributed, {dist.get_backend()}"
        ranks = set[int]().union(*self._groups)
        peers = ranks - {self._me}
        self._stats = Stats(wires=dict.fromkeys(peers, wire))

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step and the receives that are due before its first call."""
        if self._posted or self._waiting:
            missing = [message for _, message in self._posted]
            missing += [item.message for item in self._waiting]
            raise TransportError(
                f"{missing[0]} of the previous step was never received"
            )
        self._slots = max(slots, 1)
        self._step += 1
        self._calls = 0
        self._waiting.extend(expected)
        if not self._one_by_one:
            self._post_due()

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor; keep its storage until the send completes."""
        if self._one_by_one:
            self._post_due()
        self._parts = max(self._parts, message.part + message.header + 1)
        # Keep an alias: the caller may replace the `data` of its tensor to free the output.
        tensor = plain(tensor.detach())
        sent = self._sent[target]
        group = self._groups[self._me, target]
        parts = [(tensor, False)]
        if self._shapes_travel:
            if tensor.ndim > _MAX_DIMS:
                raise TransportError(
                    f"a message has at most {_MAX_DIMS} dimensions, got {tensor.ndim}"
                )
            padding = [0] * (_MAX_DIMS - tensor.ndim)
            sizes = [tensor.ndim, *tensor.shape, *padding]
            header = torch.tensor(sizes, dtype=torch.int64, device=self._device)
            parts.insert(0, (header, True))
        for part, is_header in parts:
            tag = self._tag(message, is_header)
            work = dist.isend(part, target, group, tag=tag)
            assert work is not None
            sent.append((work, part))
        self._stats.messages += 1
        self._stats.bytes += tensor.nbytes
        while sent and sent[0][0].is_completed():
            sent.popleft()
        # Above a limit, wait for the oldest sends to limit memory use. The limit allows
        # for two directions of data flow, all of a message's tensors and their headers.
        limit = 2 * self._slots * self._parts
        if self._shapes_travel:
            limit *= 2
        while len(sent) > limit:
            work, _ = sent.popleft()
            self._wait(work, target, None, None)
        self.count_call()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Wait for a message and return its tensor. With NCCL and MCCL, only the device waits."""
        if self._one_by_one:
            self._post_due()
        while (source, message) not in self._posted:
            if not self._waiting:
                raise TransportError(
                    f"{message} is not expected from rank {source} in this step"
                )
            self._post(self._waiting.popleft())
        posted = self._posted.pop((source, message))
        if posted.is_header:
            posted = self._post_message(posted, timeout_s)
        self.count_call()
        self._wait(posted.work, source, message, timeout_s)
        return posted.tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Raise an error: torch.distributed cannot report arrivals.

        Raises:
            TransportError: Always.
        """
        raise TransportError(
            "torch.distributed cannot report whether a message has arrived, so it only supports "
            "static schedules; use --pipeline-transport auto for dynamic ones"
        )

    def wake(self) -> None:
        """Do nothing, because `poll` never sleeps."""

    def flush(self, timeout_s: float) -> None:
        """Wait until all sends have completed."""
        for target, sent in self._sent.items():
            while sent:
                work, _ = sent.popleft()
                self._wait(work, target, None, timeout_s)

    def abort(self, reason: str) -> None:
        """Drop all operations. Peers report the reason when this process exits or they time out."""
        _in_time(lambda: _store().set(f"{_ABORTED}/{self._me}", reason))
        self._drop()

    def _drop(self) -> None:
        self._waiting.clear()
        self._posted.clear()
        self._sent.clear()

    def close(self) -> None:
        """Drop all operations and destroy this transport's communicators."""
        self._drop()
        if not self._matches_tags:
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups = {}

    def stats(self) -> Stats:
        """Return the totals since the transport was opened."""
        return self._stats

    def count_call(self) -> None:
        """Count an `isend` or `recv`, including one that went through another transport."""
        self._calls += 1
        if not self._one_by_one:
            self._post_due()

    def _post_due(self) -> None:
        """Start the receives that are due."""
        # Start the receives in the order that all ranks share
        # (`schedules/search/queues.py`), each as soon as all earlier sends and receives
        # have started: NCCL runs a communicator's operations one after another.
        while self._waiting and self._waiting[0].after <= self._calls:
            self._post(self._waiting.popleft())

    def _post(self, item: Expected) -> None:
        source, message, shape, dtype, _ = item
        if self._shapes_travel:
            header_shape = (1 + _MAX_DIMS,)
            posted = self._start_recv(item, header_shape, torch.int64, is_header=True)
            if self._one_by_one:
                posted = self._post_message(posted, self._timeout_s)
        elif shape is None:
            raise TransportError(
                f"{message}: this transport does not send shapes; specify the shape"
            )
        else:
            posted = self._start_recv(item, shape, dtype)
        self._posted[source, message] = posted

    def _post_message(self, header: _Posted, timeout_s: float) -> _Posted:
        """Wait for a header and start receiving its message."""
        source, message, _, dtype, _ = header.expected
        self._wait(header.work, source, message, timeout_s)
        ndim, *padded_shape = header.tensor.tolist()
        shape = tuple(padded_shape[:ndim])
        return self._start_recv(header.expected, shape, dtype)

    def _start_recv(
        self,
        item: Expected,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        is_header: bool = False,
    ) -> _Posted:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        group = self._groups[item.source, self._me]
        tag = self._tag(item.message, is_header)
        work = dist.irecv(tensor, item.source, group, tag=tag)
        assert work is not None
        return _Posted(work, tensor, item, is_header)

    def _tag(self, message: Message, is_header: bool) -> int:
        """Return a 31-bit tag, which is never 0, because other code uses 0.

        Every other step reuses the same tags.
        """
        if not self._matches_tags:
            return 0
        is_in_limits = (
            message.stage < 1 << 9 and message.microbatch < 1 << 14 and message.part < 7
        )
        if not is_in_limits:
            raise TransportError(
                f"{message} exceeds the limits of message tags: a step has at most 512 stages, "
                f"16384 micro-batches and 7 tensors in each message; use fewer micro-batches"
            )
        # Slices may share a tag: messages with the same tag arrive in sending order,
        # which is the order of the posted receives.
        part = 7 if message.header else message.part
        tag = message.microbatch
        tag = tag << 9 | message.stage
        tag = tag << 3 | part
        tag = tag << 2 | _KINDS.index(message.kind)
        tag = tag << 1 | is_header
        tag = tag << 1 | self._step & 1
        return 1 << 30 | tag

    def _wait(
        self,
        work: dist.Work,
        peer: int,
        message: Message | None,
        timeout_s: float | None,
    ) -> None:
        """Wait until a peer's message has arrived or, if `message` is None, until a send completes.

        If `timeout_s` is None, the group's time-out applies.

        Raises:
            TransportError: The operation failed or timed out; the error names the peer and the
                reason.
        """
        begin = time.perf_counter()
        try:
            # With NCCL and MCCL, a wait without a time-out blocks the device but not the host; with
            # a time-out, the host would poll. If a message never arrives, the group's time-out
            # terminates the process.
            if timeout_s is None or not self._matches_tags:
                timeout_s = self._timeout_s
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited_s = time.perf_counter() - begin
            problem = f"rank {peer} did not receive what rank {self._me} sent"
            if message is not None:
                problem = f"{message} did not come from rank {peer}"
            raise TransportError(
                f"{problem}: waited {waited_s:.1f} s of {timeout_s:g} s; "
                f"{_reason(peer, error)}"
            ) from error
        if message is not None:
            self._stats.waited_s += time.perf_counter() - begin


def groups_of_ranks(
    sets: Iterable[_Members], timeout_s: float, backend: str | None = None
) -> dict[_Members, dist.ProcessGroup]:
    """Return a process group for each set of global ranks. Collective over the whole job.

    Each set contains this rank, and all ranks in a set pass the same set. `backend` is a
    torch.distributed backend; None means the job's backend.
    """
    # Create all groups on all ranks. Otherwise, torch names a group after the number of
    # groups that contain the calling rank, which differs between the ranks of a
    # pipeline (for example because of embedding groups), so two ranks would wait for
    # each other forever under different names.
    sets_of_rank = sorted(set(sets))
    world_size = dist.get_world_size()
    sets_by_rank: list[list[_Members]] = [[] for _ in range(world_size)]
    dist.all_gather_object(sets_by_rank, sets_of_rank)
    groups = {}
    timeout = timedelta(seconds=timeout_s)
    sets_of_all = set(chain.from_iterable(sets_by_rank))
    for members in sorted(sets_of_all):
        # Any, because in torch 2.15 the result type includes a value for ranks outside the group.
        group: Any = dist.new_group(sorted(members), timeout=timeout, backend=backend)
        if members in sets_of_rank:
            groups[members] = group
    return groups


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _reason(peer: int, error: Exception) -> str:
    """Return a peer's reason for aborting, or the error from torch.distributed."""
    key = f"{_ABORTED}/{peer}"

    def published() -> Any:
        # `get` would wait for a key that does not exist.
        if not _store().check([key]):
            return None
        return _store().get(key).decode()

    reason = _in_time(published)
    text = str(error) if reason is None else f"it aborted: {reason}"
    return text.partition("\n")[0]


def _in_time(ask: Callable[[], Any]) -> Any:
    """Return the store's answer; None if its process has exited or does not respond in time."""
    answers = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            answers.append(ask())

    # Use a thread, because calls to the store have no time-out: they block for as long as the
    # store's process is stopped.
    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(_STORE_S)
    return answers[0] if answers else None
