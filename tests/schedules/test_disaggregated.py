"""Tables whose forwards and backwards run on different ranks: pictures, formulas, wrong tables."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext import cli
from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules import Costs, generate, registered, simulate, validate
from megatron_ext.schedules.drawing import render
from megatron_ext.schedules.generators import fbd
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.actions import Action
from megatron_ext.schedules.table.communication import Transfer, exchanges
from megatron_ext.schedules.table.memory import slots_needed

from . import published
from .reference import lower
from .strategies import COSTS

MODES = ("recompute", "ship")


def test_the_picture_in_the_docstring_is_the_table() -> None:
    timeline = simulate(generate("fbd", 4, 4))
    assert f"\n{render.caption(timeline)}\n{render.grid(timeline)}\n" in (
        fbd.__doc__ or ""
    )


@given(
    st.sampled_from(MODES), st.sampled_from([2, 4, 6, 8]), st.integers(1, 8), COSTS,
    st.floats(0, 2),
)  # fmt: skip
def test_bubble_memory_and_order_are_as_published(
    mode: str, pp: int, num_microbatches: int, costs: Costs, latency: float
) -> None:
    schedule = generate("fbd", pp, num_microbatches, activations=mode)
    report = validate(schedule)
    assert report.ascending
    assert max(report.memory.activations) <= published.peak(schedule)
    timeline = simulate(schedule, costs)
    expected = published.bubble(schedule, costs)
    assert expected is not None
    assert math.isclose(timeline.bubble, expected, abs_tol=1e-9)
    slower = simulate(schedule, dataclasses.replace(costs, latency=latency))
    assert slower.makespan >= timeline.makespan - 1e-9
    assert timeline.messages == sum(
        len(
            [
                step
                for step in program
                if isinstance(step, Transfer) and step.verb == "RECV"
            ]
        )
        for program in lower(schedule)
    )


def test_the_step_of_twice_the_devices_is_that_of_1f1b() -> None:
    """In times of one stage: 3 (M + PP - 1), on 2 PP ranks."""
    assert simulate(generate("fbd", 8, 8)).makespan / 2 == 33
    assert simulate(generate("1f1b", 4, 8)).makespan == 33


def test_what_forward_ranks_send() -> None:
    first, *_ = exchanges(generate("fbd", 6, 2), 0)
    to_forward, to_backward = (
        Transfer("SEND", Message("F", 1, 0), peer) for peer in (1, 4)
    )
    assert first.outputs == (to_forward, to_backward)
    last, *_ = exchanges(generate("fbd", 6, 2), 1)
    assert last.outputs == (Transfer("SEND", Message("F", 2, 0), 3),)
    ships, *_ = exchanges(generate("fbd", 6, 2, activations="ship"), 2)
    assert ships.outputs == (Transfer("SEND", Message("F", 2, 0), 3),)


@pytest.mark.parametrize("mode", MODES)
def test_every_message_has_a_slot_and_one_sender(mode: str) -> None:
    schedule = generate("fbd", 8, 5, activations=mode)
    sent, received = set(), set()
    for rank, program in enumerate(lower(schedule)):
        for step in program:
            if isinstance(step, Transfer):
                ends = (rank, step.peer) if step.verb == "SEND" else (step.peer, rank)
                (sent if step.verb == "SEND" else received).add((*ends, step.message))
    assert sent == received
    edges = {(source, target, message.kind) for source, target, message in sent}
    assert slots_needed(schedule) == dict.fromkeys(edges, 5)


@pytest.mark.parametrize(
    ("rank", "index", "action", "rule"),
    [
        (0, 0, Action(0, "R", 0), "0R0 belongs to rank 3"),
        (3, 0, Action(0, "F", 0), "0F0 belongs to rank 0"),
        (1, 0, Action(1, "F", 0), "backward ranks recompute it"),
        (2, 0, Action(1, "B", 0), "1R0 has to run before it"),
        (0, 1, Action(0, "F", 0), "each action runs exactly once"),
    ],
)
def test_wrong_tables_are_refused(
    rank: int, index: int, action: Action, rule: str
) -> None:
    schedule = generate("fbd", 4, 3)
    rows = [list(row) for row in schedule.rows]
    rows[rank][index : index + 1] = [action]
    with pytest.raises(ScheduleError, match=rule):
        validate(dataclasses.replace(schedule, rows=tuple(map(tuple, rows))))


def test_a_missing_forward_is_named() -> None:
    schedule = generate("fbd", 4, 3, activations="ship")
    rows = (schedule.rows[0][:-1], *schedule.rows[1:])
    with pytest.raises(ScheduleError, match="rank 0 never runs 0F2"):
        validate(dataclasses.replace(schedule, rows=rows))


def test_r_is_refused_where_forwards_and_backwards_share_a_rank() -> None:
    schedule = generate("1f1b", 2, 2)
    rows = ((Action(0, "R", 0), *schedule.rows[0][1:]), schedule.rows[1])
    with pytest.raises(
        ScheduleError, match="R is for ranks that run only backward passes"
    ):
        validate(dataclasses.replace(schedule, rows=rows))


def test_odd_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="pp must be even, got 5; use 4 or 6"):
        generate("fbd", 5, 4)


def test_json_brings_the_roles_back() -> None:
    schedule = generate("fbd", 4, 2)
    assert table_files.from_json(table_files.json_text(schedule)) == schedule


def test_plan_and_plot_show_both_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fbd" not in registered()
    sizes = "--pp 8 --microbatches 8 --fbd-activations ship".split()
    assert cli.main(["plan", "--schedule", "fbd", *sizes]) == 0
    told = capsys.readouterr().out
    assert (
        "--pipeline-model-parallel-size 4 --forward-backward-disaggregating --fbd-activations ship"
    ) in told
    assert cli.main(["plot", "fbd", *sizes]) == 0
    assert (
        len([line for line in capsys.readouterr().out.splitlines() if "B7" in line])
        == 4
    )
