"""Dynamic schedules: policies that choose which ready action a rank runs next.

A static table fixes the order in advance, so a late message stalls its rank. A policy instead
chooses the next action whenever the rank is idle, based on which messages have arrived. Policies
perform no I/O. The simulator and the executor drive the same object through `Progress.arrived`,
`choose` and `finished`.

`hint` follows a static table as long as possible. If the head of the table must wait, `hint` runs
the first later action that is ready and keeps the remaining table's activation curve within a cap.
The cap is the same on all ranks. `patience.py` decides how long a rank first waits for the head.
`breadth-first` and `depth-first` ignore the table's order, have no cap and serve as baselines.

The idea of dynamic pipelines comes from MegatronApp's DPP (breadth-first). Using the table as a
hint that bounds memory is new in this package; RRFP (arXiv 2605.18750) is similar.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron_ext.schedules.search.progress import Progress
from megatron_ext.schedules.table.memory import most_alive, peak_of_row
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Schedule

PolicyName = Literal["hint", "breadth-first", "depth-first"]
POLICIES: tuple[PolicyName, ...] = ("hint", "breadth-first", "depth-first")
"""The default comes first."""


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for the head of its table, in the unit of the costs."""

    waits: Sequence[float]
    """By the head's position: how long the rank must be idle before it skips the head."""
    durations: Sequence[float]
    """By position: the action's duration under these costs, which calibrates the unit of time."""
    gains: Sequence[float] = ()
    """By the head's position: the time that running the head in a pair saves, or 0 if it runs
    alone. Empty if there are no pairs."""


class Policy(ABC):
    """Chooses which actions a rank runs in a step, and when.

    Positions refer to the rank's row in `schedule`.
    """

    patience: Patience | None = None
    """If None, the policy never waits for the head."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        *,
        pairs: bool,
    ) -> None:
        self.progress = Progress(schedule, rank)
        self._runs_pairs = pairs

    def for_next_step(self) -> Policy:
        """Return a copy for another step. Call this only before the policy makes a choice."""
        policy = copy(self)
        policy.progress = self.progress.for_next_step()
        return policy

    def wait(self) -> float:
        """Return how long the rank must have been idle before it chooses an action."""
        return 0.0

    @abstractmethod
    def looks_ahead(self) -> bool:
        """Return whether to choose while the last action is still running on the device.

        The result is True only if no message that may arrive in the meantime can change the choice.
        """

    @abstractmethod
    def choose(self) -> int | None:
        """Choose the next action and return its position, or None if no action may run."""

    def with_partner(self, index: int) -> tuple[int, ...]:
        """Return the action just chosen and, with pairs, its partner. The forward pass comes first.

        The partner is the first action in the opposite direction that is ready.
        """
        partners = self._partners(index)
        if partners is None:
            return (index,)
        partner = heapq.heappop(partners)
        if self.progress.row[index].kind == "F":
            return (index, partner)
        return (partner, index)

    def _partners(self, index: int) -> list[int] | None:
        """Return the heap whose first action may be this action's partner, or None."""
        progress = self.progress
        action = progress.row[index]
        if not self._runs_pairs or action.kind == "W":
            return None
        partners = progress.backwards if action.kind == "F" else progress.forwards
        if not partners:
            return None
        partner = progress.row[partners[0]]
        # A micro-batch's backward pass needs its forward pass, so the two cannot run as
        # a pair.
        if partner.microbatch == action.microbatch:
            return None
        return partners


PolicyFactory = Callable[[int], Policy]
"""Returns a rank's policy for one step."""


