"""Dynamic schedules: which of the ready actions a rank runs next.

A static table fixes the order in advance, so a late message stops its rank. A policy decides when
the rank is free, by what has arrived. It is a pure object: the simulator and the executor drive the
same one through `Progress.arrived`, `choose` and `finished`.

`hint` follows a static table as long as that can go on. If the head of the table waits, it runs the
first later action that is ready and keeps the activations of the whole remaining table below the
cap. Where the policy made the W (`representation/split_backwards.py`), a W runs only if nothing
else can. `patience.py` says how long a rank waits for the head first. The cap is the same on all
ranks: the table's peak on its worst rank, plus what the user allows. Two properties follow:

- Memory: no jump lifts any later point of the rank's activation curve above the cap.
- It ends: take the unfinished action that comes first in an order of all actions that respects data
  and table. All before it is done, so it is the head of its rank, its input exists, and a head is
  always admissible.

A cap by rank, each its own peak of the table, would save nothing that counts: what all ranks have
to have is what the worst one needs. But 1F1B and interleaved tables keep far less on the last ranks
than on the first, so those could never run ahead of what waits.

`breadth-first` and `depth-first` are greedy rules without a table and without a bound on memory:
forwards and backwards alternate, the first in the order of chunks, the second always what is
deepest in the model. They need up to m activations, and are here to be compared with.

Idea of dynamic pipelines: MegatronApp's DPP (breadth-first). The table as a hint that bounds memory
is ours; RRFP (arXiv 2605.18750) has a similar idea.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.representation.memory import live_counts
from megatron_ext.schedules.search.curve import Curve
from megatron_ext.schedules.search.readiness import Progress

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Action, Schedule

__all__ = [
    "POLICIES",
    "Hint",
    "Patience",
    "Policy",
    "PolicyName",
    "activation_cap",
    "make_policy",
]

PolicyName = Literal["hint", "breadth-first", "depth-first"]

_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What an action does to the activations of its rank, in stages."""


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for the head of its table; times in the unit of the table's costs."""

    waits: Sequence[float]
    """By position of the head: from when the rank is free until it may jump over the head."""
    durations: Sequence[float]
    """By position: what an action takes by these costs. Tells how long the unit is."""


class Policy(Protocol):
    """Chooses what one rank runs, for one step."""

    progress: Progress
    patience: Patience | None
    """None: it takes what is there."""

    def wait(self) -> float:
        """Return how long to wait for more before choosing, from when the rank became free."""

    def choose(self) -> int | None:
        """Take the next action: its position in the rank's row, or None while nothing may run."""


