"""Tables with pairs: one micro-batch's forward pass and another's backward pass as one action.

In a model with experts, ranks exchange tokens twice per layer (all-to-all), in both the forward and
the backward pass, and wait for every exchange. In a pair, one of the two actions computes while the
other communicates (DeepSeek-V3, 2024, arXiv 2412.19437).

Most tables already alternate between F and B, but each B depends on the F before it. On the last
stage, for example, both belong to the same micro-batch. This module moves every forward pass ahead
of `lead` more backward passes to create independent partners.

    1f1b, last ranks                 with pairs
    2|F0 F1 B0 F2 B1 F3 B2 ...       F0 F1 F2 (F3 B0) (F4 B1) ...
    3|F0 B0 F1 B1 F2 B2 F3 ...       F0 (F1 B0) (F2 B1) (F3 B2) ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import Clock, fastest
from megatron_ext.schedules.table.costs import UNIT, Costs, exchanging
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.table_change import TableChange
from megatron_ext.schedules.table.transforms import ahead
from megatron_ext.schedules.table.walk import stuck

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Option, Row, Schedule

# The number of micro-batches by which a newly placed order may run ahead of its table.
# The number may grow if no order completes with it.
_MAX_LEAD = 3


class PairChange(TableChange):
    """Implements the `pairs` option of `generate`."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._is_on = bool(options.get("pairs", False))

    def of_file(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the table with pairs. A table that already has pairs is returned unchanged."""
        if not self._is_on:
            return schedule
        return paired(schedule, costs)

    def costs(self, costs: Costs) -> Costs:
        """Return costs with all-to-all, because the search must know that F and I wait for it."""
        if not self._is_on:
            return costs
        return exchanging(costs)

    def change(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        alternates: bool,
    ) -> Schedule:
        """Return the table with pairs. Its order is kept if the generator made it for pairs."""
        if not self._is_on:
            return schedule
        if alternates:
            return marked_pairs(schedule)
        return paired(schedule, costs)

    def flags(self, schedule: Schedule) -> list[str]:
        """Return Megatron's flag that requests pairs."""
        return ["--overlap-moe-expert-parallel-comm"] if schedule.pairs else []


def marked_pairs(schedule: Schedule) -> Schedule:
    """Return a table that pairs each F with another micro-batch's backward pass right after it.

    The order does not change, so this is useful on its own only for tables made for pairs, such as
    DualPipe's. If pairs would make ranks wait for each other, a forward pass whose input has
    arrived runs alone.
    """
    # [rank] -> positions in its row at which a pair starts
    pairs: list[set[int]] = []
    for row in schedule.rows:
        begins: set[int] = set()
        for index, (first, second) in enumerate(pairwise(row)):
            is_backward_next = first.kind == "F" and second.kind in ("B", "I")
            if is_backward_next and first.microbatch != second.microbatch:
                begins.add(index)
        pairs.append(begins)
    while True:
        table = _with_pairs(schedule, schedule.rows, pairs)
        # A backward pass whose input is missing blocks its pair, so let the forward
        # pass before it run alone.
        alone = []
        for rank, backward_index in stuck(table).items():
            forward_index = backward_index - 1
            if forward_index in pairs[rank]:
                alone.append((rank, forward_index))
        if not alone:
            return table
        for rank, forward_index in alone:
            pairs[rank].remove(forward_index)


def paired(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """Return a table with pairs and more micro-batches in its warm-up.

    The result is the candidate with the shortest step. Ties go to the candidate that uses the least
    memory. Gradients are summed in the order of the resulting table.

    A table that already has pairs is returned unchanged. Jitter in the costs is ignored.

    Raises:
        ScheduleError: Forward and backward passes are on different ranks, or the table has slices.
    """
    if schedule.num_slices > 1:
        raise ScheduleError(
            f"{schedule.label}: slices cannot run as pairs; disable pairs"
        )
    if schedule.pairs:
        return schedule
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} runs forward and backward passes on different ranks, so no rank can "
            "pair them; disable pairs"
        )
    # The choice of an order must not depend on random times.
    costs = replace(
        exchanging(costs),
        jitter=0.0,
        link_jitter=0.0,
        launch=0.0,
    )
    candidates = _moved_tables(schedule)
    most_pairs = 0
    for table in candidates:
        num_pairs = sum(map(len, table.pairs))
        most_pairs = max(most_pairs, num_pairs)
    if most_pairs < _pairs_of_regular_rows(schedule):
        # Tables from a search (v-half, bitpipe) have no regular steady phase. Place
        # their actions again in simulated time, so that an idle rank runs a pair
        # whenever it can.
        candidates += _placed_tables(schedule, costs, has_fallback=bool(candidates))
    return fastest(candidates, costs)