class Curve:
    """A count's changes by position, and the maximum of their running sum.

    When an action runs early, its change is removed, which shifts the curve after it. Removals and
    queries take O(log n), because every node in a tree stores the sum of the changes below it and
    the maximum (at least 0) of their running sum.
    """

    def __init__(self, changes: Sequence[float]) -> None:
        num_changes = len(changes)
        self._size = 1 << num_changes.bit_length()
        sums: list[float] = [0] * (2 * self._size)
        # Leaves start at `_size`. A node's children are 2 * node and 2 * node + 1.
        end = self._size + num_changes
        sums[self._size : end] = changes
        tops = [max(0, change) for change in sums]
        for node in range(self._size - 1, 0, -1):
            left = 2 * node
            right = left + 1
            sums[node] = sums[left] + sums[right]
            top_of_right = sums[left] + tops[right]
            tops[node] = max(tops[left], top_of_right)
        self._sum = sums
        self._top = tops

    def for_next_step(self) -> Curve:
        """Return a copy for another step."""
        curve = copy(self)
        curve._sum = list(self._sum)
        curve._top = list(self._top)
        return curve

    def take(self, position: int) -> float:
        """Remove the change at a position and return it."""
        node = position + self._size
        sums = self._sum
        tops = self._top
        change = sums[node]
        if not change:
            return 0
        sums[node] = tops[node] = 0
        while node > 1:
            node >>= 1
            # Update all ancestors. `max` would be slower, and this loop runs for every
            # chosen action.
            left = node << 1
            sums[node] = sums[left] + sums[left + 1]
            high = tops[left]
            low = sums[left] + tops[left + 1]
            tops[node] = high if high > low else low
        return change

    def top(self, end: int) -> float:
        """Return the maximum of the running sum before a position, but at least 0."""
        node = end + self._size
        top = 0.0
        sums = self._sum
        tops = self._top
        while node > 1:
            # On the way up, every left sibling covers changes before the position.
            if node & 1:
                top += sums[node - 1]
                if tops[node - 1] > top:
                    top = tops[node - 1]
            node >>= 1
        return top


