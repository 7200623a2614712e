"""The benchmark of transports measures what it says; how fast things are is not tested here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import transport
from tests.ranks import run_ranks

TCP = ["tcp", "tcp, pieces"]
ALONE = ["copy"]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("num_bytes", "wires"),
    [
        (1 << 10, ["gloo", "socket", "tcp", "shm", "shm, asleep", *ALONE]),
        (1 << 24, ["gloo", "socket", *TCP, "shm", "shm, asleep", "shm, pieces", *ALONE]),
        (1 << 27, ["gloo", "socket", *TCP]),
    ],
)
def test_every_wire_has_a_row(num_bytes, wires) -> None:
    times = run_ranks(2, transport.measure, num_bytes, 1)[0]
    rows = transport.rows_of(num_bytes, times)
    assert [row["wire"] for row in rows] == wires
    assert all(row["nbytes"] == num_bytes for row in rows)
    assert rows[0]["ratio_to_gloo"] == 1.0
    assert all(row["latency_s"] > 0 and row["bandwidth_bytes_per_s"] > 0 for row in rows)


@pytest.mark.usefixtures("native", "emulated_musa")
def test_tensors_of_devices_have_rows() -> None:
    times = run_ranks(2, transport.measure, 1 << 24, 1, "musa", device="musa")[0]
    assert list(times) == ["gpu, staged", "gpu, ipc", "gpu, copy"]
    times["gloo"] = times["gpu, copy"]
    assert all(row["latency_s"] > 0 for row in transport.rows_of(1 << 24, times))


def test_what_has_no_gpu_to_be_measured_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test module may have armed the CPU backend, which answers for torch.cuda.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.left_out() == (
        "left out for want of a GPU: gpu, staged; gpu, ipc; gpu, copy; nccl"
    )


def test_the_tables_leave_out_what_was_not_measured() -> None:
    rows = [
        {"wire": wire, "nbytes": num_bytes, "latency_s": 2e-6, "bandwidth_bytes_per_s": 1.5e9,
         "ratio_to_gloo": 3.0}
        for wire, num_bytes in (("shm", 1 << 10), ("shm", 1 << 20), ("shm, pieces", 1 << 20))
    ]  # fmt: skip
    lines = transport.text_of(rows).splitlines()
    assert "| latency in us (times as fast as gloo) | 1 KiB | 1 MiB |" in lines
    assert "| shm | 2.0 (3.0) | 2.0 (3.0) |" in lines
    assert "| shm, pieces | - | 1.50 |" in lines
