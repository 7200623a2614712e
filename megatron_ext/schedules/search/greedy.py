"""A greedy list scheduler for split backward passes with a cap on activations.

The scheduler fills the timeline from the start. An idle rank starts the highest-priority action
whose inputs have arrived. I takes precedence over F, and F over W, so W fills gaps and otherwise
runs only if the cap allows nothing else.

If the cap admits most but not all of a step's micro-batches, this order delays the last few until
no I remains, which leaves a gap at the end. For this case, `Variant.forwards_first` runs F before
I. If the cap forbids an F, that variant first runs the W that makes room for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.actions import Action, Schedule
from megatron_ext.schedules.table.costs import UNIT

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Kind, Link, SliceSizes
    from megatron_ext.schedules.table.costs import Costs
    from megatron_ext.schedules.table.placement import Placement

Rows = tuple[tuple[Action, ...], ...]
Key = tuple[int, int, int, int]

# Maximum number of actions that a search places while comparing variants. A search of
# this size takes about 20 seconds.
_MAX_PLACED = 2_000_000
# For long tables, a search compares limits on a short table with this many
# micro-batches per rank.
_PILOT_ROUNDS = 4


def _priority(action: Action) -> Key:
    """Return a sort key: backward passes first, then F from deep to shallow stages, then W."""
    stage, kind, microbatch, slice_index = action
    # The deepest forward pass is the closest to its backward pass, which frees memory.
    if kind == "F":
        return 1, -stage, microbatch, slice_index
    # Backward passes of slices run in reverse order.
    if kind == "W":
        return 2, stage, microbatch, -slice_index
    return 0, stage, microbatch, -slice_index


# Ticks per unit of time. Times are integers so that sums are exact.
_TICKS = 10**6


@dataclass(frozen=True)
class Problem:
    """A scheduling problem. Assumes that all stages are the same size, and ignores jitter."""

    placement: Placement
    num_microbatches: int
    cap: float
    """Maximum number of live activations on a rank, counted separately per stage and
    micro-batch."""
    costs: Costs
    slices: tuple[float, ...] = (1.0,)
    """Each slice's share of a micro-batch (`Schedule.slices`)."""
    backwards: tuple[Kind, ...] = ("I", "W")
    """The kinds of actions that make up a backward pass. Empty for evaluation."""
    slice_sizes: SliceSizes = ()
    """Slice sizes by micro-batch, if they differ (`Schedule.slice_sizes`)."""

    @property
    def num_passes(self) -> int:
        """How many times a stage runs F in a step: once per slice of each micro-batch."""
        num_listed = sum(map(len, self.slice_sizes))
        return num_listed or self.num_microbatches * len(self.slices)

    def sizes_of(self, microbatch: int) -> tuple[float, ...]:
        """Return the sizes of the slices in a micro-batch."""
        if self.slice_sizes:
            return self.slice_sizes[microbatch]
        return self.slices

    def durations_of(self, microbatch: int) -> dict[Kind, list[int]]:
        """Return how many ticks every kind of action takes on one stage, by slice."""
        # Costs apply to 1/pp of the model. A stage is num_ranks * twins / num_stages of
        # that.
        placement = self.placement
        share = placement.num_ranks * placement.twins / placement.num_stages
        sizes = self.sizes_of(microbatch)
        factors = self.costs.factors_of(microbatch, sizes)
        times: dict[Kind, float] = {
            "F": self.costs.forward,
            "B": self.costs.backward,
            "I": self.costs.input,
            "W": self.costs.weight,
        }
        ticks: dict[Kind, list[int]] = {}
        for kind, time in times.items():
            stage_time = time * share
            ticks[kind] = []
            for factor in factors[kind]:
                slice_ticks = round(stage_time * factor * _TICKS)
                ticks[kind].append(slice_ticks)
        return ticks

    @property
    def delays(self) -> list[int]:
        """Latencies between adjacent stages in ticks, indexed by the lower stage."""
        latency = round(self.costs.latency * _TICKS)
        delays = []
        for hop in self.placement.hops:
            delays.append(0 if hop == "local" else latency)
        return delays

    @property
    def bound(self) -> int:
        """A lower bound on the makespan: the last rank's start time plus all of its work."""
        num_ranks = self.placement.num_ranks
        # The first micro-batch passes through one stage on every rank before the last.
        num_above = num_ranks - 1
        forward = self.durations_of(0)["F"][0]
        delays = self.delays[:num_above]
        start = forward * num_above + sum(delays)
        # All micro-batches take the same time, unless their slices differ.
        repeats = 1 if self.slice_sizes else self.num_microbatches
        num_different = len(self.slice_sizes) or 1
        kinds = ("F", *self.backwards)
        work = 0
        for microbatch in range(num_different):
            durations = self.durations_of(microbatch)
            for kind in kinds:
                work += sum(durations[kind])
        last_rank_stages = self.placement.stages_of[-1]
        return start + repeats * work * len(last_rank_stages)