def _moved_tables(schedule: Schedule) -> list[Schedule]:
    """Return tables with pairs and earlier forward passes, excluding those that would deadlock."""
    # In 1F1B, the warm-ups of neighbouring ranks differ by one micro-batch. As a
    # result, their pairs take turns waiting for each other, and a micro-batch takes as
    # long as two pairs. A lead that grows by one from rank to rank keeps all ranks
    # busy. In interleaved and V-shaped tables, neighbours' warm-ups already differ by
    # two, so a lead of one is enough.
    num_ranks = len(schedule.rows)
    equal = [1] * num_ranks
    growing = [num_ranks - rank for rank in range(num_ranks)]
    tables = []
    for leads in (equal, growing):
        rows = []
        for row, lead in zip(schedule.rows, leads, strict=True):
            rows.append(ahead(row, lead))
        moved_table = replace(schedule, rows=tuple(rows))
        if not stuck(moved_table):
            tables.append(marked_pairs(moved_table))
    return tables


def _pairs_of_regular_rows(schedule: Schedule) -> int:
    """Return the number of pairs in regular rows with one more forward pass per warm-up."""
    num_pairs = 0
    for row in schedule.rows:
        num_forwards = sum(action.kind == "F" for action in row)
        warm_up = _warm_up(row) + 1
        num_pairs += max(0, num_forwards - warm_up)
    return num_pairs


def _placed_tables(
    schedule: Schedule,
    costs: Costs,
    *,
    has_fallback: bool,
) -> list[Schedule]:
    """Return tables with newly placed actions, at least one unless there is a fallback."""
    # action -> the actions that need its result
    feeds: dict[Action, list[_Fed]] = {}
    for row in schedule.rows:
        for action in row:
            feeds[action] = []
            for target in schedule.feeds(action):
                travels = schedule.travels(action, target)
                feeds[action].append(_Fed(target, travels))
    warm_ups = [_warm_up(row) for row in schedule.rows]
    num_ranks = len(schedule.rows)
    equal = [0] * num_ranks
    growing = [num_ranks - 1 - rank for rank in range(num_ranks)]
    tables: list[Schedule] = []
    for lead in count():
        # With a small lead, forward passes may fill all memory before a backward pass
        # can run. Some order completes with a larger lead, so keep going until one is
        # found.
        if lead > _MAX_LEAD and (tables or has_fallback):
            return tables
        for extra_leads in (equal, growing):
            leads = [
                warm_up + extra + lead
                for warm_up, extra in zip(warm_ups, extra_leads, strict=True)
            ]
            for waits in (True, False):
                placing = _Placing(
                    schedule,
                    costs,
                    feeds,
                    leads,
                    extra_activations=2 * lead + max(extra_leads),
                    waits=waits,
                )
                table = placing.table()
                if table is not None:
                    tables.append(table)
    raise AssertionError("unreachable: the leads are unlimited")


