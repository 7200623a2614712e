"""Tracks the ready actions of one rank: the bookkeeping under every dynamic policy.

An action is *ready* when its inputs exist: for F its input, for B and I the forward of the same
rank and the gradient of the output, for W its I. In addition, the backwards of a stage, and what
computes its weight gradients, become ready only in the order of the micro-batches. That fixes the
order in which gradients are summed, so the result equals that of the static table bit for bit,
whatever arrives first. Forwards of the last stage keep the order of the table: some losses are
averaged over replicas, which must meet there. On every stage the first forward is that of the table
(`table/first_gradients.py` says why).

On a device an action can *follow* its inputs once they are launched: it runs behind them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_ext.message import Message
from megatron_ext.schedules.table.actions import Action

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["Progress"]


class Progress:
    """The ready actions of one rank, as positions in its row of the static table.

    Policies choose by kind, so there are three heaps: forwards, backwards (B and I) and weights.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.row = schedule.rows[rank]
        self.done = bytearray(len(self.row))
        self.left = len(self.row)
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.weights: list[int] = []
        self._missing = [0] * len(self.row)
        """By position: the number of tensors and actions that it waits for."""
        self._unlaunched: list[int] = []
        """By position: those among them that are not even launched."""
        self._launched: set[Message] = set()
        """Tensors that are launched and have not arrived."""
        self._launched_before: set[Message] = set()
        """Those that were launched when the last action was chosen."""
        self.hears_launches = False
        """Whether `launched` tells of each tensor of another rank before it arrives."""
        self._awaited: set[Message] = set()
        """Those that have not arrived when their action was chosen."""
        self._enables: list[list[int]] = [[] for _ in self.row]
        """By position: the actions of this rank that wait for it."""
        self._takers: dict[Message, int] = {}
        """By message, activation or gradient: the position of the action that needs it."""
        rank_of = schedule.placement.rank_of
        self._sources = [_source(action, rank_of) for action in self.row]
        """By position: the rank that makes its input, None for what needs none."""
        self._heap_of = self._heaps()
        self._connect(schedule.num_stages - 1)
        self._unlaunched = list(self._missing)
        for index, missing in enumerate(self._missing):
            if not missing:
                heapq.heappush(self._heap_of[index], index)

    def again(self) -> Progress:
        """Return a copy for another step; what no step changes is shared."""
        made = copy(self)
        made.done = bytearray(self.done)
        made.forwards, made.backwards = [*self.forwards], [*self.backwards]
        made.weights = [*self.weights]
        made._missing, made._unlaunched = [*self._missing], [*self._unlaunched]
        made._launched, made._launched_before = {*self._launched}, {*self._launched_before}
        made._awaited, made._takers = {*self._awaited}, {**self._takers}
        made._heap_of = made._heaps()
        return made

    def _heaps(self) -> list[list[int]]:
        heaps = {"F": self.forwards, "B": self.backwards, "I": self.backwards, "W": self.weights}
        return [heaps[action.kind] for action in self.row]

    def _connect(self, last_stage: int) -> None:
        """Build the dependencies between actions."""
        position = {action: index for index, action in enumerate(self.row)}
        for index, (stage, kind, microbatch) in enumerate(self.row):
            if kind == "W":
                self._order(position[Action(stage, "I", microbatch)], index)
            elif kind == "F":
                self._takers[Message("F", stage, microbatch)] = index
                self._missing[index] += stage > 0
            else:
                self._takers[Message("B", stage, microbatch)] = index
                self._missing[index] += stage < last_stage
                self._order(position[Action(stage, "F", microbatch)], index)
        for turns in _in_turn(self.row, last_stage):
            for before, after in pairwise(turns):
                self._order(before, after)
        for first, *others in _forwards(self.row):
            for after in others:
                self._order(first, after)

    def _order(self, before: int, after: int) -> None:
        self._enables[before].append(after)
        self._missing[after] += 1

    def require(self, action: Action, message: Message) -> None:
        """Let an action wait for one message more; before anything is chosen.

        Args:
            action: One that waits for its activation or its gradient anyway.
            message: What it needs besides.
        """
        index = self.row.index(action)
        assert self._missing[index], f"{action} may have been chosen already"
        self._takers[message] = index
        self._missing[index] += 1
        self._unlaunched[index] += 1

    def launched(self, message: Message) -> None:
        """Record that the device of another rank will compute a message, with all its parts."""
        self._launched.add(message)
        self._unlaunched[self._takers[message]] -= 1

    def arrived(self, message: Message) -> None:
        """Record the arrival of a message that an action needs, with all its parts."""
        if message in self._awaited:
            self._awaited.remove(message)
            return
        index = self._takers[message]
        if message in self._launched:
            self._launched.remove(message)
        else:
            self._unlaunched[index] -= 1
        self._supply(index)

    def finished(self, index: int) -> None:
        """Record that an action has run, which may make others of this rank ready."""
        self.done[index] = 1
        self.left -= 1
        for after in self._enables[index]:
            self._unlaunched[after] -= 1
            self._supply(after)

    def chosen(self) -> None:
        """Record that an action is chosen, and what is on its way at that time."""
        self._launched_before = set(self._launched)

    def expects(self) -> bool:
        """Return whether a tensor may arrive before the last chosen action has ended.

        Actions take about as long on all ranks. So what was launched after that choice ends later.
        """
        return not self.hears_launches or not self._launched_before.isdisjoint(self._launched)

    def begin(self, index: int) -> None:
        """Record that an action which is not ready is chosen, to follow what it needs."""
        self._missing[index] = 0
        self._awaited |= self._launched  # all of it is for this action (`follower`)
        self._launched.clear()

    def is_ready(self, index: int) -> bool:
        """Return whether an action may run, or has run."""
        return not self._missing[index]

    def follower(self, head: int) -> int | None:
        """Return the action that needs all that is launched, and nothing more; None if none does.

        Other than the head only one whose input comes from the same device as the head's: devices
        run in the order of launches, so what the head needs comes later anyway.
        """
        takers = {self._takers[message] for message in self._launched}
        if len(takers) != 1:
            return None
        index = takers.pop()
        is_first = index == head or self._sources[index] == self._sources[head]
        return index if is_first and not self._unlaunched[index] else None

    def _supply(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            heapq.heappush(self._heap_of[index], index)


def _source(action: Action, rank_of: Sequence[int]) -> int | None:
    """Return the rank that makes the activation or the gradient that an action needs."""
    made_by = {"F": action.stage - 1, "W": -1}.get(action.kind, action.stage + 1)
    return rank_of[made_by] if 0 <= made_by < len(rank_of) else None


def _in_turn(row: Sequence[Action], last_stage: int) -> Iterator[list[int]]:
    """Yield positions of actions that must run in sequence: B and I of a stage, and B and W."""
    turns: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index in sorted(range(len(row)), key=lambda i: row[i].microbatch):
        stage, kind, _ = row[index]
        if kind in "BI":
            turns[stage, "I"].append(index)
        if kind in "BW":
            turns[stage, "W"].append(index)
    yield from turns.values()
    yield [i for i, action in enumerate(row) if action.kind == "F" and action.stage == last_stage]


def _forwards(row: Sequence[Action]) -> Iterable[list[int]]:
    """Return the positions of the forwards of each stage."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, action in enumerate(row):
        if action.kind == "F":
            found[action.stage].append(index)
    return found.values()
