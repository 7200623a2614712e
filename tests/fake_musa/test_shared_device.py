"""Kernels of several streams share a device, by priority; exchanges run beside them."""

from __future__ import annotations

import pytest
import torch

from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("emulated_musa")

_MS = 1000
"""Microseconds in a millisecond."""


def _ends_ms(exchange_share: float, waits_at_ms: float | None) -> dict[str, float]:
    """Return when kernels end that get ready at once, or 30 ms later.

    Three kernels of 20 ms are in a stream of low priority. One of 20 ms, in a stream of high
    priority, waits for an exchange of 30 ms and a kernel that takes no time. With `waits_at_ms`, a
    third stream waits for the low one after a time.
    """
    high, exchanges, awaiting = (torch.musa.Stream(priority=-1) for _ in range(3))
    low = torch.musa.Stream(priority=0)
    begin = torch.musa.Event(enable_timing=True)
    flag = torch.zeros(1, dtype=torch.int32)
    with torch.musa.stream(exchanges):
        torch.ops.fake_musa.spin(0, flag)  # until everything is queued
        begin.record()
    ends = {}

    def spend(name: str, stream: torch.musa.Stream, lasts_ms: float, share=1.0) -> None:
        with torch.musa.stream(stream):
            torch.ops.fake_musa.spend(0, lasts_ms * _MS, share)
            ends[name] = torch.musa.Event(enable_timing=True)
            ends[name].record()

    for stream in (low, awaiting):
        stream.wait_stream(exchanges)
    spend("exchange", exchanges, 30, exchange_share)
    spend("free", exchanges, 0)
    high.wait_stream(exchanges)
    spend("high", high, 20)
    for number in range(3):
        spend(f"low {number}", low, 20)
    if waits_at_ms is not None:
        spend("wait", awaiting, waits_at_ms, 0.0)
        awaiting.wait_event(ends["low 2"])
    flag.fill_(1)
    torch.musa.synchronize()
    return {name: begin.elapsed_time(end) for name, end in ends.items()}


def _run(
    exchange_share: float = 0.0, waits_at_ms: float | None = None, **costs: float
) -> dict[str, float]:
    env = queued(connections=32, lag_us=1e6, **costs)
    [ends_ms] = run_ranks(
        1, _ends_ms, exchange_share, waits_at_ms, device="musa", env=env
    )
    return {name: round(end_ms) for name, end_ms in ends_ms.items()}


def test_a_launched_kernel_ends_before_one_of_higher_priority_starts() -> None:
    ends_ms = _run(shared=1)
    assert ends_ms == {
        "exchange": 30, "free": 30, "low 0": 20, "low 1": 40, "high": 60, "low 2": 80
    }  # fmt: skip


def test_kernels_that_do_not_share_the_device_run_at_once() -> None:
    ends_ms = _run()
    assert ends_ms == {
        "exchange": 30, "free": 30, "low 0": 20, "low 1": 40, "high": 50, "low 2": 60
    }  # fmt: skip


def test_an_exchange_takes_its_share_of_the_device() -> None:
    """Kernels run at half of their speed beside it."""
    ends_ms = _run(exchange_share=0.5, shared=1)
    assert ends_ms["low 0"] == pytest.approx(35, abs=1)
    assert ends_ms["low 2"] == pytest.approx(95, abs=1)


def test_what_fills_nothing_runs_when_it_is_waited_for() -> None:
    ends_ms = _run(shared=1, fills=0, waits_at_ms=60)
    assert ends_ms["high"] == 50
    assert ends_ms["low 0"] == 80
