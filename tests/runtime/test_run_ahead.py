"""How far the host runs ahead of an emulated device, and what memory that takes."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from megatron_ext.devices.cpu import CpuDevice
from megatron_ext.errors import MegatronExtError, TransportTimeout
from megatron_ext.runtime import executor as executor_module
from megatron_ext.runtime.ordering import Order, RunAhead
from megatron_ext.schedules import Action, generate
from megatron_ext.schedules.table.costs import AHEAD
from megatron_ext.transport.direct import DirectTransport
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

from . import fake
from .one_kernel import LONG_S, SHAPE, notes_to_neighbours, run_step, this_rank

_TENSOR_BYTES = 4 * math.prod(SHAPE)
_PP, _MICROBATCHES = 4, 16


def _reserved_bytes(ahead: int) -> int:
    """Run a step of 1F1B from device to device; return what it adds to the allocator's memory."""
    executor_module.AHEAD = ahead  # type: ignore[attr-defined]  # this process is a rank and ends
    me, backend, device = this_rank()
    host = notes_to_neighbours(me, _PP, slots=4 * _MICROBATCHES)
    transport = DirectTransport(host, backend.sharing(device), me, timeout_s=LONG_S)
    table = fake.table_of(generate("1f1b", _PP, _MICROBATCHES), me)
    bound = RunAhead(backend, device, timeout_s=LONG_S)
    before = torch.cuda.memory_reserved()
    run_step(table, Order(table), transport, bound, device)
    torch.cuda.synchronize()
    bound.close()
    transport.close()
    return torch.cuda.memory_reserved() - before


@pytest.mark.usefixtures("emulated_musa")
def test_memory_is_that_of_the_table_and_of_two_actions() -> None:
    env = queued(kernel_us=20000)
    one_by_one, bounded, unbounded = (
        run_ranks(_PP, _reserved_bytes, ahead, device="musa", env=env)
        for ahead in (1, AHEAD, 10**6)
    )
    print("bytes by rank:", one_by_one, bounded, unbounded)
    per_action = 2 * _TENSOR_BYTES  # what it receives and what it sends
    for rank in range(_PP):
        limit = one_by_one[rank] + 2 * per_action
        assert bounded[rank] <= limit
        assert unbounded[rank] > limit


class _Event:
    """A mark that completes when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.passed = threading.Event()
        self.error = error

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.passed.wait()
        if self.error is not None:
            raise self.error

    def elapsed_time(self, end: Any) -> float:
        raise NotImplementedError


class _Backend(CpuDevice):
    """A device whose events are the test's."""

    def __init__(self, *events: _Event) -> None:
        self._events = iter(events)

    def timing_event(self) -> Any:
        return next(self._events)


def _bound(*events: _Event, timeout_s: float = LONG_S) -> RunAhead:
    return RunAhead(_Backend(*events), torch.device("cuda", 3), timeout_s=timeout_s)


def test_an_end_of_the_step_before_is_not_counted() -> None:
    events, woken = [_Event(), _Event()], threading.Event()
    bound = _bound(*events)
    bound.record(Action(0, "W", 0))
    events[0].passed.set()
    bound.wait_until(0)
    bound.listen(woken.set)  # the next step begins
    assert not bound.ended_s()
    bound.record(Action(0, "F", 0))
    bound.listen(None)  # and ends
    events[1].passed.set()
    bound.close()
    bound._thread.join(LONG_S)
    assert not bound._thread.is_alive()
    assert not bound.ended_s()
    assert not woken.is_set()


def test_a_wait_ends_with_the_action_it_is_for() -> None:
    events = [_Event() for _ in range(3)]
    bound = _bound(*events)
    for number in range(3):
        bound.record(Action(0, "F", number))
    bound.wait_until(3)
    done: list[int] = []

    def wait() -> None:
        bound.wait_until(1)
        done.append(1)

    waiter = threading.Thread(target=wait)
    waiter.start()
    events[0].passed.set()
    waiter.join(0.2)
    assert not done
    events[1].passed.set()
    waiter.join(LONG_S)
    assert done
    events[2].passed.set()
    bound.wait_until(0)
    bound.close()


def test_a_wait_names_the_action_that_does_not_end() -> None:
    event = _Event()
    bound = _bound(event, timeout_s=0.1)
    bound.record(Action(1, "B", 4))
    with pytest.raises(
        TransportTimeout, match=r"1B4 did not finish on cuda:3: waited 0\.1 s"
    ):
        bound.wait_until(0)
    event.passed.set()
    bound.close()


def test_a_failure_of_the_device_reaches_the_wait() -> None:
    event = _Event(RuntimeError("an illegal memory access"))
    bound = _bound(event)
    bound.record(Action(1, "B", 4))
    event.passed.set()
    with pytest.raises(
        MegatronExtError, match="1B4 failed on cuda:3: an illegal memory access"
    ):
        bound.wait_until(0)
