"""Text forms, and what a schedule says about itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Action, Schedule, generate
from megatron_ext.schedules.table.actions import KINDS

from ..strategies import schedules


@given(
    st.integers(0, 999),
    st.sampled_from(KINDS),
    st.integers(0, 9999),
    st.integers(0, 63),
)
def test_text_and_back(stage: int, kind: str, microbatch: int, part: int) -> None:
    action = Action(stage, kind, microbatch, part)  # type: ignore[arg-type]
    assert Action.parse(str(action)) == action


def test_the_text_is_that_of_torch() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse(" 1I3 ") == Action(1, "I", 3)
    assert Action.parse("1I3.2") == Action(1, "I", 3, 2)


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "2F0,", "2F0 2F1", "2F0.", "1UNSHARD"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="as in 2F0"):
        Action.parse(text)


def test_sizes_count_both_twins() -> None:
    schedule = generate("bitpipe", 8, 16)
    assert (schedule.pp, schedule.total_microbatches, schedule.num_stages) == (
        8,
        16,
        16,
    )
    assert (len(schedule.rows), schedule.num_microbatches) == (4, 8)
    assert schedule.label == "bitpipe order=zb"


def test_the_digest_tells_tables_apart() -> None:
    schedule = generate("1f1b", 4, 8)
    assert schedule.digest == generate("1f1b", 4, 8).digest
    last = schedule.rows[-1]
    swapped = replace(
        schedule, rows=(*schedule.rows[:-1], (*last[:-2], last[-1], last[-2]))
    )
    twin, local = (
        generate("bitpipe", 4, 8, routing=routing) for routing in ("twin", "local")
    )
    digests = {schedule.digest, swapped.digest, twin.digest, local.digest}
    assert len(digests) == 4


def test_which_schedules_split_backwards() -> None:
    split = {
        name
        for name in ("gpipe", "1f1b", "zb-h1", "zb-v")
        if generate(name, 2, 4).splits_backward
    }
    assert split == {"zb-h1", "zb-v"}


FBD = st.builds(
    lambda half, m, activations: generate("fbd", 2 * half, m, activations=activations),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["recompute", "ship"]),
)


@given(schedules() | FBD)
def test_needs_and_feeds_are_one_rule(schedule: Schedule) -> None:
    actions = {action for row in schedule.rows for action in row}
    needs = {(before, after) for after in actions for before in schedule.needs(after)}
    assert needs == {
        (before, after) for before in actions for after in schedule.feeds(before)
    }
    assert {before for before, _ in needs} <= actions
    for before, after in needs:
        assert before.microbatch == after.microbatch
        assert abs(before.stage - after.stage) <= 1
