"""A rank while the head of its table has not arrived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_ext.errors import PeerClosed, PeerDied, TransportTimeout
from megatron_ext.message import Message
from megatron_ext.runtime.ordering import LedOrder, PolicyOrder
from megatron_ext.runtime.program import Table
from megatron_ext.schedules import generate
from megatron_ext.schedules.search.policies import Hint, Patience
from megatron_ext.schedules.table.communication import tensor_of

TIMEOUT_S = 60.0
FIRST_GRADIENT = Message("B", 0, 0)


class _Wire:
    """Tells of the first gradient when it is asked to wait, or of nothing."""

    def __init__(self, *, is_late: bool) -> None:
        self.is_late = is_late
        self.asked_s: list[float] = []

    def poll(self, timeout_s: float) -> Sequence[Message]:
        self.asked_s.append(timeout_s)
        return [] if self.is_late or not timeout_s else [FIRST_GRADIENT]


def _third_action(wire: Any, patience: Patience | None) -> str:
    """Return what the first rank runs after F0 and F1, where its table goes on with B0."""
    schedule = generate("1f1b", 2, 4)
    table = Table(schedule, 0, slots=2)
    policy = Hint(schedule, 0, cap=3, weights_fill=False, patience=patience)
    order = iter(PolicyOrder(table, policy, wire, {"F": 1, "B": 1}, (), TIMEOUT_S))
    for _ in range(2):
        next(order)
        time.sleep(0.005)
    return str(schedule.rows[0][next(order)])


def _patient() -> Patience:
    return Patience(waits=[2.0] * 8, durations=[1.0] * 8)


def test_the_head_is_waited_for_as_long_as_in_the_table() -> None:
    wire = _Wire(is_late=False)
    assert _third_action(wire, _patient()) == "0B0"
    assert 0 < wire.asked_s[-1] < TIMEOUT_S, "by the time that actions took"


def test_a_head_that_is_late_is_jumped_over() -> None:
    assert _third_action(_Wire(is_late=True), _patient()) == "0F2"


def test_without_patience_it_is_jumped_over_at_once() -> None:
    wire = _Wire(is_late=False)
    assert _third_action(wire, None) == "0F2"
    assert set(wire.asked_s) == {0.0}


class _Gone:
    """Delivers messages at the first call; later waits find that the peer has exited."""

    def __init__(self, messages: Sequence[Message], error: Exception) -> None:
        self._messages, self._error = messages, error

    def poll(self, timeout_s: float) -> Sequence[Message]:
        delivered, self._messages = self._messages, ()
        if not delivered and timeout_s:
            raise self._error
        return delivered

    def stats(self) -> Any:
        return SimpleNamespace(wires={0: "shm"})

    def wake(self) -> None:
        pass


class _SlowDevice:
    """A `RunAhead` whose actions end when they are waited for."""

    def __init__(self) -> None:
        self._num_running, self._ended = 0, 0

    def listen(self, wake: Any) -> None:
        pass

    def record(self) -> None:
        self._num_running += 1

    def wait_until(self, unfinished: int) -> None:
        self._ended += max(0, self._num_running - unfinished)
        self._num_running = min(self._num_running, unfinished)

    def ended_s(self) -> list[float]:
        ended, self._ended = self._ended, 0
        return [0.001] * ended


@pytest.mark.parametrize("error", [PeerClosed("closed"), PeerDied("died")])
@pytest.mark.parametrize("num_arrived", [3, 2])
def test_a_peer_may_exit_once_all_its_messages_have_arrived(
    error: Exception, num_arrived: int
) -> None:
    schedule = generate("1f1b", 2, 3)
    table = Table(schedule, 1, slots=2)
    forwards = [action for action in schedule.rows[1] if action.kind == "F"]
    wire: Any = _Gone([tensor_of(action) for action in forwards][:num_arrived], error)
    policy = Hint(schedule, 1, cap=3, weights_fill=False, patience=None)
    device: Any = _SlowDevice()
    order = PolicyOrder(
        table, policy, wire, {"F": 1, "B": 1}, (), TIMEOUT_S, run_ahead=device
    )
    is_complete = num_arrived == len(forwards)
    ran = []
    with nullcontext() if is_complete else pytest.raises(type(error)):
        for position in order:
            ran.append(position)
            device.record()
    assert (len(ran) == len(schedule.rows[1])) == is_complete


class _Telling:
    """Tells what it is given, at the first call."""

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    def poll(self, timeout_s: float) -> Sequence[Message]:
        told, self._messages = self._messages, ()
        return told


_PART = FIRST_GRADIENT._replace(part=1)


@pytest.mark.parametrize(
    ("told", "num_parts"),
    [
        ([FIRST_GRADIENT.notice], 1),
        ([FIRST_GRADIENT.notice, FIRST_GRADIENT], 1),
        ([FIRST_GRADIENT.notice, _PART.notice, FIRST_GRADIENT], 2),
        ([FIRST_GRADIENT.notice, FIRST_GRADIENT, _PART.notice], 2),
    ],
)
def test_a_head_follows_its_input_if_nothing_else_is_ready(
    told: Sequence[Message], num_parts: int
) -> None:
    assert _chosen(told, num_parts) == "0B0"


@pytest.mark.parametrize(
    "told",
    [
        [FIRST_GRADIENT.notice],
        [FIRST_GRADIENT.notice, FIRST_GRADIENT],
        [FIRST_GRADIENT, _PART.notice],
    ],
)
def test_all_parts_of_its_input_have_to_be_launched(told: Sequence[Message]) -> None:
    with pytest.raises(TransportTimeout, match="the first one in the table is 0B0"):
        _chosen(told, 2)


def test_what_is_ready_goes_before_what_is_only_launched() -> None:
    assert _chosen([FIRST_GRADIENT.notice], 1, cap=3) == "0F2"


def test_a_head_does_not_follow_while_another_input_is_on_its_way() -> None:
    both = [FIRST_GRADIENT.notice, Message("B", 0, 1).notice]
    with pytest.raises(TransportTimeout):
        _chosen(both, 1)
    assert _chosen([*both, FIRST_GRADIENT], 1) == "0B0"


@pytest.mark.parametrize(
    ("chunks", "launched", "follows"),
    [
        (2, Message("F", 1, 4), "1F4"),  # the head, 5F0, waits for the same rank
        (1, Message("F", 1, 3), None),  # the head, 1B0, waits for another
    ],
    ids=["same sender", "another sender"],
)
@pytest.mark.parametrize("has_room", [True, False])
def test_another_action_follows_if_the_head_waits_for_the_same_sender(
    chunks: int, launched: Message, follows: str | None, has_room: bool
) -> None:
    schedule = (
        generate("1f1b", 4, 8) if chunks == 1 else generate("interleaved", 4, 8, chunks)
    )
    num_forwards, peak = (4, 8) if chunks == 2 else (3, 3)
    policy = Hint(schedule, 1, cap=peak + has_room, weights_fill=False)
    for microbatch in range(num_forwards):
        policy.progress.arrived(Message("F", 1, microbatch))
        index = policy.choose()
        assert index is not None
        policy.progress.finished(index)
    assert policy.choose() is None
    policy.progress.launched(launched)
    expected = follows if has_room else None
    assert policy.looks_ahead() is (expected is not None)
    index = policy.choose()
    assert (None if index is None else str(schedule.rows[1][index])) == expected


def test_what_the_host_receives_is_not_launched_before() -> None:
    schedule = generate("1f1b", 2, 4)
    table = Table(schedule, 1, slots=2)
    policy = Hint(schedule, 1, cap=3, weights_fill=False)
    wire: Any = _Telling(Message("F", 1, 0).notice, Message("F", 1, 0, header=True))
    order = iter(PolicyOrder(table, policy, wire, {"F": 2, "B": 2}, (), TIMEOUT_S))
    assert str(schedule.rows[1][next(order)]) == "1F0"


def _chosen(told: Sequence[Message], num_parts: int, cap: int = 2) -> str:
    """Return what the first rank runs after F0 and F1, where its table goes on with B0."""
    schedule = generate("1f1b", 2, 4)
    table = Table(schedule, 0, slots=2)
    policy = Hint(schedule, 0, cap=cap, weights_fill=False)
    wire: Any = _Telling(*told)
    parts = {"F": num_parts, "B": num_parts}
    with patch.object(dist, "get_rank", lambda: 0):
        order = iter(PolicyOrder(table, policy, wire, parts, (), TIMEOUT_S))
        return [str(schedule.rows[0][next(order)]) for _ in range(3)][-1]


def test_what_arrives_behind_a_chosen_head_is_not_chosen_again() -> None:
    schedule = generate("1f1b", 2, 2)
    policy = Hint(schedule, 0, cap=3, weights_fill=False)
    progress, chosen = policy.progress, []
    for number in range(4):
        if number >= 2:
            progress.launched(Message("B", 0, number - 2))
        index = policy.choose()
        assert index is not None
        chosen.append(str(schedule.rows[0][index]))
        if number == 2:  # arrives while it is being launched
            progress.arrived(FIRST_GRADIENT)
        progress.finished(index)
    progress.arrived(Message("B", 0, 1))
    assert chosen == ["0F0", "0F1", "0B0", "0B1"]
    assert policy.choose() is None
    assert progress.num_left == 0


@pytest.mark.parametrize(
    ("before", "after", "looks_ahead"),
    [((), (), True), ((), (FIRST_GRADIENT,), True), ((FIRST_GRADIENT,), (), False)],
    ids=[
        "nothing arrives",
        "launched behind the last action",
        "launched before it began",
    ],
)
def test_a_jump_is_chosen_ahead_unless_an_input_may_come_in_time(
    before: Sequence[Message], after: Sequence[Message], looks_ahead: bool
) -> None:
    """The first rank runs F0 and F1. B0 is the next of its table, and F2 could run."""
    schedule = generate("1f1b", 2, 4)
    for hears in (True, False):
        policy = Hint(schedule, 0, cap=3, weights_fill=False)
        policy.progress.hears_launches = hears
        for _ in range(2):
            index = policy.choose()
            assert index is not None
            policy.progress.finished(index)
        for message in before:
            policy.progress.launched(message)
        policy.progress.began()
        for message in after:
            policy.progress.launched(message)
        assert policy.looks_ahead() is (looks_ahead and hears)
        index = policy.choose()
        assert index is not None
        assert str(schedule.rows[0][index]) == "0F2"


class _Device:
    """Ends its actions when the wire says so, which peers reach over ipc alone."""

    def __init__(self, *polls: Message | None) -> None:
        self._polls, self._ended = list(polls), [0.1]

    def poll(self, timeout_s: float) -> Sequence[Message]:
        event = self._polls.pop(0) if timeout_s and self._polls else ()
        self._ended = [0.1] if event is None else []
        return [event] if isinstance(event, Message) else []

    def ended_s(self) -> list[float]:
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> Any:
        return SimpleNamespace(wires={1: "ipc"})

    def wait_until(self, unfinished: int) -> None:
        self._ended = []

    def listen(self, wake: Any) -> None:
        pass

    wake = None


def test_what_is_launched_while_the_last_action_queues_may_come_before_its_end() -> (
    None
):
    schedule = generate("1f1b", 2, 4)
    # F0 and F1 are launched. The peer launches B0, F0 ends, B0 arrives while F1 runs.
    device: Any = _Device(FIRST_GRADIENT.notice, None, FIRST_GRADIENT)
    policy = Hint(schedule, 0, cap=3, weights_fill=False)
    parts = {"F": 1, "B": 1}
    order = PolicyOrder(
        Table(schedule, 0, slots=2), policy, device, parts, (), TIMEOUT_S, device
    )
    assert [str(schedule.rows[0][index]) for index in islice(order, 3)] == [
        "0F0",
        "0F1",
        "0B0",
    ]


class _Decisions:
    """Tells of all gradients at once; brings the leader's decisions to its followers."""

    def __init__(self, *gradients: Message) -> None:
        self._gradients = list(gradients)
        self._sent: dict[Message, Any] = {}

    def poll(self, timeout_s: float) -> Sequence[Message]:
        told, self._gradients = self._gradients, []
        return told

    def isend(self, tensor: Any, rank: int, message: Message) -> None:
        self._sent[message] = tensor

    def recv(self, rank: int, message: Message, timeout_s: float) -> Any:
        return self._sent.pop(message)


def test_followers_run_the_pairs_of_their_leader() -> None:
    schedule = generate("1f1b", 2, 4, pairs=True)
    wire: Any = _Decisions(*(Message("B", 0, microbatch) for microbatch in range(4)))
    policy = Hint(schedule, 0, cap=4, weights_fill=False)
    table = Table(replace(schedule, pairs=()), 0, slots=2)
    chosen = list(PolicyOrder(table, policy, wire, {"F": 1, "B": 1}, (1,), TIMEOUT_S))
    pairs = [choice for choice in chosen if isinstance(choice, tuple)]
    assert pairs
    for forward, backward in pairs:
        assert schedule.rows[0][forward].kind == "F"
        assert schedule.rows[0][backward].kind == "B"
    assert list(LedOrder(table, wire, 0, TIMEOUT_S)) == chosen
