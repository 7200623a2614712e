"""Routes in a table: who sends what to whom, in which order gradients add up, what is kept."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Schedule, generate
from megatron_ext.schedules.table.communication import exchanges
from megatron_ext.schedules.table.memory import slots_needed
from megatron_ext.schedules.table.route_plan import (
    Route,
    connect,
    plan_routes,
)

from ..strategies import routed_schedules


def test_connect() -> None:
    routes = connect([["a"], ["b"], [], []], [[], ["a"], ["b", "a"], ["b"]])
    assert routes == (Route("a", 0, (1, 2)), Route("b", 1, (2, 3)))
    assert list(routes[0].links) == [(2, 1), (1, 0)]


@pytest.mark.parametrize(
    ("publishes", "takes", "says"),
    [
        ([["a"], ["a"]], [[], []], "stages 0 and 1 both publish the route 'a'"),
        ([["a", "a"], []], [[], ["a"]], "stages 0 and 0 both publish the route 'a'"),
        ([[], []], [[], ["a"]], "stage 1 takes the route 'a', which no stage publishes"),
        ([[], ["a"]], [["a"], []], "stage 0 takes the route 'a', which stage 1 publishes"),
        ([["a"], []], [[], []], "stage 0 publishes the route 'a', which no stage takes"),
    ],
)
def test_routes_that_do_not_fit(
    publishes: list[list[str]], takes: list[list[str]], says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        connect(publishes, takes)


def _with_routes(name: str, pp: int, m: int, *routes: Route) -> Schedule:
    return replace(generate(name, pp, m), routes=routes)


def test_a_tensor_crosses_to_a_rank_once() -> None:
    # zb-v: stages 3 and 4 are on rank 3, 2 and 5 on rank 2, 0 and 7 on rank 0.
    table = _with_routes("zb-v", 4, 8, Route("a", 0, (2, 3, 4, 5, 7)))
    plan = plan_routes(table.routes, table.placement)
    forwards = [(hop.stage, hop.taker, hop.names) for hop in plan.sent["P", 0]]
    assert forwards == [(0, 2, ("a",)), (0, 3, ("a",))]
    backwards = [(h.stage, h.taker) for s in (7, 5, 4, 3, 2) for h in plan.sent.get(("G", s), ())]
    assert backwards == [(7, 5), (5, 4), (3, 2), (2, 0)]  # 4 and 3 are on one rank


def test_gradients_of_several_routes_share_a_message() -> None:
    table = _with_routes("1f1b", 4, 8, Route("a", 0, (2, 3)), Route("b", 1, (2, 3)))
    plan = plan_routes(table.routes, table.placement)
    assert [hop.names for hop in plan.sent["G", 3]] == [("a", "b")]
    assert [(hop.taker, hop.names) for hop in plan.sent["G", 2]] == [(0, ("a",)), (1, ("b",))]


@given(table=routed_schedules())
def test_every_message_is_sent_and_received_once(table: Schedule) -> None:
    ends: dict[str, list[Any]] = {"SEND": [], "RECV": []}
    for rank in range(len(table.rows)):
        for exchange in exchanges(table, rank):
            for transfer in (*exchange.inputs, *exchange.outputs):
                if transfer.verb != "LOCAL":
                    there = transfer.peer
                    pair = (rank, there) if transfer.verb == "SEND" else (there, rank)
                    ends[transfer.verb].append((*pair, transfer.to_twin, transfer.message))
    assert len(set(ends["SEND"])) == len(ends["SEND"]), "a name is unique for a pair of ranks"
    assert sorted(ends["SEND"]) == sorted(ends["RECV"])


@given(table=routed_schedules(), draw=st.randoms(use_true_random=False))
def test_no_timing_needs_more_slots(table: Schedule, draw: random.Random) -> None:
    """Ranks run in any order that their inputs allow; nobody gets stuck."""
    slots = slots_needed(table)
    rows = [exchanges(table, rank) for rank in range(len(table.rows))]
    position = [0] * len(rows)
    under_way: Counter[tuple[int, int, str]] = Counter()
    arrived: set[object] = set()
    left = list(range(len(rows)))
    order = draw.sample(left, len(left))  # one rank runs as far as it can, then the next
    while left:
        runnable = [r for r in order if r in left and _can_run(rows[r], position, r, arrived)]
        assert runnable, "routes add no cycle"
        rank = runnable[0] if draw.random() < 0.7 else draw.choice(runnable)
        exchange = rows[rank][position[rank]]
        for needed in exchange.inputs:
            if needed.verb == "RECV":
                under_way[needed.peer, rank, needed.message.kind] -= 1
        for made in exchange.outputs:
            arrived.add((made.peer if made.verb == "SEND" else rank, made.message))
            if made.verb == "SEND":
                edge = rank, made.peer, made.message.kind
                under_way[edge] += 1
                assert under_way[edge] <= slots[edge]
        position[rank] += 1
        left = [rank for rank in left if position[rank] < len(rows[rank])]


def _can_run(row: Any, position: list[int], rank: int, arrived: set[object]) -> bool:
    return all((rank, needed.message) in arrived for needed in row[position[rank]].inputs)


def test_the_digest_tells_routes_apart() -> None:
    one, other = (_with_routes("1f1b", 4, 8, Route("a", 0, (s,))) for s in (2, 3))
    assert len({one.digest, other.digest, generate("1f1b", 4, 8).digest}) == 3
