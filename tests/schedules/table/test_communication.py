"""Derived communication: every message has a sender and a receiver; what stays on a rank."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.schedules import Action, Schedule, generate, simulate
from megatron_ext.schedules.table.communication import (
    Transfer,
    exchanges,
    reduction_order,
)
from tests.schedules.reference import lower, text
from tests.schedules.strategies import schedules


def _text(name: str, pp: int, num_microbatches: int) -> list[str]:
    return [
        " ".join(map(text, row)) for row in lower(generate(name, pp, num_microbatches))
    ]


def test_the_program_of_1f1b() -> None:
    assert _text("1f1b", 2, 2) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_the_turn_of_a_v_is_local() -> None:
    outer, inner = _text("zb-v", 2, 1)
    assert outer == ("0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0")
    assert inner == (
        "1RECV_F0 1F0 2LOCAL_F0 2F0 2SEND_F0 2RECV_B0 2I0 1LOCAL_B0 1I0 1SEND_B0 1W0 2W0"
    )


def test_inner_folds_of_twins_are_messages_to_the_twin() -> None:
    inner = lower(generate("bitpipe", 4, 2))[1]
    to_twin = [
        text(step) for step in inner if isinstance(step, Transfer) and step.to_twin
    ]
    assert to_twin[:4] == ["1SEND_F0", "2RECV_F0", "5SEND_F0", "6RECV_F0"]
    local = lower(generate("bitpipe", 4, 2, routing="local"))[1]
    assert not any(isinstance(step, Transfer) and step.to_twin for step in local)
    assert "2LOCAL_F0" in map(text, local)


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
def test_each_input_is_made_by_the_stage_before(schedule: Schedule) -> None:
    """Also where it stays on its rank: what one action hands over, one later action takes."""
    for rank in range(len(schedule.rows)):
        handed = set()
        for exchange in exchanges(schedule, rank):
            for transfer in exchange.inputs:
                if transfer.verb == "LOCAL":
                    handed.remove(transfer.message)
            handed |= {t.message for t in exchange.outputs if t.verb == "LOCAL"}
        assert not handed


@given(schedules())
def test_stages_are_reduced_as_they_are_completed(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        order = reduction_order(row)
        assert set(order) == set(schedule.placement.stages_of[rank])
        ends = [
            max(i for i, a in enumerate(row) if a.stage == stage) for stage in order
        ]
        assert ends == sorted(ends)


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["recompute", "ship"]),
)
def test_each_credit_is_granted_once_and_early_enough(
    num_stages: int, num_microbatches: int, window: int, mode: str
) -> None:
    """A forward needs one for each micro-batch that the window does not cover."""
    schedule = generate("fbd", 2 * num_stages, num_microbatches, activations=mode)
    granted, awaited = {}, {}
    for rank in range(2 * num_stages):
        for exchange in exchanges(schedule, rank, window):
            for credit in exchange.grants:
                granted[rank, credit.peer, credit.message] = exchange.action.microbatch
            for credit in exchange.awaits:
                awaited[credit.peer, rank, credit.message] = exchange.action.microbatch
    assert granted.keys() == awaited.keys()
    assert all(awaited[key] - before == window for key, before in granted.items())
    forwards = sum(action.kind == "F" for row in schedule.rows for action in row)
    stages_with_forwards = forwards // num_microbatches
    assert len(awaited) == stages_with_forwards * max(0, num_microbatches - window)