class Hint(Policy):
    """Follows the static table's order, but runs later actions while the head waits.

    Args:
        schedule: The table.
        rank: Pipeline rank.
        cap: Maximum number of activations, counted separately per stage, that the rank may keep.
            Must be at least the table's peak on that rank.
        weights_fill: Whether W may leave its position in the table and run if no other action can.
        patience: See `patience.py`. If None, the policy never waits for the head.
        stash_ratio: Size of a weight stash in activations (`table/memory.py`), at least 1.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        cap: float,
        *,
        weights_fill: bool,
        patience: Patience | None = None,
        stash_ratio: float = 1.0,
    ) -> None:
        self._pairs = schedule.pairs_of(rank)
        has_pairs = bool(self._pairs)
        super().__init__(schedule, rank, pairs=has_pairs)
        self._changes = {
            "F": 1,
            "B": -1,
            # I replaces the activations with a weight stash, which may be larger.
            "I": stash_ratio - 1,
            "W": -stash_ratio,
        }
        self._sizes_of = schedule.sizes_of
        changes = list(map(self._change, self.progress.row))
        self._remaining = Curve(changes)
        self.cap = cap
        self.live: float = 0
        self.patience = patience
        self._head = 0
        self._weights_fill = weights_fill
        # Whether the last chosen action was launched when its input had been launched
        # but did not exist yet.
        self._follows = False

    def for_next_step(self) -> Hint:
        """Return a copy for another step. Call this only before the policy makes a choice."""
        policy = copy(self)
        # All other fields are numbers or constant during a step, so they can be shared.
        policy.progress = self.progress.for_next_step()
        policy._remaining = self._remaining.for_next_step()
        return policy

    def wait(self) -> float:
        """Return how long to wait for the head, or 0 if it can run or follow its input."""
        if self.patience is None:
            return 0.0
        self._advance()
        if not self.progress.num_left:
            return 0.0
        if not self._runs_head():
            return self.patience.waits[self._head]
        # The head could run alone, but a pair may save more time than waiting for the partner
        # costs.
        if not self._lacks_partner():
            return 0.0
        return self.patience.gains[self._head]

    def looks_ahead(self) -> bool:
        """Return whether the choice is already certain while the last action is still running."""
        self._advance()
        if not self.progress.num_left:
            return False
        # A device runs behind its host, so the host may launch an action while the last
        # one is still running. However, an input that arrives before the last action
        # ends may allow a better choice. Only two choices are therefore certain: the
        # head, and an action that follows its launched input.
        if self._runs_head():
            return not self._lacks_partner()
        if self.patience is not None:
            return False
        if self._first() is None:
            return self._follower() is not None
        return not self.progress.expects()

    def choose(self) -> int | None:
        """Choose the first action that is ready and admissible, or one that follows its input."""
        self._advance()
        heap = self._first()
        self._follows = heap is None
        if heap is not None:
            index: int | None = heapq.heappop(heap)
        else:
            index = self._follower()
            if index is not None:
                self.progress.follow(index)
        if index is not None:
            self.live += self._remaining.take(index)
        return index

    def with_partner(self, index: int) -> tuple[int, ...]:
        """Return the chosen action and, unless it follows its input, its partner."""
        positions: tuple[int, ...] = (index,)
        if not self._follows:
            positions = super().with_partner(index)
        # The chosen action's change has already been removed, so `take` returns 0 for
        # that action.
        changes = map(self._remaining.take, positions)
        self.live += sum(changes)
        return positions

    def _partners(self, index: int) -> list[int] | None:
        """Return the heap whose first action may be this action's partner, or None."""
        partners = super()._partners(index)
        if partners is None:
            return None
        partner = partners[0]
        if not self._is_admissible(partner):
            return None
        # In a pair, the forward pass allocates its activations before the backward pass frees any.
        row = self.progress.row
        change = self._change(row[index])
        partner_change = self._change(row[partner])
        peak = self.live - change + partner_change
        if peak > self.cap:
            return None
        return partners

    def _lacks_partner(self) -> bool:
        """Return whether the head has a partner in the table but no partner is ready."""
        head = self._head
        if head not in self._pairs:
            return False
        partner_in_table = head + 1
        if self.progress.done[partner_in_table]:
            return False
        return not self._partners(head)

    def _change(self, action: Action) -> float:
        sizes = self._sizes_of(action.microbatch)
        return self._changes[action.kind] * sizes[action.slice]

    def _runs_head(self) -> bool:
        """Return whether the head is ready, or can follow its input when nothing is ready."""
        if self.progress.is_ready(self._head):
            return True
        can_follow = self._follower() == self._head
        return can_follow and self._first() is None

    def _follower(self) -> int | None:
        """Return an admissible action whose missing inputs have all been launched."""
        # Once the sender has launched an action's input, the action can be launched
        # right behind it, which hides the launch time while the pipeline fills and
        # drains. Following is safe for the head, and for another action if the head
        # waits for the same sender, because that device computes the head's input later
        # anyway. Following cannot cause a deadlock: an action follows only actions that
        # were launched before it, and devices run actions in launch order.
        index = self.progress.follower(self._head)
        if index is None or not self._is_admissible(index):
            return None
        return index

    def _advance(self) -> None:
        done = self.progress.done
        while self._head < len(done) and done[self._head]:
            self._head += 1

    def _first(self) -> list[int] | None:
        """Return the heap whose first action should run, or None if none is admissible."""
        progress = self.progress
        best = progress.backwards
        weights = progress.weights
        forwards = progress.forwards
        if best and not self._is_admissible(best[0]):
            best = []
        # If a B was split, its W has no position in the table, so it runs when nothing
        # else can.
        if weights and not self._weights_fill:
            is_earlier = not best or weights[0] < best[0]
            if is_earlier:
                best = weights
        # Forward passes come last, because they always require querying the curve.
        if forwards:
            is_earlier = not best or forwards[0] < best[0]
            if is_earlier and self._is_admissible(forwards[0]):
                best = forwards
        return best or weights or None

    def _is_admissible(self, index: int) -> bool:
        """Return whether running an action now keeps the curve within the cap.

        The curve does not change after the action's position, so if the first ready forward pass
        does not fit, no later one does.
        """
        # The head is always admissible, so every step completes. To see this, consider
        # the first unfinished action in a global order that respects data dependencies
        # and the table. Everything before it has run, so it is its rank's head, and its
        # input exists.
        action = self.progress.row[index]
        change = self._change(action)
        if change <= 0 or index == self._head:
            return True
        peak = self.live + self._remaining.top(index) + change
        return peak <= self.cap