def _with_pairs(
    schedule: Schedule,
    rows: tuple[Row, ...],
    pairs: list[set[int]],
) -> Schedule:
    options = dict(schedule.options)
    # The dualpipe-v table without pairs has this option, set to False.
    options.pop("overlap", None)
    options["pairs"] = True
    begins: tuple[frozenset[int], ...] = ()
    if any(pairs):
        begins = tuple(map(frozenset, pairs))
    return replace(
        schedule,
        rows=rows,
        pairs=begins,
        options=options,
    )


def _warm_up(row: Row) -> int:
    """Return the number of forward passes before a row's first action of another kind."""
    for index, action in enumerate(row):
        if action.kind != "F":
            return index
    return len(row)


class _Fed(NamedTuple):
    """An action that needs another action's result."""

    action: Action
    travels: bool
    """Whether the result is sent to another stage or rank."""


# Kind of action -> change in the number of live activations, with every stage and
# micro-batch counted separately.
_LIVE_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}


_Event = tuple[float, int, "Action | tuple[()]"]
"""(time, rank, action whose input arrives, if any): an event after which the rank may run more
actions."""


_Queues = dict[tuple[int, bool], list["Action"]]
"""(stage, is forward) -> actions that have not run. The next one to run is last in the list."""


class _Placing:
    """Places a table's actions anew in simulated time.

    Args:
        schedule: The table.
        costs: Durations and latencies for the simulation.
        feeds: Action -> the actions that need its result.
        leads: [rank] -> how many forward passes the rank may be ahead of its backward passes,
            outside pairs.
        extra_activations: How many activations, counted separately for each stage, a rank may keep
            beyond the table's peak.
        waits: Whether a backward pass waits for a partner.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        feeds: dict[Action, list[_Fed]],
        leads: list[int],
        extra_activations: int,
        *,
        waits: bool,
    ) -> None:
        self._schedule = schedule
        self._leads = leads
        self._waits = waits
        self._feeds = feeds
        # Action -> number of inputs that have not arrived yet.
        self._missing: Counter[Action] = Counter()
        for targets in feeds.values():
            self._missing.update(fed.action for fed in targets)
        self._clock = Clock(schedule, costs)
        peak_activations = max(map(most_alive, schedule.rows))
        self._cap = extra_activations + peak_activations
        ranks = range(len(schedule.rows))
        # [rank] -> its queues.
        self._queues: list[_Queues] = [{} for _ in ranks]
        for rank, row in enumerate(schedule.rows):
            for action in reversed(row):
                if action.kind == "W":
                    continue
                is_forward = action.kind == "F"
                key = (action.stage, is_forward)
                queue = self._queues[rank].setdefault(key, [])
                queue.append(action)
        # [rank] -> W that may run, oldest first.
        self._weights: list[list[Action]] = [[] for _ in ranks]
        # [rank] -> actions in their new order, and the positions where pairs start.
        self._rows: list[list[Action]] = [[] for _ in ranks]
        self._pairs: list[set[int]] = [set() for _ in ranks]
        # [rank] -> forward passes run minus backward passes run, and the number of live
        # activations.
        self._ahead = [0 for _ in ranks]
        self._live = [0 for _ in ranks]
        # [rank] -> time at which it becomes idle again.
        self._free = [0.0 for _ in ranks]
        # The heap compares events at equal times, and an empty tuple sorts before any action.
        self._events: list[_Event] = [(0.0, rank, ()) for rank in ranks]

    def table(self) -> Schedule | None:
        """Place all actions. Return None if forward passes fill all memory first."""
        now = 0.0
        while True:
            while self._events:
                now, rank, supplied = heappop(self._events)
                if supplied:
                    self._missing[supplied] -= 1
                # Process everything that arrives at this rank at this time first: a
                # later arrival may allow a pair.
                if self._events:
                    next_time, next_rank, _ = self._events[0]
                    if next_time == now and next_rank == rank:
                        continue
                if self._free[rank] <= now:
                    actions = self._chosen(rank)
                    self._run(rank, actions, now)
            if not self._run_alone(now):
                break
        rows = tuple(map(tuple, self._rows))
        num_placed = sum(map(len, rows))
        if num_placed < len(self._feeds):
            return None
        return _with_pairs(self._schedule, rows, self._pairs)

    def _run_alone(self, now: float) -> bool:
        """Run one action alone when all ranks wait for a partner; return whether one could run."""
        for rank in range(len(self._rows)):
            actions = self._chosen(rank, alone=True)
            if actions:
                start = max(now, self._free[rank])
                self._run(rank, actions, start)
                return True
        return False

    def _chosen(self, rank: int, *, alone: bool = False) -> tuple[Action, ...]:
        """Return the actions that a rank runs next: a pair, a single action, or nothing."""
        forwards, backwards = self._ready(rank)
        # In order of preference: a pair of different micro-batches, a backward pass
        # that need not wait for a partner, a forward pass within the lead, a W, and
        # then an action that could have waited.
        for backward in backwards:
            for forward in forwards:
                if forward.microbatch != backward.microbatch:
                    return forward, backward
        if backwards and not self._awaits_partner(rank, has_forward=bool(forwards)):
            return (backwards[0],)
        if forwards and self._ahead[rank] < self._leads[rank]:
            return (forwards[0],)
        if self._weights[rank]:
            return (self._weights[rank].pop(0),)
        if backwards and (alone or not self._waits):
            return (backwards[0],)
        if forwards and alone:
            return (forwards[0],)
        return ()

    def _ready(self, rank: int) -> tuple[list[Action], list[Action]]:
        """Return the forward and backward passes that can run now, in order of preference."""
        forwards: list[Action] = []
        backwards: list[Action] = []
        has_room = self._live[rank] < self._cap
        for queue in self._queues[rank].values():
            if not queue:
                continue
            action = queue[-1]
            if self._missing[action]:
                continue
            if action.kind != "F":
                backwards.append(action)
            elif has_room:
                forwards.append(action)
        # Prefer the deepest forward pass: it is closest to its backward pass, which frees memory.
        forwards.sort(key=lambda action: -action.stage)
        backwards.sort()
        return forwards, backwards

    def _awaits_partner(self, rank: int, *, has_forward: bool) -> bool:
        """Return whether a backward pass that can run should wait for a partner."""
        queues = self._queues[rank].values()
        has_partners = any(queue and queue[-1].kind == "F" for queue in queues)
        return has_partners and (self._waits or has_forward)

    def _run(self, rank: int, actions: tuple[Action, ...], now: float) -> None:
        """Run an action or a pair and supply its results to the actions that need them."""
        if not actions:
            return
        row = self._rows[rank]
        if len(actions) == 2:
            self._pairs[rank].add(len(row))
        end = self._clock.run(rank, now, *actions)
        self._free[rank] = end
        heappush(self._events, (end, rank, ()))
        for action in actions:
            row.append(action)
            self._live[rank] += _LIVE_CHANGE[action.kind]
            if action.kind == "W":
                continue
            is_forward = action.kind == "F"
            queue = self._queues[rank][action.stage, is_forward]
            queue.pop()
            if is_forward:
                self._ahead[rank] += 1
            else:
                self._ahead[rank] -= 1
            self._supply(rank, action, end)

    def _supply(self, rank: int, action: Action, end: float) -> None:
        """Queue events for the arrival of an action's results at the actions that need them."""
        rank_of = self._schedule.placement.rank_of
        arrivals = iter(self._clock.arrivals(action, end))
        for target, travels in self._feeds[action]:
            # W needs only the I on the same rank and may run at any later time.
            if target.kind == "W":
                self._weights[rank].append(target)
                continue
            arrival = end
            if travels:
                arrival = next(arrivals)
            target_rank = rank_of[target.stage]
            heappush(self._events, (arrival, target_rank, target))