class Hint:
    """The static table, with jumps over what waits.

    Args:
        schedule: The table.
        rank: Of the pipeline.
        cap: Most activations of stages that the rank may keep, at least the table's own peak there.
        weights_fill: Whether W runs only where nothing else can. For tables in which W has no place
            of its own.
        patience: See `patience.py`; None: what waits is jumped over at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        cap: int,
        *,
        weights_fill: bool,
        patience: Patience | None = None,
    ) -> None:
        self.progress = Progress(schedule, rank)
        self._rest = Curve([_CHANGE[action.kind] for action in self.progress.row])
        self.cap = cap
        self.live = 0
        self.patience = patience
        self._head = 0
        self._weights_fill = weights_fill

    def wait(self) -> float:
        """Return how long the head of the table is waited for; nothing if it is ready."""
        if self.patience is None:
            return 0.0
        self._advance()
        if not self.progress.left or self.progress.is_ready(self._head):
            return 0.0
        return self.patience.waits[self._head]

    def choose(self) -> int | None:
        """Take the head of the table, else the first later action that is ready and admissible."""
        self._advance()
        found = self._first()
        if found is None:
            return None
        index = heapq.heappop(found)
        self.live += self._rest.take(index)
        return index

    def _advance(self) -> None:
        done = self.progress.done
        while self._head < len(done) and done[self._head]:
            self._head += 1

    def _first(self) -> list[int] | None:
        progress = self.progress
        best, weights, forwards = progress.backwards, progress.weights, progress.forwards
        if weights and not self._weights_fill and (not best or weights[0] < best[0]):
            best = weights
        # Last, since only here the curve has to be asked.
        if forwards and (not best or forwards[0] < best[0]) and self._is_admissible(forwards[0]):
            best = forwards
        return best or weights or None

    def _is_admissible(self, index: int) -> bool:
        """Tell whether a forward may run now: the rest of the table, one higher, must fit.

        What comes after it in the table is as high as before; so if the first ready forward does
        not fit, no later one does.
        """
        return index == self._head or self.live + self._rest.top(index) + 1 <= self.cap


class Greedy:
    """Forwards and backwards in turn, the best by a fixed order; W where neither can run.

    Args:
        schedule: A table, of which only the actions count, not their order.
        rank: Of the pipeline.
        depth_first: Whether the deepest forward goes first, instead of the first chunk's.
    """

    def __init__(self, schedule: Schedule, rank: int, *, depth_first: bool) -> None:
        self.progress = Progress(_reordered(schedule, rank, depth_first), rank)
        self.depth_first = depth_first
        self.patience: Patience | None = None
        self._backward_next = True

    def wait(self) -> float:
        """Return 0."""
        return 0.0

    def choose(self) -> int | None:
        """Take the other kind than last time if one is ready."""
        progress = self.progress
        turns = [progress.backwards, progress.forwards]
        if not self._backward_next:
            turns.reverse()
        for heap in (*turns, progress.weights):
            if heap:
                self._backward_next = heap is not progress.backwards
                return heapq.heappop(heap)
        return None


def _reordered(schedule: Schedule, rank: int, depth_first: bool) -> Schedule:
    """Return the schedule with the rank's row in the order of preference."""

    def preference(action: Action) -> tuple[int, int]:
        # Backwards come back through the chunks, so what is first in one direction is last there.
        forward = action.kind == "F"
        deep = -action.stage if forward == depth_first else action.stage
        return deep, action.microbatch

    rows = list(schedule.rows)
    rows[rank] = tuple(sorted(rows[rank], key=preference))
    return replace(schedule, rows=tuple(rows))


def activation_cap(schedule: Schedule, extra_activations: int = 0) -> int:
    """Return how many activations of stages a rank may keep under `hint`, the same on all ranks.

    Args:
        schedule: The table.
        extra_activations: Micro-batches on top of the table's peak, each on all stages of a rank.
    """
    peak = max(max(live_counts(row), default=0) for row in schedule.rows)
    return peak + extra_activations * max(map(len, schedule.placement.stages_of))


def _hint(schedule: Schedule, rank: int, cap: int, weights_fill: bool) -> Policy:
    return Hint(schedule, rank, cap, weights_fill=weights_fill)


def _breadth_first(schedule: Schedule, rank: int, _cap: int, _fill: bool) -> Policy:
    return Greedy(schedule, rank, depth_first=False)


def _depth_first(schedule: Schedule, rank: int, _cap: int, _fill: bool) -> Policy:
    return Greedy(schedule, rank, depth_first=True)


POLICIES: dict[PolicyName, Callable[[Schedule, int, int, bool], Policy]] = {
    "hint": _hint,
    "breadth-first": _breadth_first,
    "depth-first": _depth_first,
}
"""(table, rank, cap on activations, whether W fills) -> policy; the default first."""


def make_policy(
    name: PolicyName,
    schedule: Schedule,
    rank: int,
    cap: int,
    *,
    weights_fill: bool = False,
) -> Policy:
    """Return the policy of one rank for one step.

    Args:
        name: Of the policy.
        schedule: The table.
        rank: Of the pipeline.
        cap: Of `activation_cap`; greedy policies have none.
        weights_fill: Whether W runs only where nothing else can.

    Raises:
        ScheduleError: There is no such policy.
    """
    if name not in POLICIES:
        raise ScheduleError(f"there is no policy {name!r}; take one of {', '.join(POLICIES)}")
    return POLICIES[name](schedule, rank, cap, weights_fill)