class Greedy(Policy):
    """Alternates between forward and backward passes and runs W if neither can run.

    A rank may keep up to m activations. The preferences are fixed, and the table's order has no
    effect.

    Args:
        schedule: The table.
        rank: Pipeline rank.
        depth_first: Whether to prefer forward passes on the deepest chunk over those on the first
            chunk.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        *,
        depth_first: bool,
    ) -> None:

        def preference(action: Action) -> tuple[int, tuple[int, int]]:
            # Backward passes traverse the chunks in reverse, so reverse their preference.
            forward = action.kind == "F"
            depth = action.stage
            if forward == depth_first:
                depth = -action.stage
            return depth, action.turn

        # `Progress` offers the first ready action by position, so sort the row by preference.
        preferred_row = sorted(schedule.rows[rank], key=preference)
        rows = list(schedule.rows)
        rows[rank] = tuple(preferred_row)
        table = replace(schedule, rows=tuple(rows), pairs=())
        has_pairs = bool(schedule.pairs)
        super().__init__(table, rank, pairs=has_pairs)
        self._backward_next = True

    def looks_ahead(self) -> bool:
        """Return whether an action in the opposite direction of the last one is ready."""
        progress = self.progress
        if self._backward_next:
            return bool(progress.backwards)
        return bool(progress.forwards)

    def choose(self) -> int | None:
        """Choose an action in the opposite direction of the last one, if one is ready."""
        progress = self.progress
        turns = [progress.backwards, progress.forwards]
        if not self._backward_next:
            turns.reverse()
        for heap in (*turns, progress.weights):
            if heap:
                self._backward_next = heap is not progress.backwards
                return heapq.heappop(heap)
        return None


def activation_cap(
    schedule: Schedule,
    extra_activations: int = 0,
    stash_ratio: float = 1.0,
) -> float:
    """Return the cap that `hint` uses on all ranks: a number of activations, counted per stage.

    Args:
        schedule: The table.
        extra_activations: Number of micro-batches allowed beyond the table's peak. Each counts once
            for every stage on a rank.
        stash_ratio: Size of a weight stash, in activations.
    """
    # A separate cap per rank would not help: all devices have the same memory, so the
    # rank with the highest peak determines how much the job needs. Besides, the last
    # ranks in 1F1B and interleaved tables keep far fewer activations than the first
    # ranks, so separate caps would never let them run ahead.
    peaks = []
    for row in schedule.rows:
        peaks.append(peak_of_row(row, schedule, stash_ratio))
    stages_per_rank = max(map(len, schedule.placement.stages_of))
    return max(peaks) + extra_activations * stages_per_rank


_MAX_SLOTS = 1024  # an arena's limit (csrc/core/arena.h)


def arena_slots(
    table: Schedule,
    extra_activations: int | None = None,
    stash_ratio: float = 1.0,
) -> int:
    """Return the number of slots for two ranks: twice the peak of messages in flight between them.

    The peak covers both directions. The second half of the slots is for messages that have arrived
    but have not been consumed. The result does not exceed the arena's limit.

    `extra_activations` is the allowance for a dynamic order, or None for the static order. Every
    edge gets slots for the activations that a policy may keep beyond the table's peak. A greedy
    policy may keep all activations, so it may need more slots. Messages without a slot wait in the
    sender's memory.
    """
    extra_slots = 0
    if extra_activations is not None:
        cap = activation_cap(table, extra_activations, stash_ratio)
        peaks = [most_alive(row, slices=table.slices) for row in table.rows]
        beyond_peak = cap - min(peaks)
        extra_slots = math.ceil(beyond_peak / min(table.slices))
    report = validate(table)
    slots_by_ranks: dict[frozenset[int], int] = defaultdict(int)
    for (source, target, _), slots in report.slots.items():
        ranks = frozenset((source, target))
        slots_by_ranks[ranks] += slots + extra_slots
    peak = max(slots_by_ranks.values(), default=1)
    num_slots = max(2, 2 * peak)
    return min(num_slots, _MAX_SLOTS)
