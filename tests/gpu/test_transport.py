"""CUDA tensors between two processes, through pinned memory and past it: bits, and how fast."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext import devices
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected, Transport
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport

from . import processes

pytestmark = pytest.mark.gpu

_LONG_S = 60.0
_MIB = 1 << 20
_SIZE_BYTES = (1 if processes.EMULATED else 64) * _MIB
_BUSY_SIZE = 16 if processes.EMULATED else 2048
"""Of the matrices that keep the GPU busy."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.bool)


def _rank() -> int:
    return int(os.environ["RANK"])


def _open(name: str, slot_bytes: int, way: str) -> Transport:
    """Open a transport over a wire, or by ipc."""
    device = devices.current()
    device.bind(0)
    gpu, direct = device.torch_device(0), way == "ipc"
    host = NativeTransport(
        processes.store(), _rank(), [1 - _rank()], run_id=name, slots=8,
        wire="shm" if direct else way,  # type: ignore[arg-type]
        slot_bytes=NOTE_BYTES if direct else slot_bytes,
        for_device=True,
    )  # fmt: skip
    if direct:
        return DirectTransport(host, device.sharing(gpu), _rank(), timeout_s=_LONG_S)
    return StagedTransport(host, device.copies(gpu), timeout_s=_LONG_S)


def _values(number: int, source: int) -> torch.Tensor:
    """A payload; on the host, where both sides make the same."""
    shape = ((), (0, 3), (7,), (128, 33), (1 << 19,), (3 << 20,))[number % 6]
    dtype = _DTYPES[number % len(_DTYPES)]
    generator = torch.Generator().manual_seed(100 * number + source)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def exchange(way: str, size: int = _BUSY_SIZE) -> list[str]:
    """Send a few steps of tensors while the GPU is busy; return what was logged.

    Args:
        way: The wire, or ipc.
        size: Of the matrices that keep the GPU busy.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    logging.getLogger("megatron_ext").setLevel(logging.INFO)
    transport = _open(way, 4 * _MIB, way)
    for _ in range(3):
        _step(transport, 30, size)
    transport.close()
    return messages


def _step(transport: Transport, num_messages: int, size: int) -> None:
    me, peer = _rank(), 1 - _rank()
    device = devices.current().torch_device(0)
    inbound = [Message("F", peer, number) for number in range(num_messages)]
    transport.begin(
        [
            Expected(peer, key, None, _values(key.microbatch, peer).dtype)
            for key in inbound
        ],
        1,
    )
    work = torch.ones(size, size, device=device)
    for number in range(num_messages):
        values = _values(number, me).to(device)
        for _ in range(4):
            work = work @ work * 0  # what computes the tensor is late
        tensor = (
            values + work[0, 0].to(values.dtype)
            if values.dtype != torch.bool
            else values
        )
        transport.isend(tensor, peer, Message("F", me, number))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
    received = [(key, transport.recv(peer, key, _LONG_S)) for key in reversed(inbound)]
    transport.flush(_LONG_S)
    for key, tensor in received:
        assert tensor.device == device
        assert torch.equal(tensor.cpu(), _values(key.microbatch, peer)), key


@pytest.mark.parametrize("way", ["shm", "tcp", "ipc"])
def test_tensors_arrive_bit_by_bit(way: str, tmp_path: Path) -> None:
    for messages in processes.run(2, exchange, way, directory=tmp_path / "run"):
        assert any("of memory for messages" in message for message in messages) == (
            way != "ipc"
        )
        assert not [
            message for message in messages if "cannot be registered" in message
        ]


def speed(way: str) -> tuple[float, float]:
    """Return bytes per second of messages one way, and of plain copies to the host and back."""
    transport = _open("speed", _SIZE_BYTES, way)
    me, peer = _rank(), 1 - _rank()
    backend = devices.current()
    tensor = torch.ones(_SIZE_BYTES, dtype=torch.uint8, device=backend.torch_device(0))
    host = torch.empty(_SIZE_BYTES, dtype=torch.uint8, pin_memory=True)
    sent, copied = [], []
    for _ in range(8):
        key = Message("F", 0, 0)
        transport.begin([Expected(peer, key, None, torch.uint8)], 1)
        backend.synchronize()
        begin_s = time.perf_counter()
        if me == 0:
            transport.isend(tensor, peer, key)
        got = transport.recv(peer, key, _LONG_S)
        if me == 1:
            transport.isend(got, peer, key)
        backend.synchronize()
        sent.append((time.perf_counter() - begin_s) / 2)
        transport.flush(_LONG_S)
        begin_s = time.perf_counter()
        host.copy_(tensor, non_blocking=True)
        tensor.copy_(host, non_blocking=True)
        backend.synchronize()
        copied.append(time.perf_counter() - begin_s)
    transport.close()
    return _SIZE_BYTES / statistics.median(sent), _SIZE_BYTES / statistics.median(
        copied
    )


@pytest.mark.parametrize("way", ["shm", "ipc"])
def test_how_fast_it_is(
    way: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Shown; how fast it has to be depends on the machine."""
    (message, copy), _ = processes.run(2, speed, way, directory=tmp_path / "run")
    record_property(
        f"{_SIZE_BYTES // _MIB} MiB between processes", f"{message / 1e9:.1f} GB/s"
    )
    record_property("to pinned memory and back", f"{copy / 1e9:.1f} GB/s")
    record_property("ratio", f"{message / copy:.2f}")
    assert message > 0
