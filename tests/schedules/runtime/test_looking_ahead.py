"""When a dynamic order chooses on an emulated device, and what it knows then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.schedules import generate
from megatron_ext.schedules.representation.split_backwards import split_backwards
from megatron_ext.schedules.runtime.ordering import PolicyOrder
from megatron_ext.schedules.runtime.run_ahead import AHEAD, RunAhead
from megatron_ext.schedules.search.policies import Hint, Patience
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


class _WatchedHint(Hint):
    """Notes at each choice how many actions have not ended, and whether it follows the table."""

    def __init__(self, *args: Any, events: list[Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._events = events
        self.choices: list[tuple[int, bool]] = []

    def choose(self) -> int | None:
        self._advance()
        head = self._head
        num_running = sum(not event.query() for event in self._events)
        index = super().choose()
        if index is not None:
            self.choices.append((num_running, index == head))
        return index


def _a_step() -> tuple[list[tuple[int, bool]], list[bool], float, float]:
    """Run a step; return the choices, whether data was there at each receive, and durations."""
    me, backend, device = this_rank()
    torch.distributed.init_process_group(backend.distributed_backend)
    host = notes_to_neighbours(me, _PP, slots=4 * _MICROBATCHES)
    sharing = backend.sharing(device)
    pull, there = sharing.pull, []

    def noting(buffer: Any, *args: Any) -> torch.Tensor:
        there.append(buffer.used_there.query())
        return pull(buffer, *args)

    sharing.pull = noting  # type: ignore[method-assign]
    transport = DirectTransport(host, sharing, me, timeout_s=LONG_S, tells_when_there=True)
    table = fake.table_of(split_backwards(generate("1f1b", _PP, _MICROBATCHES)), me)
    ahead = _KeptEvents(backend, device, timeout_s=LONG_S)
    num_actions = len(table.exchanges)
    policy = _WatchedHint(
        table.schedule, me, cap=_PP + 1, weights_fill=False, events=ahead.events,
        patience=Patience(waits=[0.0] * num_actions, durations=[1.0] * num_actions),
    )  # fmt: skip
    order = PolicyOrder(policy, table, transport, {"F": 1, "B": 1}, (), LONG_S, ahead)
    run_step(table, order, transport, ahead, device)
    ahead.close()
    transport.close()
    return policy.choices, there, order._ran_s, order._ran_units


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.usefixtures("emulated_musa")
def test_choices_are_made_when_their_reasons_are_known(connections: int) -> None:
    env = queued(connections=connections, kernel_us=1e6 * _KERNEL_S)
    found = run_ranks(_PP, _a_step, device="musa", env=env)
    all_choices = [choice for choices, *_ in found for choice in choices]
    assert len(all_choices) == _PP * 3 * _MICROBATCHES
    assert max(num_running for num_running, _ in all_choices) == AHEAD - 1, "launches are hidden"
    jumps = [num_running for num_running, is_head in all_choices if not is_head]
    assert jumps, "some head was late"
    assert set(jumps) == {0}, "until then the head may come"
    for rank, (_, there, ran_s, ran_units) in enumerate(found):
        assert len(there) == _MICROBATCHES * (1 if rank in (0, _PP - 1) else 2)
        assert all(there), "what has arrived is in the buffer"
        assert ran_units == 3 * _MICROBATCHES
        assert ran_s >= 3 * _MICROBATCHES * _KERNEL_S, "the device's time, not that of launches"
