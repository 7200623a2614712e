"""GPU tensors between two processes, for `transport.py`.

A single GPU serves both processes. `gpu, staged` goes through pinned memory, `gpu, ipc` from GPU to
GPU, and `nccl` is a send and a receive of torch.distributed, which needs two GPUs. A message counts
as received when the receiver's GPU has it. `gpu, copy` is a copy to the host and back in one
process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.transport import Messages, Times, native, take_turns
from megatron_ext import devices
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.staging import staged

if TYPE_CHECKING:
    from benchmarks.transport import Exchange
    from megatron_ext.devices import Device
    from megatron_ext.transport.base import Transport

__all__ = ["left_out", "measure"]

_TIMEOUT_S = 60.0


def left_out() -> str:
    """Say which rows this machine has no GPUs for; empty if it has them all."""
    if not torch.cuda.is_available():
        return "left out for want of a GPU: gpu, staged; gpu, ipc; gpu, copy; nccl"
    if torch.cuda.device_count() < 2:
        return "left out for want of a second GPU: nccl"
    return ""


class _Arrived(Messages):
    """Messages that have come when the device has them."""

    def __init__(self, transport: Transport, device: Device) -> None:
        super().__init__(transport)
        self._device = device

    def recv(self) -> object:
        tensor = super().recv()
        self._device.synchronize()
        return tensor


class _Nccl:
    """Tensors that torch.distributed sends from GPU to GPU."""

    def __init__(self, num_bytes: int) -> None:
        self._group = dist.new_group(backend="nccl")
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        self._peer = 1 - dist.get_rank()

    def start(self, count: int) -> None:
        pass

    def send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self._peer, group=self._group)

    def recv(self) -> object:
        dist.recv(self._buffer, self._peer, group=self._group)
        torch.cuda.synchronize()
        return self._buffer

    def finish(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def measure(backend: str, num_bytes: int, rounds: int) -> dict[str, Times]:
    """Measure all ways with one size, on one of two ranks.

    Args:
        backend: Of the devices, of which each rank takes its own or both take the first.
        num_bytes: Of a message.
        rounds: In turn.
    """
    dist.init_process_group("gloo")
    device = devices.select(backend)
    num_devices = torch.get_device_module(backend).device_count()
    local_rank = dist.get_rank() % num_devices
    device.bind(local_rank)
    wires = _wires(device, device.torch_device(local_rank), num_bytes)
    if backend == "cuda" and num_devices > 1:
        wires["nccl"] = _Nccl(num_bytes)
    tensor = torch.ones(num_bytes, dtype=torch.uint8).to(device.torch_device(local_rank))
    count = max(4, min(50, (1 << 26) // num_bytes))
    times = {name: Times() for name in (*wires, "gpu, copy")}
    for turn in range(rounds + 1):  # the first one warms up
        take_turns(wires, tensor, count, times if turn > 0 else None)
        dist.barrier()
        if dist.get_rank() == 0 and turn > 0:
            times["gpu, copy"].latency_s += [_copy(device, tensor) for _ in range(count)]
    for wire in wires.values():
        wire.close()
    return times


def _wires(device: Device, place: torch.device, num_bytes: int) -> dict[str, Exchange]:
    rank = dist.get_rank()
    host = native("shm", num_bytes, f"gpu-staged-{num_bytes}", for_device=True)
    through = staged(host, device.copies(place), timeout_s=_TIMEOUT_S)
    notes = native("shm", NOTE_BYTES, f"gpu-ipc-{num_bytes}")
    past = DirectTransport(notes, device.sharing(place), rank, timeout_s=_TIMEOUT_S)
    return {"gpu, staged": _Arrived(through, device), "gpu, ipc": _Arrived(past, device)}


def _copy(device: Device, tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    tensor.copy_(tensor.cpu())
    device.synchronize()
    return time.perf_counter() - begin
