"""What one rank may run now: the bookkeeping under every dynamic policy.

An action is *ready* when all that it needs exists: F its input, B and I the forward of its own rank
and the gradient of its output, W its I. On top of that the backwards of a stage, and its W, become
ready in the order of the micro-batches only. That fixes the order in which gradients are summed, so
the result has the bits of the static table whatever arrives first. Forwards of the last stage keep
the order of the table: some losses are averaged over replicas, which have to meet there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from megatron_ext.schedules.actions import Action

if TYPE_CHECKING:
    from megatron_ext.schedules.actions import Kind, Schedule

__all__ = ["Progress"]


class Progress:
    """The ready actions of one rank, as positions in its row of the static table.

    Three heaps, since policies choose by kind: forwards, backwards (B and I) and weights.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.row = schedule.rows[rank]
        self.position = {action: index for index, action in enumerate(self.row)}
        self.done = bytearray(len(self.row))
        self.left = len(self.row)
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.weights: list[int] = []
        self._last_stage = schedule.num_stages - 1
        self._missing = [self._needs(action) for action in self.row]
        self._turns = self._by_turn()
        """Positions of what has to run in a fixed order: by stage and kind, B and I as one."""
        for index, missing in enumerate(self._missing):
            if not missing:
                self._offer(index)

    def _needs(self, action: Action) -> int:
        """Count what an action waits for at the start of a step."""
        stage, kind, _ = action
        if kind == "F":
            return int(stage > 0)
        if kind == "W":
            return 1
        return 1 + int(stage < self._last_stage)

    def _by_turn(self) -> dict[tuple[int, str], deque[int]]:
        turns: dict[tuple[int, str], deque[int]] = defaultdict(deque)
        for index in sorted(range(len(self.row)), key=lambda i: self.row[i].microbatch):
            stage, kind, _ = self.row[index]
            if kind != "F":
                turns[stage, _turn(kind)].append(index)
        for index, (stage, kind, _) in enumerate(self.row):
            if kind == "F" and stage == self._last_stage:
                turns[stage, "F"].append(index)
        return turns

    def arrived(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Note that a stage got its activation (F) or the gradient of its output (B)."""
        if kind == "F":
            self._supply(self.position[Action(stage, "F", microbatch)])
        else:
            self._supply(self._backward_of(stage, microbatch))

    def finished(self, index: int) -> None:
        """Note that an action has run, which may make others of this rank ready."""
        stage, kind, microbatch = self.row[index]
        self.done[index] = 1
        self.left -= 1
        if kind == "F":
            self._supply(self._backward_of(stage, microbatch))
        elif kind == "I":
            self._supply(self.position[Action(stage, "W", microbatch)])
        turn = self._turns.get((stage, _turn(kind)))
        if turn is None:
            return
        turn.popleft()
        if turn and not self._missing[turn[0]]:
            self._push(turn[0])

    def _backward_of(self, stage: int, microbatch: int) -> int:
        full = self.position.get(Action(stage, "B", microbatch))
        return self.position[Action(stage, "I", microbatch)] if full is None else full

    def _supply(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            self._offer(index)

    def _offer(self, index: int) -> None:
        """Make an action ready that needs nothing more, if it is its turn."""
        stage, kind, _ = self.row[index]
        turn = self._turns.get((stage, _turn(kind)))
        if turn is None or turn[0] == index:
            self._push(index)

    def _push(self, index: int) -> None:
        kind = self.row[index].kind
        heap = {"F": self.forwards, "W": self.weights}.get(kind, self.backwards)
        heapq.heappush(heap, index)


def _turn(kind: Kind) -> str:
    """Return what takes turns with an action: B and I take turns with each other."""
    return kind if kind in ("F", "W") else "B"
