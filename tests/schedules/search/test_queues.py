"""Messages have one order: a rank that does one thing after the other never blocks another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules import Schedule, generate
from megatron_ext.schedules.search.greedy import forward_only
from megatron_ext.schedules.search.queues import (
    Meeting,
    MessageOrder,
    check_meetings,
    check_queues,
    programs,
)

from .. import reference
from ..strategies import bypassed_schedules, schedules


@given(schedules(largest=16))
def test_every_table_ends_on_one_queue(schedule: Schedule) -> None:
    check_queues(schedule)


@given(bypassed_schedules())
def test_every_table_with_bypasses_ends_on_one_queue(schedule: Schedule) -> None:
    check_queues(schedule)
    check_queues(
        replace(forward_only(schedule.placement, 5), bypasses=schedule.bypasses)
    )


@given(schedules(largest=12), st.integers(1, 12))
def test_every_evaluation_ends_on_one_queue(schedule: Schedule, count: int) -> None:
    check_queues(forward_only(schedule.placement, count))


@given(schedules(largest=6), st.data())
def test_every_correct_order_of_actions_ends_on_one_queue(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Tables of files may run in any order."""
    rows = list(schedule.rows)
    for _ in range(data.draw(st.integers(1, 8))):
        rank = data.draw(st.integers(0, len(rows) - 1))
        row = list(rows[rank])
        places = st.integers(0, len(row) - 1)
        row.insert(data.draw(places), row.pop(data.draw(places)))
        moved = [*rows[:rank], tuple(row), *rows[rank + 1 :]]
        if reference.is_correct(replace(schedule, rows=tuple(moved))):
            rows = moved
    check_queues(replace(schedule, rows=tuple(rows)))


@given(schedules(largest=10) | bypassed_schedules())
def test_both_ends_of_a_link_have_one_order(schedule: Schedule) -> None:
    """Necessary and sufficient for a communicator without tags."""
    by_place = programs(schedule)
    assert by_place.keys() == {
        (twin, rank)
        for twin in range(schedule.placement.twins)
        for rank in range(schedule.placement.num_ranks)
    }
    links = {meeting[:2] for program in by_place.values() for meeting in program}
    for source, target in links:
        sent = [m for m in by_place[source] if m[:2] == (source, target)]
        received = [m for m in by_place[target] if m[:2] == (source, target)]
        assert sent == received
        assert len(set(sent)) == len(sent) > 0


@given(schedules(largest=10) | bypassed_schedules())
def test_a_receive_is_started_for_each_message(schedule: Schedule) -> None:
    order = MessageOrder(schedule)
    for rank in range(len(schedule.rows)):
        needed = [
            t
            for exchange in order.exchanges(rank)
            for t in exchange.inputs
            if t.verb == "RECV"
        ]
        assert {p.transfer for p in order.posts(rank)} == set(needed)
        assert len(order.posts(rank)) == len(needed)


def test_receives_stand_between_the_sends_of_1f1b() -> None:
    """In the steady state both neighbours send at one time: one receives first."""
    upper, lower = programs(generate("1f1b", 2, 3)).values()
    assert [
        (m.source[1], m.message.kind + str(m.message.microbatch)) for m in upper
    ] == [
        (0, "F0"),
        (0, "F1"),
        (1, "B0"),
        (1, "B1"),
        (0, "F2"),
        (1, "B2"),
    ]
    assert lower == upper


def test_only_the_next_receive_stands_before_a_computation() -> None:
    """Else the queue of a device would hold what comes after the computation before it."""
    order = MessageOrder(generate("1f1b", 4, 8))
    for rank in range(4):
        exchanges = order.exchanges(rank)
        posts = order.posts(rank)
        for index, exchange in enumerate(exchanges):
            used = sum(len(before.inputs) for before in exchanges[: index + 1])
            started = sum(
                (p.before, p.is_behind_inputs) <= (index, True) for p in posts
            )
            assert started - used <= 2, exchange


def test_twins_do_not_send_to_each_other_at_once() -> None:
    by_place = programs(generate("bitpipe", 4, 4))
    leading, other = (
        [m for m in by_place[twin, 1] if m.source[0] != m.target[0]]
        for twin in range(2)
    )
    assert leading == other
    assert leading
    for mine, theirs in zip(leading[::2], leading[1::2], strict=True):
        assert (mine.message, mine.source[0], theirs.source[0]) == (
            theirs.message,
            0,
            1,
        )


def test_ranks_that_wait_for_each_other_are_found() -> None:
    down, up = (
        Meeting((0, 0), (0, 1), Message("F", 1, 1)),
        Meeting((0, 1), (0, 0), Message("B", 0, 0)),
    )
    check_meetings("both", {(0, 0): [down, up], (0, 1): [down, up]})
    with pytest.raises(ScheduleError) as raised:
        check_meetings("crossed", {(0, 0): [down, up], (0, 1): [up, down]})
    assert "crossed deadlocks where messages are matched by their order" in str(
        raised.value
    )
    assert "rank 0 sends" in str(raised.value)
    assert "use --pipeline-transport auto" in str(raised.value)
    with pytest.raises(ScheduleError, match="one end"):
        check_meetings("one end", {(0, 0): [down], (0, 1): []})
