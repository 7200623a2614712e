"""Orders a rank's actions: by its table, by a policy, or by its leader's decisions.

The executor iterates over positions in the table. When it asks for the next position, it has
launched the previous action. On the host that action is complete then; a device may still run it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.errors import TransportTimeout
from megatron_ext.message import Message
from megatron_ext.runtime.run_ahead import AHEAD
from megatron_ext.transport.base import Expected
from megatron_ext.transport.torch_dist import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.runtime.program import Table
    from megatron_ext.runtime.run_ahead import RunAhead
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.transport.base import Transport

__all__ = ["Agreement", "LedOrder", "Order", "PolicyOrder", "TableOrder", "agree", "leaders"]


@dataclass(frozen=True)
class Agreement:
    """The leader and the followers of this rank, as global ranks."""

    rank: int
    """This process."""
    leader: int
    followers: tuple[int, ...] = ()
    """Ranks that follow this one; empty unless it leads."""

    @property
    def channels(self) -> list[Channel]:
        """The channels on which this rank sends or receives decisions."""
        sent = [Channel(self.rank, follower, "D") for follower in self.followers]
        return sent if self.leader == self.rank else [Channel(self.leader, self.rank, "D")]


# Why following a leader cannot deadlock: ranks with one leader run one order, so they count as one
# rank. The leader only runs an action whose inputs have arrived, so the leader of the previous
# stage has run the action that produced them. Its followers run that action too, and their peers in
# this stage get their inputs.
def agree(*groups: dist.ProcessGroup, others: Iterable[int] = ()) -> Agreement:
    """Find the leader of this rank. Collective over all ranks of the job.

    An action may contain a collective over tensor-, context- or expert-parallel ranks, or over two
    twins that read data for each other. Ranks that share such groups, directly or through other
    ranks, follow one leader, which sends its choices as messages.

    Args:
        groups: Groups whose collectives run inside this rank's actions. Expert groups are added.
        others: Further global ranks that must run the same order.
    """
    experts = (
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
    )
    peers = {dist.get_rank(), *others}
    for group in (*groups, *experts):
        if group is not None:
            peers.update(dist.get_process_group_ranks(group))
    everybody: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, peers)
    leader_of = leaders(everybody)
    me = dist.get_rank()
    mine = (rank for rank, leader in enumerate(leader_of) if leader == me != rank)
    return Agreement(me, leader_of[me], tuple(mine))


def leaders(peers: Sequence[Iterable[int]]) -> list[int]:
    """Return the lowest rank of each rank's connected component.

    Args:
        peers: By rank, the ranks that must run the same order.
    """
    leader = list(range(len(peers)))

    def root(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for rank, others in enumerate(peers):
        for other in others:
            low, high = sorted((root(rank), root(other)))
            leader[high] = low
    return [root(rank) for rank in range(len(peers))]


class Order(Protocol):
    """The order in which one rank runs its actions in one step."""

    def expected(self) -> list[Expected]:
        """Return the messages that the order itself receives, beyond those of the actions."""

    def __iter__(self) -> Iterator[int]:
        """Yield positions in the table; the caller runs each action before it asks for the next."""

    def handed(self, message: Message) -> None:
        """Record that a tensor is available for another stage of this rank."""


@dataclass
class TableOrder:
    """Runs the table's own order, whatever has arrived."""

    table: Table

    def expected(self) -> list[Expected]:
        """Return nothing: a static order needs no messages."""
        return []

    def __iter__(self) -> Iterator[int]:
        """Yield the positions in ascending order."""
        return iter(range(len(self.table.exchanges)))

    def handed(self, message: Message) -> None:
        """Do nothing: the order is fixed."""


