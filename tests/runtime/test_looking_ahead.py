"""When a dynamic order chooses on an emulated device, and what it knows then."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch

from megatron_ext.runtime.ordering import PolicyOrder, RunAhead
from megatron_ext.schedules import generate
from megatron_ext.schedules.search.policies import Hint, Patience
from megatron_ext.schedules.table.costs import AHEAD
from megatron_ext.schedules.table.transforms import split_backwards
from megatron_ext.transport.direct import DirectTransport
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

from . import fake
from .one_kernel import LONG_S, notes_to_neighbours, run_step, this_rank

_PP, _MICROBATCHES = 4, 8
_KERNEL_S = 0.02


class _KeptEvents(RunAhead):
    """Keeps the event behind each action."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events: list[Any] = []

    def record(self, action: object) -> Any:
        self.events.append(super().record(action))
        return self.events[-1]


class _Choice(NamedTuple):
    num_running: int
    """Actions that had not ended."""
    follows: bool
    """True for the head of the table."""
    index: int
    """Position in the row of the rank."""


class _WatchedHint(Hint):
    """Notes its choices. One host is late once, so its neighbours hear of no launch."""

    def __init__(self, *args: Any, events: list[Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._events = events
        self.choices: list[_Choice] = []
        self._is_late = args[1] == _PP // 2

    def choose(self) -> int | None:
        self._advance()
        if self._is_late and len(self.choices) == 2 * _PP:
            time.sleep(8 * _KERNEL_S)
        head = self._head
        num_running = sum(not event.query() for event in self._events)
        index = super().choose()
        if index is not None:
            self.choices.append(_Choice(num_running, index == head, index))
        return index


def _a_step(is_patient: bool) -> tuple[list[_Choice], dict[int, bool], float, float]:
    """Run a step; return the choices, whether the input of each was there, and durations."""
    me, backend, device = this_rank()
    torch.distributed.init_process_group(backend.distributed_backend)
    host = notes_to_neighbours(me, _PP, slots=4 * _MICROBATCHES)
    sharing = backend.sharing(device)
    pull, there = sharing.pull, []

    def noting(buffer: Any, *args: Any) -> torch.Tensor:
        there.append(buffer.used_there.query())
        return pull(buffer, *args)

    sharing.pull = noting  # type: ignore[method-assign]
    transport = DirectTransport(
        host, sharing, me, timeout_s=LONG_S, reports_copies=True
    )
    table = fake.table_of(split_backwards(generate("1f1b", _PP, _MICROBATCHES)), me)
    ahead = _KeptEvents(backend, device, timeout_s=LONG_S)
    num_actions = len(table.exchanges)
    patience = Patience(waits=[0.0] * num_actions, durations=[1.0] * num_actions)
    policy = _WatchedHint(
        table.schedule, me, cap=_PP + 1, weights_fill=False, events=ahead.events,
        patience=patience if is_patient else None,
    )  # fmt: skip
    order = PolicyOrder(table, policy, transport, {"F": 1, "B": 1}, (), LONG_S, ahead)
    run_step(table, order, transport, ahead, device)
    ahead.close()
    transport.close()
    receives = [
        choice.index
        for choice in policy.choices
        if table.exchanges[table.positions[policy.progress.row[choice.index]]].inputs
    ]
    was_there = dict(zip(receives, there, strict=True))
    return policy.choices, was_there, order._ran_s, order._ran_units


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.usefixtures("emulated_musa")
def test_choices_are_made_when_their_reasons_are_known(connections: int) -> None:
    env = queued(connections=connections, kernel_us=1e6 * _KERNEL_S)
    found = run_ranks(_PP, _a_step, True, device="musa", env=env)
    all_choices = [choice for choices, *_ in found for choice in choices]
    assert len(all_choices) == _PP * 3 * _MICROBATCHES
    assert max(choice.num_running for choice in all_choices) == AHEAD - 1, (
        "launches are hidden"
    )
    jumps = [choice for choice in all_choices if not choice.follows]
    assert jumps, "some head was late"
    assert {choice.num_running for choice in jumps} == {0}, (
        "until then the head may come"
    )
    assert not all(
        there for _, was_there, *_ in found for there in was_there.values()
    ), "some head was launched behind its sender"
    for rank, (choices, was_there, ran_s, ran_units) in enumerate(found):
        assert len(was_there) == _MICROBATCHES * (1 if rank in (0, _PP - 1) else 2)
        jumped = [choice.index for choice in choices if not choice.follows]
        assert all(was_there.get(index, True) for index in jumped), (
            "only a head may run behind"
        )
        assert ran_units >= 3 * _MICROBATCHES - 1, (
            "nothing waits for the end of the last action"
        )
        assert ran_s >= ran_units * _KERNEL_S, "the device's time, not that of launches"


@pytest.mark.usefixtures("emulated_musa")
def test_a_jump_is_launched_ahead_where_no_input_is_on_its_way() -> None:
    env = queued(kernel_us=1e6 * _KERNEL_S)
    found = run_ranks(_PP, _a_step, False, device="musa", env=env)
    jumps = [
        choice for choices, *_ in found for choice in choices if not choice.follows
    ]
    assert max(choice.num_running for choice in jumps) == AHEAD - 1
