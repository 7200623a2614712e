"""Derived communication: every message has a sender and a receiver; where markers stand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given

from megatron_ext.schedules import Action, Schedule, generate, lower, simulate
from megatron_ext.schedules.representation.messages import Mark, Transfer, reduction_order
from tests.schedules.strategies import schedules


def _text(name: str, pp: int, num_microbatches: int) -> list[str]:
    return [" ".join(map(str, row)) for row in lower(generate(name, pp, num_microbatches))]


def test_the_program_of_1f1b() -> None:
    assert _text("1f1b", 2, 2) == [
        "0PARAM_SYNC 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1PARAM_SYNC 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]


def test_the_turn_of_a_v_is_local() -> None:
    outer, inner = _text("zb-v", 2, 1)
    assert outer == (
        "0PARAM_SYNC 0F0 0SEND_F0 3PARAM_SYNC 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3REDUCE_GRAD "
        "0RECV_B0 0I0 0W0 0REDUCE_GRAD"
    )
    assert inner == (
        "1PARAM_SYNC 1RECV_F0 1F0 2LOCAL_F0 2PARAM_SYNC 2F0 2SEND_F0 2RECV_B0 2I0 1LOCAL_B0 "
        "1I0 1SEND_B0 1W0 1REDUCE_GRAD 2W0 2REDUCE_GRAD"
    )


def test_inner_folds_of_twins_are_messages_to_the_twin() -> None:
    inner = lower(generate("bitpipe", 4, 2))[1]
    to_twin = [str(step) for step in inner if isinstance(step, Transfer) and step.to_twin]
    assert to_twin[:4] == ["1SEND_F0", "2RECV_F0", "5SEND_F0", "6RECV_F0"]
    local = lower(generate("bitpipe", 4, 2, routing="local"))[1]
    assert not any(isinstance(step, Transfer) and step.to_twin for step in local)
    assert "2LOCAL_F0" in map(str, local)


@given(schedules())
def test_messages_match(schedule: Schedule) -> None:
    sent: Counter[tuple[object, ...]] = Counter()
    received: Counter[tuple[object, ...]] = Counter()
    for rank, program in enumerate(lower(schedule)):
        assert tuple(s for s in program if isinstance(s, Action)) == schedule.rows[rank]
        for before, step, after in zip(
            (None, *program), program, (*program[1:], None), strict=False
        ):
            if not isinstance(step, Transfer):
                continue
            if step.verb == "RECV":
                assert isinstance(after, Action)
                assert after[::2] == step.message[1:3]
                received[step.message, step.peer, rank, step.to_twin] += 1
            elif step.verb == "SEND":
                assert isinstance(before, Action)
                sent[step.message, rank, step.peer, step.to_twin] += 1
            else:
                assert step.peer == rank
    assert sent == received
    assert set(sent.values()) <= {1}
    twins = schedule.placement.twins
    assert sent.total() * twins == simulate(schedule).messages


@given(schedules())
def test_markers_enclose_the_use_of_each_stage(schedule: Schedule) -> None:
    for rank, program in enumerate(lower(schedule)):
        for stage in schedule.placement.stages_of[rank]:
            used = [i for i, s in enumerate(program) if isinstance(s, Action) and s.stage == stage]
            [sync] = [i for i, s in enumerate(program) if s == Mark("PARAM_SYNC", stage)]
            [reduce] = [i for i, s in enumerate(program) if s == Mark("REDUCE_GRAD", stage)]
            assert sync < used[0] <= used[-1] < reduce


@given(schedules())
def test_reductions_stand_where_the_order_says(schedule: Schedule) -> None:
    for row, program in zip(schedule.rows, lower(schedule), strict=True):
        marks = [step for step in program if isinstance(step, Mark)]
        assert [mark for mark in marks if mark.verb == "REDUCE_GRAD"] == reduction_order(row)


def test_a_stage_that_ends_early_is_reduced_early() -> None:
    schedule = generate("gpipe", 1, 2)
    shortened = replace(schedule, rows=(schedule.rows[0][:3],))
    assert str(lower(shortened)[0][-1]) == "0REDUCE_GRAD"