@dataclass
class PolicyOrder:
    """Runs what a policy chooses among actions whose inputs have arrived; sleeps if none has.

    On a device it sleeps until a message arrives or an action ends, whichever is first: the thread
    that waits for the ends sends this rank a message of its own.
    """

    policy: Policy
    table: Table
    transport: Transport
    num_parts: Mapping[str, int]
    """Tensors per message, by kind of message."""
    followers: Sequence[int]
    """Global ranks that follow these decisions."""
    timeout_s: float
    run_ahead: RunAhead | None = None
    """Tells when the device has ended an action; None if the host computes."""
    _parts: dict[Message, int] = field(default_factory=dict, init=False)
    """Parts that have arrived, for messages of several tensors; also those that are launched."""
    _ran_s: float = field(default=0.0, init=False)
    """Time in this step's finished actions, in seconds."""
    _ran_units: float = field(default=0.0, init=False)
    """The same in cost units of the table; only counted if the policy has patience."""
    _running: deque[int] = field(default_factory=deque, init=False)
    """Actions that the device has not ended, oldest first."""
    _took_s: deque[float] = field(default_factory=deque, init=False)
    """Durations of ended actions that `_note` has not seen. Another thread appends to it."""
    _idle_s: float = field(default=0.0, init=False)
    """When this rank had nothing to run any more, by the host's clock."""

    def expected(self) -> list[Expected]:
        """Return what this rank tells itself: the end of each action on the device but the last."""
        if self.run_ahead is None:
            return []
        me, ends = dist.get_rank(), range(len(self.table.exchanges) - 1)
        return [Expected(me, Message.end_of(number), (0,), torch.uint8) for number in ends]

    def __iter__(self) -> Iterator[int]:
        """Choose an action, send its position to the followers, and yield it.

        On a device an action is chosen while the last one runs if the policy looks ahead, so that
        its launch takes no time of the device. Otherwise it is chosen when the last one has ended.

        Raises:
            TransportTimeout: No action is ready, and nothing arrived for `timeout_s`.
        """
        if self.run_ahead is None:
            yield from self._choices()
            return
        self.policy.progress.hears_launches = self._hears_launches()
        self.run_ahead.wait_until(0)  # an evaluation may still run
        self.run_ahead.tell(self._bell())
        try:
            yield from self._choices()
            while len(self._running) > 1:  # nothing waits for the end of the last
                self._wait(self.timeout_s)
        finally:
            self.run_ahead.tell(None)

    def _choices(self) -> Iterator[int]:
        progress, number = self.policy.progress, 0
        for exchange in self.table.exchanges:
            for transfer in exchange.inputs:
                if transfer.message.kind in ("P", "G"):  # routes, which policies ignore
                    progress.require(exchange.action, transfer.message)
        while progress.left:
            index = self._choose()
            position = self.table.positions[progress.row[index]]
            for follower in self.followers:
                choice = torch.tensor([position], dtype=torch.int32)  # on the CPU: no device sync
                self.transport.isend(choice, follower, Message("D", 0, number))
            begin_s = time.perf_counter()
            yield position
            if self.run_ahead is None:
                self._ended(index, time.perf_counter() - begin_s)
            else:
                self._running.append(index)
            progress.finished(index)  # what it enables runs behind it, on the same device
            number += 1

    def _hears_launches(self) -> bool:
        """Return whether all peers tell what they have launched, as those over ipc do."""
        return all(wire == "ipc" for wire in self.transport.stats().wires.values())

    def handed(self, message: Message) -> None:
        """Mark the tensor as arrived; its consumer may become ready."""
        self._note([message])

    def _choose(self) -> int:
        self._idle_s = time.perf_counter()
        self._note(self.transport.poll(0.0))
        while len(self._running) >= AHEAD or (self._running and not self.policy.looks_ahead()):
            self._wait(self.timeout_s)
        while True:
            wait_s = self._idle_s + self._patience_s() - time.perf_counter()
            if wait_s <= 0 and (index := self.policy.choose()) is not None:
                return index
            if wait_s <= 0:
                self._wait(self.timeout_s)
            else:
                self._note(self.transport.poll(wait_s))

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a message arrives or an action ends.

        Raises:
            TransportTimeout: Nothing happened in time.
        """
        arrived = self.transport.poll(timeout_s)
        if not arrived:
            raise TransportTimeout(self._missing())
        self._note(arrived)

    def _bell(self) -> Callable[[float], None]:
        """Return a function that tells this rank of the end of its next action."""
        me, nothing = dist.get_rank(), torch.empty(0, dtype=torch.uint8)
        numbers = iter(range(len(self.table.exchanges) - 1))

        def tell(took_s: float) -> None:
            number = next(numbers, None)
            if number is not None:
                self._took_s.append(took_s)
                self.transport.isend(nothing, me, Message.end_of(number))

        return tell

    def _ended(self, index: int, took_s: float) -> None:
        self._ran_s += took_s
        if self.policy.patience is not None:
            self._ran_units += self.policy.patience.durations[index]

    def _note_end(self, message: Message) -> None:
        """Take note of the end of the oldest running action."""
        assert self.run_ahead is not None
        self.transport.recv(dist.get_rank(), message, self.timeout_s)
        self.run_ahead.wait_until(len(self._running))  # raises if the device has failed
        self._ended(self._running.popleft(), self._took_s.popleft())
        self._idle_s = time.perf_counter()

    def _patience_s(self) -> float:
        """Return how long to wait before choosing, in seconds.

        0 until an action has run: before that a cost unit has no known duration.
        """
        units = self.policy.wait()
        return units * self._ran_s / self._ran_units if units and self._ran_units else 0.0

    def _note(self, messages: Sequence[Message]) -> None:
        for part in messages:
            if part.is_own:
                self._note_end(part)
                continue
            assert part.kind != "D", "a leader receives no decisions"
            message, progress = part._replace(part=0), self.policy.progress
            if part.is_launch:
                if self._is_whole(message.launch):
                    progress.launched(message)
            elif self._is_whole(message):
                progress.arrived(message)
            elif part.for_host and self._is_whole(message.launch):
                progress.launched(message)  # no news precede what the host receives

    def _is_whole(self, message: Message) -> bool:
        """Count one more part of a message, or of its launch; return whether it was the last."""
        number = self.num_parts[message.kind]
        if number > 1:
            self._parts[message] = self._parts.get(message, 0) + 1
        return number == 1 or self._parts[message] == number

    def _missing(self) -> str:
        if self._running:
            action = self.policy.progress.row[self._running[0]]
            return (
                f"rank {dist.get_rank()} (pipeline rank {self.table.rank}): {action} of "
                f"{self.table.schedule.label} did not end on its device for {self.timeout_s:g} s"
            )
        done = self.policy.progress.done
        row = self.policy.progress.row
        remaining = [action for index, action in enumerate(row) if not done[index]]
        head = min(remaining, key=self.table.positions.__getitem__)
        needs = self.table.exchanges[self.table.positions[head]].inputs
        what = f", which needs {needs[0].message}" if needs else ""
        return (
            f"rank {dist.get_rank()} (pipeline rank {self.table.rank}) can run none of its "
            f"{len(remaining)} remaining actions in {self.table.schedule.label}: nothing arrived "
            f"for {self.timeout_s:g} s; the first of the table is {head}{what}"
        )


@dataclass
class LedOrder:
    """Follows the leader's decisions, one message per action."""

    table: Table
    transport: Transport
    leader: int
    """Global rank of the leader."""
    timeout_s: float

    def expected(self) -> list[Expected]:
        """Return one decision message per action: int32, shape `(1,)`."""
        return [
            Expected(self.leader, Message("D", 0, number), (1,), torch.int32)
            for number in range(len(self.table.exchanges))
        ]

    def __iter__(self) -> Iterator[int]:
        """Receive and yield the leader's decisions.

        Raises:
            TransportError: A decision timed out, or the leader failed.
        """
        for number in range(len(self.table.exchanges)):
            choice = self.transport.recv(self.leader, Message("D", 0, number), self.timeout_s)
            yield int(choice.item())

    def handed(self, message: Message) -> None:
        """Do nothing: only what the leader has received counts."""
