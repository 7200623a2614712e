"""Where the order of a rank's actions comes from: its table, a policy, or the leader.

The executor asks for one position of the table after the other; when it asks for the next, the
action before is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megatron_ext.errors import TransportTimeout
from megatron_ext.messages import Message
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.schedules.runtime.rank_table import Table
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.transport.base import Transport

__all__ = ["LedOrder", "Order", "PolicyOrder", "TableOrder"]


class Order(Protocol):
    """The order in which one rank runs the actions of its table, for one step."""

    def expected(self) -> list[Expected]:
        """Return the messages that it needs, on top of those of the actions."""

    def __iter__(self) -> Iterator[int]:
        """Yield positions in the table; each action is run before the next is asked for."""

    def handed(self, message: Message) -> None:
        """Note a tensor that stays on this rank."""


@dataclass
class TableOrder:
    """That of the table, whatever has arrived."""

    table: Table

    def expected(self) -> list[Expected]:
        """Return nothing: the table says it all."""
        return []

    def __iter__(self) -> Iterator[int]:
        """Count."""
        return iter(range(len(self.table.exchanges)))

    def handed(self, message: Message) -> None:
        """Ignore it."""


@dataclass
class PolicyOrder:
    """What a policy chooses of the actions whose inputs are here; sleeps while there is none."""

    policy: Policy
    table: Table
    transport: Transport
    num_parts: Mapping[str, int]
    """By kind of message: tensors of one hand-over."""
    followers: Sequence[int]
    """Global ranks that run what is chosen here."""
    timeout_s: float
    _parts: dict[Message, int] = field(default_factory=dict, init=False)
    """What of each hand-over has arrived, where it is several tensors."""
    _ran_s: float = field(default=0.0, init=False)
    """Time in the actions of this step so far, as the host sees it."""
    _ran_units: float = field(default=0.0, init=False)
    """The same by the costs of the table, where the policy has patience."""

    def expected(self) -> list[Expected]:
        """Return nothing: the leader receives no decisions."""
        return []

    def __iter__(self) -> Iterator[int]:
        """Choose, tell the followers, and let it be run.

        Raises:
            TransportTimeout: Nothing that could be run came in time.
        """
        progress, number = self.policy.progress, 0
        for exchange in self.table.exchanges:
            for transfer in exchange.inputs:
                if transfer.message.kind in ("P", "G"):  # which no policy has to know
                    progress.require(exchange.action, transfer.message)
        while progress.left:
            index = self._choose()
            position = self.table.positions[progress.row[index]]
            for follower in self.followers:
                choice = torch.tensor([position], dtype=torch.int32)  # no device is waited for
                self.transport.isend(choice, follower, Message("D", 0, number))
            begin_s = time.perf_counter()
            yield position
            self._ran_s += time.perf_counter() - begin_s
            if self.policy.patience is not None:
                self._ran_units += self.policy.patience.durations[index]
            progress.finished(index)
            number += 1

    def handed(self, message: Message) -> None:
        """Make what needs the tensor ready."""
        self._note([message])

    def _choose(self) -> int:
        free_s = time.perf_counter()
        self._note(self.transport.poll(0.0))
        while True:
            wait_s = free_s + self._patience_s() - time.perf_counter()
            if wait_s <= 0 and (index := self.policy.choose()) is not None:
                return index
            arrived = self.transport.poll(wait_s if wait_s > 0 else self.timeout_s)
            if not arrived and wait_s <= 0:
                raise TransportTimeout(self._missing())
            self._note(arrived)

    def _patience_s(self) -> float:
        """Return how long to wait before choosing; nothing while the unit's length is unknown."""
        units = self.policy.wait()
        return units * self._ran_s / self._ran_units if units and self._ran_units else 0.0

    def _note(self, messages: Sequence[Message]) -> None:
        for part in messages:
            assert part.kind != "D", "a leader receives no decisions"
            message, number = part._replace(part=0), self.num_parts[part.kind]
            if number > 1:
                self._parts[message] = self._parts.get(message, 0) + 1
                if self._parts[message] < number:
                    continue
            self.policy.progress.arrived(message)

    def _missing(self) -> str:
        done = self.policy.progress.done
        row = self.policy.progress.row
        remaining = [action for index, action in enumerate(row) if not done[index]]
        head = min(remaining, key=self.table.positions.__getitem__)
        needs = self.table.exchanges[self.table.positions[head]].inputs
        what = f", which needs {needs[0].message}" if needs else ""
        return (
            f"rank {dist.get_rank()} (pipeline rank {self.table.rank}) can run none of its "
            f"{len(remaining)} actions left in {self.table.schedule.label}: nothing arrived for "
            f"{self.timeout_s:g} s; the first of the table is {head}{what}"
        )


@dataclass
class LedOrder:
    """What the leader has decided, message by message."""

    table: Table
    transport: Transport
    leader: int
    """Its global rank."""
    timeout_s: float

    def expected(self) -> list[Expected]:
        """Return one message for each action."""
        return [
            Expected(self.leader, Message("D", 0, number), (1,), torch.int32)
            for number in range(len(self.table.exchanges))
        ]

    def __iter__(self) -> Iterator[int]:
        """Wait for the next choice.

        Raises:
            TransportError: It did not come in time.
        """
        for number in range(len(self.table.exchanges)):
            choice = self.transport.recv(self.leader, Message("D", 0, number), self.timeout_s)
            yield int(choice.item())

    def handed(self, message: Message) -> None:
        """Ignore it: only what the leader has counts."""
