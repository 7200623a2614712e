"""Routes in a table: who sends what to whom, in which order gradients add up, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from megatron_ext.errors import ScheduleError
from megatron_ext.features.trees.route_plan import (
    Route,
    RoutePlan,
    connect,
    plan_routes,
)
from megatron_ext.schedules import Schedule, generate
from megatron_ext.schedules.search.greedy import forward_only
from megatron_ext.schedules.search.queues import check_queues
from tests.schedules.message_ends import check_message_ends

from .routed import routed_schedules


def test_connect() -> None:
    routes = connect([["a"], ["b"], [], []], [[], ["a"], ["b", "a"], ["b"]])
    assert routes == (Route("a", 0, (1, 2)), Route("b", 1, (2, 3)))
    assert list(routes[0].links) == [(2, 1), (1, 0)]


@pytest.mark.parametrize(
    ("publishes", "takes", "says"),
    [
        ([["a"], ["a"]], [[], []], "stages 0 and 1 both publish the route 'a'"),
        ([["a", "a"], []], [[], ["a"]], "stages 0 and 0 both publish the route 'a'"),
        (
            [[], []],
            [[], ["a"]],
            "stage 1 takes the route 'a', which no stage publishes",
        ),
        (
            [[], ["a"]],
            [["a"], []],
            "stage 0 takes the route 'a', which stage 1 publishes",
        ),
        (
            [["a"], []],
            [[], []],
            "stage 0 publishes the route 'a', which no stage takes",
        ),
    ],
)
def test_routes_that_do_not_fit(
    publishes: list[list[str]], takes: list[list[str]], says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        connect(publishes, takes)


def _plan(name: str, pp: int, *routes: Route) -> RoutePlan:
    return plan_routes(routes, generate(name, pp, 8).placement)


def test_a_tensor_crosses_to_a_rank_once() -> None:
    # zb-v: stages 3 and 4 are on rank 3, 2 and 5 on rank 2, 0 and 7 on rank 0.
    plan = _plan("zb-v", 4, Route("a", 0, (2, 3, 4, 5, 7)))
    forwards = [(hop.stage, hop.taker, hop.names) for hop in plan.sent["P", 0]]
    assert forwards == [(0, 2, ("a",)), (0, 3, ("a",))]
    backwards = [
        (h.stage, h.taker) for s in (7, 5, 4, 3, 2) for h in plan.sent.get(("G", s), ())
    ]
    assert backwards == [(7, 5), (5, 4), (3, 2), (2, 0)]  # 4 and 3 are on one rank


def test_gradients_of_several_routes_share_a_message() -> None:
    plan = _plan("1f1b", 4, Route("a", 0, (2, 3)), Route("b", 1, (2, 3)))
    assert [hop.names for hop in plan.sent["G", 3]] == [("a", "b")]
    assert [(hop.taker, hop.names) for hop in plan.sent["G", 2]] == [
        (0, ("a",)),
        (1, ("b",)),
    ]


@given(table=routed_schedules())
def test_every_message_is_sent_and_received_once(table: Schedule) -> None:
    check_message_ends(table)


def test_the_digest_tells_routes_apart() -> None:
    table = generate("1f1b", 4, 8)
    digests = {table.digest}
    for route in (Route("a", 0, (2,)), Route("a", 0, (3,)), Route("b", 0, (2,))):
        bypasses = plan_routes((route,), table.placement).bypasses
        digests.add(replace(table, bypasses=bypasses).digest)
    assert len(digests) == 4


@given(routed_schedules())
def test_every_table_with_routes_ends_on_one_queue(schedule: Schedule) -> None:
    check_queues(schedule)
    check_queues(
        replace(forward_only(schedule.placement, 5), bypasses=schedule.bypasses)
    )