class Variant(NamedTuple):
    """Parameters for one greedy run."""

    limit: int | None = None
    """Maximum number of slices (or whole micro-batches) that may be between their first F and last
    I or B at the same time. None means no limit."""
    forwards_first: bool = False
    """Whether F runs before I. If so, W runs as soon as the cap is reached and an F needs the
    room."""


def search(problem: Problem, variants: Sequence[Variant]) -> Rows:
    """Return the shortest table that the greedy scheduler finds.

    The search stops at the first variant that reaches the lower bound.

    Raises:
        ScheduleError: The cap is too low for any table.
    """
    num_ranks = problem.placement.num_ranks
    rounds = problem.num_microbatches // num_ranks
    surplus = max(0, rounds - _PILOT_ROUNDS) * num_ranks
    best = None
    # If the micro-batches differ from each other, no shorter table can represent the
    # long one.
    if surplus and not problem.slice_sizes:
        # Compare the variants on a short table, because comparing them on the long one
        # would take too long. The pipeline reaches its steady state early, so both
        # tables have the same best limit.
        num_in_pilot = problem.num_microbatches - surplus
        pilot = replace(problem, num_microbatches=num_in_pilot)
        best_of_pilot = _best(pilot, variants)
        if best_of_pilot is not None:
            best = _best(problem, [best_of_pilot.variant])
    if best is None:
        best = _best(problem, variants)
    if best is None:
        raise ScheduleError(
            f"no order of {problem.num_microbatches} micro-batches keeps at most {problem.cap} "
            f"activations, counted per stage, on each of {num_ranks} ranks; allow more"
        )
    return tuple(map(tuple, best.rows))


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Return the evaluation table: one F per stage and micro-batch, in ascending order.

    The table depends only on the placement, so it exists for any number of micro-batches, even if
    the training schedule restricts that number. A rank always runs the deepest stage whose input
    has arrived, so micro-batches in flight finish first and few activations are alive.
    """
    problem = Problem(
        placement,
        num_microbatches,
        cap=math.inf,
        costs=UNIT,
        backwards=(),
    )
    rows = search(problem, [Variant()])
    return Schedule("forward-only", placement, num_microbatches, rows)


def slots_for_forward(schedule: Schedule) -> int:
    """Return how many slots per edge (at least 2) a forward-only table needs to complete.

    During training, the number of activations that ranks keep limits the messages in flight.
    Evaluation keeps no activations, so senders wait for receivers instead. With as many slots as
    the simulated run uses, no run deadlocks.
    """
    # By stage: the link to the rank that receives its output, or None if the output
    # stays on its rank.
    link_of: list[Link | None] = []
    for outputs in schedule.links["F"]:
        link = outputs[0].link if outputs else None
        link_of.append(link)
    # At equal times, deep stages come first, because they free a slot before an earlier
    # stage fills it.
    completions: list[tuple[float, int]] = []
    for row, ends in zip(schedule.rows, simulate(schedule).ends, strict=True):
        for action, end in zip(row, ends, strict=True):
            completions.append((end, -action.stage))
    completions.sort()
    under_way: Counter[Link] = Counter()
    slots = 2
    for _, negative_stage in completions:
        stage = -negative_stage
        input_link = link_of[stage - 1] if stage else None
        output_link = link_of[stage]
        if input_link:
            under_way[input_link] -= 1
        if output_link:
            under_way[output_link] += 1
            slots = max(slots, under_way[output_link])
    return slots


def _best(
    problem: Problem,
    variants: Sequence[Variant],
) -> _Attempt | None:
    best: _Attempt | None = None
    forwards = problem.placement.num_stages * problem.num_passes
    # The variants differ in their limit on micro-batches in flight. There is no formula
    # for the best limit, so try several limits, but fewer for long tables, to bound the
    # search time. The factor of 3 accounts for the up to two backward actions per
    # forward pass.
    max_attempts = max(1, _MAX_PLACED // (3 * forwards))
    step = math.ceil(len(variants) / max_attempts)
    for variant in variants[::step]:
        attempt = _Attempt(problem, variant)
        if attempt.run() and (best is None or attempt.makespan < best.makespan):
            best = attempt
        # Stop if no table can be shorter.
        if best is not None and best.makespan <= problem.bound:
            break
    return best


def spread(first: int, last: int) -> list[int]:
    """Return the integers from first to last, or only about ten of them if there are many."""
    step = 1 + (last - first) // 12
    return list(range(first, last + 1, step))


Candidate = tuple[Key, Action]
"""(priority, action). The best candidate is at the top of its heap."""

Choice = tuple[int, Key, Action]
"""(time, priority, action). The time is the earliest start or, once the action has been chosen, the
actual start."""


@dataclass
class _Rank:
    """A rank's timeline so far and its candidates.

    Actions that became ready while the rank was busy wait in heaps sorted by priority. `future`
    holds the few actions that become ready after the rank is free again.
    """

    free: int = 0
    """The tick at which the rank may start its next action."""
    live: float = 0
    """Number of live activations on the rank, counted separately per stage and micro-batch."""
    future: list[Choice] = field(default_factory=list)
    inputs: list[Candidate] = field(default_factory=list)
    """B and I."""
    weights: list[Candidate] = field(default_factory=list)
    forwards: list[Candidate] = field(default_factory=list)
    entries: list[Candidate] = field(default_factory=list)
    """Forward passes on the first stage. The limit on micro-batches in flight may delay these."""
    choice: Choice | None = None

    def heap_of(self, action: Action) -> list[Candidate]:
        """Return the heap that an action waits in."""
        if action.kind == "F":
            return self.forwards if action.stage else self.entries
        if action.kind == "W":
            return self.weights
        return self.inputs

    def remove(self, choice: Choice) -> None:
        """Remove the chosen action from `future` or from the top of its heap."""
        if choice in self.future:
            self.future.remove(choice)
        else:
            _, _, action = choice
            heappop(self.heap_of(action))


class _Attempt:
    """One greedy run."""

    def __init__(self, problem: Problem, variant: Variant) -> None:
        self.variant = variant
        self._problem = problem
        microbatches = range(problem.num_microbatches)
        num_ranks = problem.placement.num_ranks
        # By micro-batch: the sizes of its slices.
        self._sizes = list(map(problem.sizes_of, microbatches))
        self._max_in_flight = problem.num_passes
        if variant.limit is not None:
            self._max_in_flight = variant.limit
        self._in_flight = 0
        # By micro-batch: how many ticks every kind of action takes, by slice.
        if problem.slice_sizes:
            self._durations = list(map(problem.durations_of, microbatches))
        else:
            durations = problem.durations_of(0)
            self._durations = [durations] * problem.num_microbatches
        self._delays = problem.delays
        self._ranks = [_Rank() for _ in range(num_ranks)]
        # Heap of (tick, rank): when a rank starts the action that it chose.
        self._starts: list[tuple[int, int]] = []
        self.rows: list[list[Action]] = [[] for _ in self._ranks]

    @property
    def makespan(self) -> int:
        """The tick at which the last action ends."""
        return max(rank.free for rank in self._ranks)

    def run(self) -> bool:
        """Place all actions. Return False if the cap makes this impossible."""
        problem = self._problem
        num_kinds = 1 + len(problem.backwards)
        num_forwards = problem.placement.num_stages * problem.num_passes
        first_rank = self._release(0, Action(0, "F", 0))
        self._choose(first_rank)
        for _ in range(num_kinds * num_forwards):
            while True:
                if not self._starts:
                    return False
                # Take the rank that can start first or, on ties, the lowest one.
                start, number = heappop(self._starts)
                rank = self._ranks[number]
                choice = rank.choice
                # If a rank has chosen again, its old entry is still in the heap.
                # Skipping old entries is cheaper than finding and removing them.
                if choice is not None and choice[0] == start:
                    break
            action = choice[2]
            rank.remove(choice)
            durations = self._durations[action.microbatch][action.kind]
            rank.free = start + durations[action.slice]
            self.rows[number].append(action)
            self._account(rank, action)
            self._follow(number, action)
            self._choose(number)
        return True

    def _account(self, rank: _Rank, action: Action) -> None:
        """Update the rank's number of live activations and the number of slices in flight."""
        stage, kind, microbatch, slice_index = action
        if kind == "F":
            rank.live += self._sizes[microbatch][slice_index]
            self._in_flight += stage == 0
        else:
            if kind in ("B", "W"):
                rank.live -= self._sizes[microbatch][slice_index]
            self._in_flight -= stage == 0 and kind != "W"

    def _follow(self, number: int, action: Action) -> None:
        """Release the actions that an action on a rank makes possible.

        The rules are the same as in `Schedule.feeds`. In a greedy run, a rank runs a stage's slices
        and micro-batches in order, so the last of an action's inputs to arrive releases it.
        """
        stage, kind, microbatch, slice_index = action
        if kind == "W":
            return
        now = self._ranks[number].free
        backwards = self._problem.backwards
        target = self._problem.placement.target(stage, kind)
        if target is not None:
            lower_stage = min(stage, target)
            arrival = now + self._delays[lower_stage]
            next_action = Action(target, kind, microbatch, slice_index)
            receiver = self._release(arrival, next_action)
            # This action's own rank makes its choice later, in `run`.
            if receiver != number and self._may_prefer(receiver, arrival):
                self._choose(receiver)
        # Slices reach the other stages in order, and their gradients come back in
        # reverse order.
        if kind == "F":
            is_last_slice = slice_index + 1 == len(self._sizes[microbatch])
            # The last stage starts a micro-batch's backward pass once all of the
            # micro-batch's forward slices have run.
            if target is None and is_last_slice and backwards:
                backward = Action(stage, backwards[0], microbatch, slice_index)
                self._release(now, backward)
            if stage == 0:
                self._enter(now, microbatch, slice_index)
            return
        if kind == "I":
            weight = Action(stage, "W", microbatch, slice_index)
            self._release(now, weight)
        last_stage = self._problem.placement.num_stages - 1
        if stage == last_stage and slice_index:
            previous_slice = Action(stage, kind, microbatch, slice_index - 1)
            self._release(now, previous_slice)

    def _enter(
        self,
        now: int,
        microbatch: int,
        slice_index: int,
    ) -> None:
        """Release the first stage's forward pass for the next slice or micro-batch."""
        slice_index += 1
        if slice_index == len(self._sizes[microbatch]):
            microbatch += 1
            slice_index = 0
        if microbatch < self._problem.num_microbatches:
            forward = Action(0, "F", microbatch, slice_index)
            self._release(now, forward)

    def _release(self, time: int, action: Action) -> int:
        """Make an action a candidate on its rank and return the rank."""
        number = self._problem.placement.rank_of[action.stage]
        choice = (time, _priority(action), action)
        self._ranks[number].future.append(choice)
        return number

    def _may_prefer(self, number: int, arrival: int) -> bool:
        """Return whether a rank may choose an action that becomes possible at `arrival`."""
        choice = self._ranks[number].choice
        # Other actions that the limit held back may have become possible again.
        if choice is None or self.variant.limit is not None:
            return True
        return arrival <= choice[0]

    def _choose(self, number: int) -> None:
        """Choose a rank's best next action and queue its start."""
        rank = self._ranks[number]
        # Move actions that have become ready into the heaps.
        still_future = []
        for choice in rank.future:
            time, priority, action = choice
            if time <= rank.free:
                heap = rank.heap_of(action)
                heappush(heap, (priority, action))
            else:
                still_future.append(choice)
        rank.future = still_future
        heaps = self._allowed(rank)
        first = None
        for heap in heaps:
            if not heap:
                continue
            if first is None or heap[0] < first:
                first = heap[0]
        if first is not None:
            rank.choice = (rank.free, *first)
        else:
            # Nothing is ready, so the rank waits until an action becomes ready. Compare
            # heaps by identity, because any two empty heaps are equal.
            allowed = []
            for choice in still_future:
                heap_of_choice = rank.heap_of(choice[2])
                if any(heap_of_choice is heap for heap in heaps):
                    allowed.append(choice)
            rank.choice = min(allowed, default=None)
        if rank.choice is not None:
            start = rank.choice[0]
            heappush(self._starts, (start, number))

    def _allowed(self, rank: _Rank) -> list[list[Candidate]]:
        """Return the heaps that may contain a rank's next action."""
        # With `forwards_first`, an F that fits takes precedence over all other
        # candidates. At the cap, W makes room.
        forwards = [rank.forwards]
        # Only the first stage starts micro-batches, so the limit does not delay forward
        # passes on other stages.
        if self._in_flight < self._max_in_flight:
            forwards.append(rank.entries)
        may_grow = rank.live < self._problem.cap
        if self.variant.forwards_first and any(forwards):
            if may_grow:
                return forwards
            if rank.weights:
                return [rank.weights]
        heaps = [rank.inputs, rank.weights]
        if may_grow:
            heaps += forwards
        return heaps
