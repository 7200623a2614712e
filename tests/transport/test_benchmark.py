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
        (
            1 << 24,
            ["gloo", "socket", *TCP, "shm", "shm, asleep", "shm, pieces", *ALONE],
        ),
        (1 << 27, ["gloo", "socket", *TCP]),
    ],
)
def test_every_wire_has_a_row(num_bytes, wires) -> None:
    found = run_ranks(2, transport.measure, num_bytes, 1)[0]
    assert list(found) == wires
    assert all(
        latency_s > 0 and bytes_per_s > 0 for latency_s, bytes_per_s in found.values()
    )


@pytest.mark.usefixtures("native", "emulated_musa")
def test_tensors_of_devices_have_rows() -> None:
    found = run_ranks(2, transport.measure, 1 << 24, 1, "musa", device="musa")[0]
    assert list(found) == ["gpu, staged", "gpu, ipc", "gpu, copy"]
    assert all(
        latency_s > 0 and bytes_per_s > 0 for latency_s, bytes_per_s in found.values()
    )


def test_what_has_no_gpu_to_be_measured_on_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another test module may have armed the CPU backend, which answers for torch.cuda.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.left_out() == (
        "skipped for lack of a GPU: gpu, staged; gpu, ipc; gpu, copy; nccl"
    )


def test_the_tables_leave_out_what_was_not_measured() -> None:
    one = 2e-6, 1.5e9
    found = {1 << 10: {"gloo": (6e-6, 1e9), "shm": one}}
    found[1 << 20] = found[1 << 10] | {"shm, pieces": one}
    lines = transport.text_of(found).splitlines()
    assert "| latency in us (times as fast as gloo) | 1 KiB | 1 MiB |" in lines
    assert "| shm | 2.0 (3.0) | 2.0 (3.0) |" in lines
    assert "| shm, pieces | - | 1.50 |" in lines
