"""Streams, events and counters of the host."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_ext.devices import host


def test_events_really_time() -> None:
    begin, end = host.Event(enable_timing=True), host.Event(enable_timing=True)
    begin.record()
    time.sleep(0.02)
    end.record(host.STREAM)
    assert 20 <= begin.elapsed_time(end) < 20_000
    assert end.query()


def test_an_event_that_was_not_recorded_has_no_time() -> None:
    recorded = host.Stream().record_event()
    with pytest.raises(RuntimeError, match="record"):
        recorded.elapsed_time(host.Event())


def test_the_host_has_one_stream() -> None:
    assert host.Stream() is host.Stream(0, priority=-1) is host.STREAM
    assert host.STREAM.device == torch.device("cpu")


def test_memory_counters_follow_the_process() -> None:
    size = 64 << 20
    before = host.rss_bytes()
    block = torch.ones(size, dtype=torch.uint8)
    assert host.rss_bytes() - before > size // 2
    assert host.peak_rss_bytes() >= host.rss_bytes() - (1 << 20)
    stats = host.memory_stats()
    assert stats["allocated_bytes.all.current"] > size
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"]
    assert stats["allocation.all.current"] == 0
    del block


def test_the_peak_survives_a_kernel_that_does_not_reset_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from pathlib import Path

    monkeypatch.setattr(host, "_CLEAR_REFS", Path("/nonexistent/clear_refs"))
    host.reset_peak_rss()
    monkeypatch.setattr(host, "_STATUS", Path("/nonexistent/status"))
    assert host.peak_rss_bytes() > 10 << 20  # from getrusage


def test_each_local_process_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host.local_world_size() == len(host.Generators()) == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert host.local_world_size() == 1
