"""Evaluation's order exists for every placement and number of micro-batches, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.schedules.search.greedy import forward_only, slots_for_forward
from megatron_ext.schedules.table import placement as placements
from megatron_ext.schedules.table.actions import Action
from megatron_ext.schedules.table.walk import check_for_deadlock
from tests.schedules import reference

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement


@st.composite
def any_placement(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.integers(1, 9))
    folded = st.sampled_from([placements.v(num_ranks), placements.w(num_ranks)])
    return draw(
        st.one_of(
            st.just(placements.linear(num_ranks)),
            st.builds(placements.loop, st.just(num_ranks), st.integers(2, 4)),
            folded,
            st.builds(placements.mirrored, folded, st.sampled_from(["twin", "local"])),
        )
    )


@given(any_placement(), st.integers(1, 20))
def test_every_forward_runs_once_in_order_and_all_ranks_end(
    where: Placement, m: int
) -> None:
    schedule = forward_only(where, m)
    assert sorted(action for row in schedule.rows for action in row) == [
        Action(stage, "F", i) for stage in range(where.num_stages) for i in range(m)
    ]
    for rank, row in enumerate(schedule.rows):
        for stage in where.stages_of[rank]:
            assert [a.microbatch for a in row if a.stage == stage] == list(range(m))
    assert sum(map(len, schedule.rows)) == m * where.num_stages
    check_for_deadlock(schedule)
    assert reference.ends_with_slots(schedule, slots_for_forward(schedule))


def test_what_has_begun_is_finished_first() -> None:
    row = forward_only(placements.v(2), 4).rows[0]
    assert [str(action) for action in row] == [
        "0F0", "0F1", "0F2", "3F0", "0F3", "3F1", "3F2", "3F3"
    ]  # fmt: skip


@pytest.mark.parametrize("m", [1, 3, 64])
def test_few_messages_are_under_way(m: int) -> None:
    assert slots_for_forward(forward_only(placements.loop(4, 3), m)) <= 4
