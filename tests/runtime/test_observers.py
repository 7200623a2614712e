"""Observers hear of each action and each message of the real executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.message import Message
from megatron_ext.observer import Executed, Observer
from megatron_ext.runtime import runtime
from megatron_ext.runtime.executor import num_out_of_order
from megatron_ext.runtime.runtime import Measured
from megatron_ext.schedules import Action, generate
from megatron_ext.transport.base import Expected
from megatron_ext.transport.observed import ObservedTransport, TransportObserver
from tests.pipelines import make_pipeline

from . import fake

if TYPE_CHECKING:
    import pytest


@dataclass
class Listening(Observer):
    """Writes down what it hears."""

    log: list[str]
    executed: Sequence[Executed] = ()

    def begin_action(self, action: Action) -> None:
        self.log.append(f"begin {action}")

    def end_action(self, position: int, action: Action) -> None:
        self.log.append(f"end {action} at {position}")

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        self.executed = list(executed)
        assert wall_s >= sum(duration_s for _, _, duration_s in executed) > 0


def test_observers_hear_of_each_action_before_its_results_leave() -> None:
    log: list[str] = []
    table = fake.table_of(generate("1f1b", 2, 1), 1)
    listening, measured = Listening(log), Measured()
    observers = [listening, measured]
    measured.begin_step(cast("Any", SimpleNamespace(table=table)))
    fake.executor(
        table, fake.Compute(log), fake.Wire(1, log), observers=observers
    ).run()
    place = log.index("begin 1B0")
    assert log[place : place + 4] == [
        "begin 1B0",
        "1B0",
        "end 1B0 at 1",
        "send B0.0.0 to 0",
    ]
    assert [str(action) for _, action, _ in listening.executed] == ["1F0", "1B0"]
    assert (measured.steps, measured.actions, measured.out_of_order) == (1, 2, 0)
    assert measured.peak_live == 1


def test_statistics_of_slices_by_length_name_their_unit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = Measured(
        steps=2, actions=8, busy_s=1.0, wall_s=2.0, peak_live=1.25, tables_s=0.5
    )
    pipeline = make_pipeline("1f1b", 2, 2, slice_tokens=8)
    ran = SimpleNamespace(
        measured=measured, pipeline=pipeline, device=torch.device("cpu")
    )
    monkeypatch.setattr(runtime, "in_force", lambda: [ran])
    monkeypatch.setattr(runtime.dist, "get_rank", lambda: 0)
    runtime.log_statistics(of_all=False)
    assert caplog.messages[0].endswith(
        "activations of at most 1.25 longest micro-batches of a step, 250.0 ms per step to "
        "generate its table"
    )


def test_a_profile_shows_the_actions_of_the_table() -> None:
    schedule = generate("zb-h1", 2, 2)

    def run() -> None:
        table = fake.table_of(schedule, 0)
        fake.executor(table, fake.Compute(), fake.Wire(0)).run()

    with torch.profiler.profile() as profiled:
        run()
    actions = [str(action) for action in schedule.rows[0]]
    shown = [event.name for event in profiled.events() if event.name in actions]
    assert shown == actions
    with torch.profiler.profile() as profiled:
        pass
    run()  # after the profile
    assert not [event for event in profiled.events() if event.name in actions]


class Hearing(TransportObserver):
    """Writes down every call."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if (
            name == "heard"
            or not hasattr(TransportObserver, name)
            or name.startswith("__")
        ):
            return object.__getattribute__(self, name)
        return lambda *args: self.heard.append((name, *args))


def test_an_observed_transport_tells_of_each_message_and_wait() -> None:
    wire, hearing = fake.Wire(0), Hearing()
    message = Message("B", 0, 0)
    wire.poll = lambda timeout_s: [message]  # type: ignore[method-assign]
    observed = ObservedTransport(wire, hearing)
    announced = [Expected(1, message, None, torch.float32)]
    observed.begin(announced, 1)
    observed.isend(torch.ones(3), 1, Message("F", 1, 0))
    observed.poll(0.0)
    observed.poll(1.0)
    observed.recv(1, message, 1.0)
    observed.flush(1.0)
    assert hearing.heard == [
        ("begin_messages", announced),
        ("begin_send", Message("F", 1, 0), 1),
        ("end_send", Message("F", 1, 0), 1, 12),
        ("arrived", [message]),
        ("begin_wait", "input"),
        ("end_wait", "input", [message]),
        ("begin_receive", message, 1),
        ("end_receive", message, 1, 8, 0.0),
        ("begin_wait", "slot"),
        ("end_wait", "slot", ()),
    ]


@given(st.integers(0, 12).flatmap(lambda number: st.permutations(range(number))))
def test_an_action_is_out_of_order_if_an_earlier_one_has_yet_to_run(
    order: list[int],
) -> None:
    expected = sum(
        min(order[index:]) < position for index, position in enumerate(order)
    )
    assert num_out_of_order([(p, Action(0, "F", p), 0.0) for p in order]) == expected
