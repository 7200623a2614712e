"""What a rank does while the head of its table has not arrived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_ext.messages import Message
from megatron_ext.schedules import generate
from megatron_ext.schedules.runtime.ordering import PolicyOrder
from megatron_ext.schedules.runtime.rank_table import Table
from megatron_ext.schedules.search.policies import Hint, Patience

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
    order = iter(PolicyOrder(policy, table, wire, {"F": 1, "B": 1}, (), TIMEOUT_S))
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
