"""The validator finds every kind of mistake, and nothing where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Action, Schedule, generate, validate
from megatron_ext.schedules.table.memory import slots_needed
from tests.schedules import reference
from tests.schedules.strategies import schedules


def _with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A schedule and one of its actions, as (rank, index)."""
    schedule = draw(schedules(largest=8))
    rank = draw(st.integers(0, len(schedule.rows) - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.rows[rank]) - 1))


def _message(schedule: Schedule) -> str:
    assert not reference.is_correct(schedule)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


@given(places())
def test_a_dropped_action_is_missed(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, index = place
    row = list(schedule.rows[rank])
    dropped = row.pop(index)
    message = _message(_with_row(schedule, rank, row))
    assert (
        str(dropped) in message
        or f"{dropped.stage}{dropped.kind}" in message
        or ">>" in message
    )
    assert f"rank {rank}" in message


@given(places(), st.data())
def test_a_duplicate_is_found(
    place: tuple[Schedule, int, int], data: st.DataObject
) -> None:
    schedule, rank, index = place
    row = list(schedule.rows[rank])
    row.insert(data.draw(st.integers(0, len(row))), row[index])
    message = _message(_with_row(schedule, rank, row))
    assert str(row[index]) in message or f"rank {rank}" in message


@given(places(), st.data())
def test_an_action_on_another_rank_is_found(
    place: tuple[Schedule, int, int], data: st.DataObject
) -> None:
    schedule, rank, index = place
    assume(len(schedule.rows) > 1)
    row = list(schedule.rows[rank])
    moved = row.pop(index)
    other = data.draw(
        st.sampled_from([r for r in range(len(schedule.rows)) if r != rank])
    )
    target = list(schedule.rows[other])
    target.insert(data.draw(st.integers(0, len(target))), moved)
    message = _message(_with_row(_with_row(schedule, rank, row), other, target))
    assert str(moved) in message or "never runs" in message or ">>" in message


@given(places(), st.sampled_from("FBIW"), st.integers(-1, 9), st.integers(0, 40))
def test_a_changed_action_is_found(
    place: tuple[Schedule, int, int], kind: str, microbatch: int, stage: int
) -> None:
    schedule, rank, index = place
    row = list(schedule.rows[rank])
    changed = Action(stage, kind, microbatch)
    assume(row[index] != changed)
    row[index] = changed
    assert _message(_with_row(schedule, rank, row))


@given(places(), st.data())
def test_any_other_order_is_judged_as_the_reference_does(
    place: tuple[Schedule, int, int], data: st.DataObject
) -> None:
    schedule, rank, index = place
    row = list(schedule.rows[rank])
    row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(index))
    mutated = _with_row(schedule, rank, row)
    if reference.is_correct(mutated):
        validate(mutated)
    else:
        assert ">>" in _message(mutated)


@given(schedules(largest=8), st.data())
def test_shuffled_tables_are_judged_as_the_reference_does(
    schedule: Schedule, data: st.DataObject
) -> None:
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    mutated = replace(schedule, rows=rows)
    if reference.is_correct(mutated):
        validate(mutated)
    else:
        assert ">>" in _message(mutated)


def _rows(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0 0B0", "1F0 1B0"), "0B0 cannot run here: it already ran as action 1"),
        (("0B0 0F0", "1F0 1B0"), "0B0 cannot run here: 0F0 has to run before it"),
        (("0F0 0W0 0I0", "1F0 1B0"), "0W0 cannot run here: 0I0 has to run before it"),
        (("0F0 0B0 0I0", "1F0 1B0"), "either one B or one I and one W on a stage, not both"),
        (("0F0 0B0 0W0", "1F0 1B0"), "either one B or one I and one W on a stage, not both"),
        (("0F0 0I0", "1F0 1B0"), "rank 0 never runs 0W0"),
        (("0F0", "1F0 1B0"), "rank 0 never runs 0B0"),
        (("", "1F0 1B0"), "rank 0 never runs 0F0"),
        (("0F0 0B0 1F0", "1B0"), "1F0 belongs to rank 1"),
        (("0F0 0B0", "1F0 1B0 2F0"), "there are 2 stages, 0 to 1"),
        (("0F0 0B0 0F1", "1F0 1B0"), "there are 1 micro-batches, 0 to 0"),
        (("0F0 0B0", "1F0 1B0", ""), "has 3 rows, but its linear placement has 2 ranks"),
    ],
)  # fmt: skip
def test_messages_name_action_and_rule(rows: tuple[str, ...], message: str) -> None:
    schedule = replace(generate("1f1b", 2, 1), rows=_rows(*rows))
    assert message in _message(schedule)


def test_a_cycle_is_shown_in_full() -> None:
    rows = _rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    message = _message(replace(generate("1f1b", 3, 2), rows=rows))
    assert message.splitlines() == [
        "the ranks' orders form a cycle, so these actions wait for each other:",
        "  0B0 on rank 0 needs 1B0, which comes after 1F1",
        "  rank 0, action 1: 0F0 >>0B0<< 0F1 0B1",
        "  1F1 on rank 1 needs 0F1, which comes after 0B0",
        "  rank 1, action 1: 1F0 >>1F1<< 1B0 1B1",
        "put every action after the actions that it needs, in an order that all ranks share",
    ]


@given(schedules(largest=10))
def test_the_slots_of_the_report_are_enough(schedule: Schedule) -> None:
    slots = slots_needed(schedule)
    assert reference.ends_with_slots(schedule, max(slots.values(), default=1))
    crossing = sum(hop != "local" for hop in schedule.placement.hops)
    assert bool(slots) == bool(crossing)


@pytest.mark.parametrize("row", ["0F0 0F1 0B1 0B0", "0F0 0F1 0I0 0B1 0W0"])
def test_the_order_of_microbatches_is_reported(row: str) -> None:
    schedule = replace(generate("gpipe", 1, 2), rows=_rows(row))
    assert not validate(schedule).ascending
    assert validate(generate("gpipe", 1, 2)).ascending
