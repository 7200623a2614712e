"""Tracks which actions a rank may run next, for all dynamic policies.

An action is *ready* when its inputs exist (`Schedule.needs`) and all actions that must precede it
for bit-identical results have run. On a device, an action can *follow* its inputs once their
computation has been launched, because the device runs the action after them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_ext.schedules.table.communication import tensor_of

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.schedules.table.actions import Action, Schedule


class Progress:
    """One rank's ready actions, as positions in its static table row.

    Policies choose by action kind, so there are three heaps: forward passes, backward passes (B and
    I) and weights (W).
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.row = schedule.rows[rank]
        num_actions = len(self.row)
        # By position: 1 if the action has run.
        self.done = bytearray(num_actions)
        self.num_left = num_actions
        # Heaps of ready positions, one per kind of action.
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.weights: list[int] = []
        # By position: the number of tensors and actions that the action still waits
        # for.
        self._missing = [0] * num_actions
        # By position: how many of these tensors and actions have not been launched yet.
        self._unlaunched: list[int] = []
        # Tensors that have been launched but have not arrived yet.
        self._launched: set[Message] = set()
        # Tensors in `_launched` that were launched before the last chosen action began.
        self._launched_before: set[Message] = set()
        self.hears_launches = False
        """Whether `launched` announces every tensor from another rank before it arrives."""
        # Inputs that had not yet arrived when their action was chosen.
        self._awaited: set[Message] = set()
        # By position: the actions on this rank that wait for this action.
        self._enables: list[list[int]] = [[] for _ in self.row]
        # By message, activation or gradient: the position of the action that needs it.
        self._takers: dict[Message, int] = {}
        self.num_outstanding = 0
        """The number of these messages that have not arrived yet."""
        # By position: the rank that produces the action's input, or None if no input
        # comes from another stage.
        self._sources: list[int | None] = [None] * num_actions
        # By position: the heap for the action's kind.
        self._heap_of = self._heaps()
        self._connect(schedule)
        self._unlaunched = list(self._missing)
        for index, num_missing in enumerate(self._missing):
            if not num_missing:
                heap = self._heap_of[index]
                heapq.heappush(heap, index)

    def for_next_step(self) -> Progress:
        """Return a copy for another step that shares everything that is constant during a step."""
        progress = copy(self)
        progress.done = bytearray(self.done)
        progress.forwards = list(self.forwards)
        progress.backwards = list(self.backwards)
        progress.weights = list(self.weights)
        progress._missing = list(self._missing)
        progress._unlaunched = list(self._unlaunched)
        progress._launched = set(self._launched)
        progress._launched_before = set(self._launched_before)
        progress._awaited = set(self._awaited)
        progress._takers = dict(self._takers)
        # `_heap_of` refers to the heaps themselves, so it must be rebuilt for the
        # copies.
        progress._heap_of = progress._heaps()
        return progress

    def _heaps(self) -> list[list[int]]:
        heaps = {
            "F": self.forwards,
            "B": self.backwards,
            "I": self.backwards,
            "W": self.weights,
        }
        return [heaps[action.kind] for action in self.row]

    def _connect(self, schedule: Schedule) -> None:
        """Record the dependencies between actions."""
        position = {}
        for index, action in enumerate(self.row):
            position[action] = index
        rank_of = schedule.placement.rank_of
        for index, action in enumerate(self.row):
            for needed in schedule.needs(action):
                if schedule.travels(needed, action):
                    tensor = tensor_of(action)
                    self._takers[tensor] = index
                    self._missing[index] += 1
                    self.num_outstanding += 1
                    self._sources[index] = rank_of[needed.stage]
                else:
                    before = position[needed]
                    self._order(before, index)
        self._order_gradients()
        self._order_forwards(last_stage=schedule.num_stages - 1)

    def _order_gradients(self) -> None:
        """Make every stage's backward passes become ready in micro-batch order.

        Gradients are then summed in the same order no matter which message arrives first, and
        results are bit-identical to the static table's.
        """
        # By stage and kind of gradient (I or W): the positions of the actions that
        # contribute to it, in order.
        sums: dict[tuple[int, str], list[int]] = defaultdict(list)
        indices = range(len(self.row))
        for index in sorted(indices, key=lambda index: self.row[index].turn):
            action = self.row[index]
            if action.kind in ("B", "I"):
                sums[action.stage, "I"].append(index)
            if action.kind in ("B", "W"):
                sums[action.stage, "W"].append(index)
        for positions in sums.values():
            for before, after in pairwise(positions):
                self._order(before, after)

    def _order_forwards(self, last_stage: int) -> None:
        """Keep the table's order for every stage's first F and for all F on the last stage."""
        forwards: dict[int, list[int]] = defaultdict(list)
        for index, action in enumerate(self.row):
            if action.kind == "F":
                forwards[action.stage].append(index)
        # Some losses are averaged over replicas by a collective in the last stage's forward pass,
        # so all replicas must run the last stage's forward passes in the same order.
        on_last_stage = forwards.get(last_stage, [])
        for before, after in pairwise(on_last_stage):
            self._order(before, after)
        # Every stage starts with the same forward pass as in the table, as required by
        # `check_first_gradients`.
        for positions in forwards.values():
            first = positions[0]
            for after in positions[1:]:
                self._order(first, after)

    def _order(self, before: int, after: int) -> None:
        self._enables[before].append(after)
        self._missing[after] += 1

    def require(self, action: Action, message: Message) -> None:
        """Make an action wait for an additional message. Call this before any action is chosen."""
        index = self.row.index(action)
        assert self._missing[index], f"{action} may have been chosen already"
        self._takers[message] = index
        self.num_outstanding += 1
        self._missing[index] += 1
        self._unlaunched[index] += 1

    def launched(self, message: Message) -> None:
        """Record that another rank has launched the computation of all of a message's parts."""
        self._launched.add(message)
        index = self._takers[message]
        self._unlaunched[index] -= 1

    def arrived(self, message: Message) -> None:
        """Record that all of a message's parts have arrived.

        Launch notices are passed on to `launched` instead.
        """
        if message.launched:
            self.launched(message.tensor)
            return
        self.num_outstanding -= 1
        if message in self._awaited:
            # The action that needs this message was already chosen, so it no longer
            # waits for the message.
            self._awaited.remove(message)
            return
        index = self._takers[message]
        if message in self._launched:
            self._launched.remove(message)
        else:
            self._unlaunched[index] -= 1
        self._supply(index)

    def finished(self, index: int) -> None:
        """Record that an action has run, which may make other actions on this rank ready."""
        self.done[index] = 1
        self.num_left -= 1
        for after in self._enables[index]:
            self._unlaunched[after] -= 1
            self._supply(after)

    def began(self) -> None:
        """Record that the last chosen action has started, and which tensors are in flight."""
        self._launched_before = set(self._launched)

    def expects(self) -> bool:
        """Return whether a tensor may arrive before the last chosen action ends.

        Actions take about the same time on all ranks, so an action that is launched after this one
        has started ends after this one as well.
        """
        if not self.hears_launches:
            return True
        return not self._launched_before.isdisjoint(self._launched)

    def follow(self, index: int) -> None:
        """Record that an action is chosen before it is ready, so that it follows its inputs."""
        self._missing[index] = 0
        # All launched tensors are inputs to this action, as `follower` requires.
        self._awaited |= self._launched
        self._launched.clear()

    def is_ready(self, index: int) -> bool:
        """Return whether an action may run or has already run."""
        return not self._missing[index]

    def follower(self, head: int) -> int | None:
        """Return the action whose missing inputs are exactly the launched tensors, if there is one.

        An action other than the head qualifies only if its input comes from the same device as the
        head's input. Devices run actions in launch order, so the head's input arrives later anyway.
        """
        takers = {self._takers[message] for message in self._launched}
        if len(takers) != 1:
            return None
        index = takers.pop()
        sources = self._sources
        is_first = index == head or sources[index] == sources[head]
        if not is_first or self._unlaunched[index]:
            return None
        return index

    def _supply(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            heap = self._heap_of[index]
            heapq.heappush(heap, index)
