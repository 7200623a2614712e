"""Pairs: the forward of one micro-batch and the backward of another as one action of a rank.

The ranks of a model with experts exchange tokens twice in each layer (all-to-all), in the forward
and again in the backward, and wait for it. In a pair each of the two computes while the other
communicates (DeepSeek-V3, 2024, arXiv 2412.19437).

Most tables alternate F and B already, but their B is what the F before it has been waiting for: at
the last stage it is even of the same micro-batch. Here every forward moves ahead of `lead` more
backwards, so that partners exist.

    1f1b, last ranks                 with pairs
    2|F0 F1 B0 F2 B1 F3 B2 ...       F0 F1 F2 (F3 B0) (F4 B1) ...
    3|F0 B0 F1 B1 F2 B2 F3 ...       F0 (F1 B0) (F2 B1) (F3 B2) ...
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import Clock, fastest
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.transforms import ahead
from megatron_ext.schedules.table.walk import stuck

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Row, Schedule

# All-to-all over the computation beside it, where costs have none: the middle of the three that
# `benchmarks/expert_overlap.py` measures.
_USUAL = 0.6
# Micro-batches by which an order that is placed anew may be ahead of its table, unless none ends.
_MOST_LEAD = 3


def exchanging(costs: Costs) -> Costs:
    """Return costs with a share of all-to-all, the usual one if they have none.

    Equal times, the default, are those of computation: all-to-all makes forwards and input
    gradients longer than weight gradients. Others were measured with it.
    """
    if costs.all_to_all:
        return costs
    longer = 1 + _USUAL if costs.forward == costs.input == costs.weight else 1.0
    return replace(
        costs,
        forward=longer * costs.forward,
        input=longer * costs.input,
        all_to_all=_USUAL / (1 + _USUAL),
    )


def marked_pairs(schedule: Schedule) -> Schedule:
    """Return a table in which each F with the backward of another micro-batch behind it is a pair.

    The order stays, so this alone is for tables that are made for pairs, such as DualPipe's. Where
    ranks would wait for each other in pairs, a forward whose input is there runs alone.
    """
    pairs: list[set[int]] = []
    for row in schedule.rows:
        begins: set[int] = set()
        for index, (one, two) in enumerate(pairwise(row)):
            if one.kind == "F" and two.kind in ("B", "I") and one.microbatch != two.microbatch:
                begins.add(index)
        pairs.append(begins)
    while True:
        table = _with_pairs(schedule, schedule.rows, pairs)
        alone = [(rank, at - 1) for rank, at in stuck(table).items() if at - 1 in pairs[rank]]
        if not alone:
            return table
        for rank, index in alone:
            pairs[rank].remove(index)


def paired(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """Return a table with pairs, and more micro-batches in its warm-up.

    Gradients are added in the order of the table. Of the orders that are tried it is the one with
    the shortest step, and among equals the one with the least memory.

    A table with pairs is returned as it is. Costs count without their jitter.

    Raises:
        ScheduleError: Forwards and backwards are on different ranks, or of slices.
    """
    if schedule.num_slices > 1:
        raise ScheduleError(f"{schedule.label}: slices cannot run as pairs; leave pairs out")
    if schedule.pairs:
        return schedule
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} runs forwards and backwards on different ranks, so no rank can pair "
            "them; leave pairs out"
        )
    # Which order is best must not depend on luck.
    costs = replace(exchanging(costs), jitter=0.0, link_jitter=0.0, launch=0.0)
    last = len(schedule.rows) - 1
    graded = [last - rank for rank in range(last + 1)]
    found = []
    # Where neighbours differ by one micro-batch of warm-up, as in 1F1B, a pair would wait for its
    # neighbour's pair and that for this one's, two pairs for each micro-batch: a lead that grows by
    # one from rank to rank keeps all of them busy. Interleaved and V-shaped tables already differ
    # by two, and take a lead of one.
    for leads in ([1] * len(graded), [1 + more for more in graded]):
        rows = tuple(ahead(row, lead) for row, lead in zip(schedule.rows, leads, strict=True))
        moved = replace(schedule, rows=rows)
        if not stuck(moved):
            found.append(marked_pairs(moved))
    # What regular rows could pair if each had one more forward in its warm-up.
    most = sum(
        max(0, sum(action.kind == "F" for action in row) - _warm_up(row) - 1)
        for row in schedule.rows
    )
    # Tables from a search (v-half, bitpipe) have no such regular phase. Their actions are placed
    # anew, in simulated time: an idle rank runs a pair if it can.
    if max((sum(map(len, table.pairs)) for table in found), default=0) < most:
        feeds = {
            action: [(fed, schedule.travels(action, fed)) for fed in schedule.feeds(action)]
            for row in schedule.rows
            for action in row
        }
        warm_ups = [_warm_up(row) for row in schedule.rows]
        for lead in count():
            # Forwards may fill all memory before a backward can run; with enough of it some end.
            if lead > _MOST_LEAD and found:
                break
            for more in ([0] * len(graded), graded):
                leads = [sum(each) + lead for each in zip(warm_ups, more, strict=True)]
                for waits in (True, False):
                    extra = 2 * lead + max(more)
                    placing = _Placing(schedule, costs, feeds, leads, extra, waits=waits)
                    table = placing.table()
                    found += [table] if table is not None else []
    return fastest(found, costs)


def _with_pairs(schedule: Schedule, rows: tuple[Row, ...], pairs: list[set[int]]) -> Schedule:
    options = {key: value for key, value in schedule.options.items() if key != "overlap"}
    return replace(
        schedule,
        rows=rows,
        pairs=tuple(map(frozenset, pairs)) if any(pairs) else (),
        options={**options, "pairs": True},
    )


def _warm_up(row: Row) -> int:
    """Return the number of forwards before the first other action of a row."""
    return next((index for index, action in enumerate(row) if action.kind != "F"), len(row))


class _Placing:
    """The actions of a table, placed anew in simulated time.

    Outside of pairs, each rank may be ahead of its backwards by as many forwards as its lead, and
    exceed the table's peak by `extra` activations of one stage each; a backward waits for a partner
    if it `waits`.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        feeds: dict[Action, list[tuple[Action, bool]]],
        leads: list[int],
        extra: int,
        *,
        waits: bool,
    ) -> None:
        self._schedule, self._leads, self._waits = schedule, leads, waits
        self._feeds = feeds
        self._missing = Counter(fed for each in feeds.values() for fed, _ in each)
        self._clock = Clock(schedule, costs)
        ranks = range(len(schedule.rows))
        self._cap = extra + max(map(most_alive, schedule.rows))
        # By rank, stage and whether it is a forward: what has not run, the next one last.
        self._queues: list[dict[tuple[int, bool], list[Action]]] = [{} for _ in ranks]
        for rank, row in enumerate(schedule.rows):
            for action in reversed(row):
                if action.kind != "W":
                    key = action.stage, action.kind == "F"
                    self._queues[rank].setdefault(key, []).append(action)
        self._weights: list[list[Action]] = [[] for _ in ranks]
        self._rows: list[list[Action]] = [[] for _ in ranks]
        self._pairs: list[set[int]] = [set() for _ in ranks]
        self._ahead, self._live = [0 for _ in ranks], [0 for _ in ranks]
        self._free = [0.0 for _ in ranks]
        # (time, rank, what has one input more): the rank may choose.
        self._events: list[tuple[float, int, Action | tuple[()]]] = [(0.0, r, ()) for r in ranks]

    def table(self) -> Schedule | None:
        """Place everything; return None if forwards fill all memory before a backward can run."""
        now = 0.0
        while True:
            while self._events:
                now, rank, supplied = heappop(self._events)
                if supplied:
                    self._missing[supplied] -= 1
                # A rank that chose before the last of them would miss a pair that is possible.
                if self._events and self._events[0][:2] == (now, rank):
                    continue
                if self._free[rank] <= now:
                    self._run(rank, self._chosen(rank), now)
            # All ranks wait for a partner: one of them runs an action without.
            for rank in range(len(self._rows)):
                actions = self._chosen(rank, alone=True)
                if actions:
                    self._run(rank, actions, max(now, self._free[rank]))
                    break
            else:
                rows = tuple(map(tuple, self._rows))
                if sum(map(len, rows)) < len(self._feeds):
                    return None
                return _with_pairs(self._schedule, rows, self._pairs)

    def _chosen(self, rank: int, *, alone: bool = False) -> tuple[Action, ...]:
        """Return what a rank runs next: a pair, an action, or nothing."""
        heads = [queue[-1] for queue in self._queues[rank].values() if queue]
        ready = [action for action in heads if not self._missing[action]]
        room = self._live[rank] < self._cap
        # What is deepest frees memory first.
        forwards = sorted((a for a in ready if a.kind == "F" and room), key=lambda a: -a.stage)
        backwards = sorted(action for action in ready if action.kind != "F")
        for two in backwards:
            for one in forwards:
                if one.microbatch != two.microbatch:
                    return one, two
        has_partners = any(action.kind == "F" for action in heads)
        if backwards and not (has_partners and (self._waits or forwards)):
            return (backwards[0],)
        if forwards and self._ahead[rank] < self._leads[rank]:
            return (forwards[0],)
        if self._weights[rank]:
            return (self._weights[rank].pop(0),)
        if alone or not self._waits:
            return tuple((backwards or (forwards if alone else []))[:1])
        return ()

    def _run(self, rank: int, actions: tuple[Action, ...], now: float) -> None:
        if not actions:
            return
        if len(actions) == 2:
            self._pairs[rank].add(len(self._rows[rank]))
        self._free[rank] = end = self._clock.run(rank, now, *actions)
        heappush(self._events, (end, rank, ()))
        rank_of = self._schedule.placement.rank_of
        for action in actions:
            self._rows[rank].append(action)
            self._live[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            if action.kind == "W":
                continue
            self._queues[rank][action.stage, action.kind == "F"].pop()
            self._ahead[rank] += 1 if action.kind == "F" else -1
            arrivals = iter(self._clock.arrivals(action, end))
            for fed, travels in self._feeds[action]:
                if fed.kind == "W":
                    self._weights[rank].append(fed)
                else:
                    arrival = next(arrivals) if travels else end
                    heappush(self._events, (arrival, rank_of[fed.stage], fed))
