"""Latency and bandwidth of tensors between two processes, over this package's wires and gloo.

    python benchmarks/transport.py [--quick]

Two processes use each transport's Python interface; docs/transport.md describes the wires. Latency
is half a round trip, as the median of all round trips. Bandwidth is measured with back-to-back
messages, as the median of the rounds. The wires take turns, so drift in the machine's speed affects
all of them equally.

With NVIDIA GPUs, also sends device tensors. A message then counts as received when it has reached
the receiver's GPU. A single GPU can serve both processes.

    gpu, staged      through pinned memory
    gpu, ipc         from GPU to GPU
    nccl             a send and a receive of torch.distributed; needs two GPUs
    gpu, copy        a copy to the host and back within one process
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

import torch
import torch.distributed as dist

from benchmarks.harness.command import markdown, options
from megatron_ext import devices
from megatron_ext.message import Message
from megatron_ext.transport.address import Wire
from megatron_ext.transport.base import Expected, Transport
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport
from tests.ranks import run_ranks

SIZES = tuple(1 << bits for bits in (10, 16, 20, 24, 26, 28))
_PIECE_BYTES = 1 << 18
_TCP_PIECE_BYTES = 1 << 16
_MAX_SHM_BYTES = 1 << 26
"""Larger messages are not sent through shared memory, because some hosts do not have enough of it
for the slots."""
_TIMEOUT_S = 60.0


class _Torch:
    """Sends tensors with torch.distributed. Base class for the other ways to exchange messages."""

    def __init__(self, tensor: torch.Tensor, group: Any = None) -> None:
        self._buffer, self._peer, self._group = (
            torch.zeros_like(tensor),
            1 - dist.get_rank(),
            group,
        )

    def start(self, sends: int, receives: int) -> None:
        """Prepare for this many messages."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send the next message."""
        dist.send(tensor, self._peer, group=self._group)

    def recv(self) -> None:
        """Receive the next message."""
        dist.recv(self._buffer, self._peer, group=self._group)

    def finish(self) -> None:
        """Wait until everything has been sent."""

    def close(self) -> None:
        """Release everything."""


class _Ours(_Torch):
    """Sends messages through one of our transports."""

    def __init__(self, transport: Transport) -> None:
        self._peer, self._transport = 1 - dist.get_rank(), transport

    def start(self, sends: int, receives: int) -> None:
        keys = [Message("F", 0, number) for number in range(max(sends, receives))]
        expected = [
            Expected(self._peer, key, None, torch.uint8) for key in keys[:receives]
        ]
        self._transport.begin(expected, len(keys))
        self._to_send, self._to_receive = iter(keys), iter(keys)

    def send(self, tensor: torch.Tensor) -> None:
        self._transport.isend(tensor, self._peer, next(self._to_send))

    def recv(self) -> None:
        self._transport.recv(self._peer, next(self._to_receive), _TIMEOUT_S)

    def finish(self) -> None:
        self._transport.flush(_TIMEOUT_S)

    def close(self) -> None:
        self._transport.close()


class _Socket(_Torch):
    """The least that TCP has to do: both ends know which message is next and where it belongs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        # Rank 0 publishes its address in the store.
        name = f"socket-{tensor.nbytes}"
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(_TIMEOUT_S)
                store.set(name, str(listener.getsockname()[1]))
                self._link, _ = listener.accept()
        else:
            address = "127.0.0.1", int(store.get(name))
            self._link = socket.create_connection(address, _TIMEOUT_S)
        self._link.settimeout(_TIMEOUT_S)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, tensor: torch.Tensor) -> None:
        self._link.sendall(memoryview(tensor.numpy().data))

    def recv(self) -> None:
        unread = memoryview(self._buffer.numpy().data)
        while unread:
            num_bytes = self._link.recv_into(unread)
            if not num_bytes:
                raise ConnectionError("the other rank ended the connection")
            unread = unread[num_bytes:]

    def close(self) -> None:
        self._link.close()


def native(wire: Wire, slot_bytes: int, name: str, **options: Any) -> NativeTransport:
    """Connect the two ranks, using a name for this wire and size."""
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    return NativeTransport(
        store,
        me,
        [1 - me],
        run_id=name,
        wire=wire,
        slots=8,
        slot_bytes=slot_bytes,
        **options,
    )


Figures = tuple[float, float]
"""Median latency in seconds and median bandwidth in bytes per second, for one wire and size."""


def ping_pong(
    wire: _Torch, tensor: torch.Tensor, count: int, arrived: Callable[[], None]
) -> list[float]:
    """Return half of each round-trip time, in seconds, as seen by rank 0."""
    wire.start(count, count)
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        if dist.get_rank() == 0:
            wire.send(tensor)
        wire.recv()
        arrived()
        if dist.get_rank() == 1:
            wire.send(tensor)
        times.append((time.perf_counter() - begin) / 2)
    wire.finish()
    return times


def stream(
    wire: _Torch, tensor: torch.Tensor, count: int, arrived: Callable[[], None]
) -> float:
    """Return the bytes per second from rank 0 to rank 1, until the last message is answered."""
    sends, receives = (count, 1) if dist.get_rank() == 0 else (1, count)
    wire.start(sends, receives)
    dist.barrier()
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        for _ in range(sends):
            wire.send(tensor)
    for _ in range(receives):
        wire.recv()
        arrived()
    if dist.get_rank() == 1:
        wire.send(tensor)
    seconds = time.perf_counter() - begin
    wire.finish()
    return count * tensor.nbytes / seconds


def measure(num_bytes: int, rounds: int, backend: str = "") -> dict[str, Figures]:
    """Measure all wires at one size, as one of two ranks. Only rank 0's figures count.

    Args:
        num_bytes: Size of a message.
        rounds: Number of turns per wire.
        backend: Device backend. Each rank uses a separate device, or both use the first one. If
            empty, measure the host's wires.
    """
    torch.set_num_threads(
        1
    )  # a multi-threaded copy would not be a bound for a single thread
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    arrived: Callable[[], None] = lambda: None  # noqa: E731 - nothing is asynchronous on the host
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    if backend:
        device = devices.select(backend)
        num_devices = torch.get_device_module(backend).device_count()
        place = device.torch_device(dist.get_rank() % num_devices)
        device.bind(place.index)
        arrived = device.synchronize
        tensor = tensor.to(place)
        count = 50
        host = native("shm", num_bytes, f"gpu-staged-{num_bytes}", for_device=True)
        notes = native("shm", NOTE_BYTES, f"gpu-ipc-{num_bytes}")
        sharing = device.sharing(place)
        direct = DirectTransport(notes, sharing, dist.get_rank(), timeout_s=_TIMEOUT_S)
        wires: dict[str, _Torch] = {
            "gpu, staged": _Ours(
                StagedTransport(host, device.copies(place), timeout_s=_TIMEOUT_S)
            ),
            "gpu, ipc": _Ours(direct),
        }
        if backend == "cuda" and num_devices > 1:
            wires["nccl"] = _Torch(tensor, dist.new_group(backend="nccl"))
        alone = "gpu, copy"
        copies = [(tensor.cpu(), tensor)]
    else:
        # A plain copy is a lower bound only for messages that go through shared memory.
        count = 300
        alone = "copy" if num_bytes <= _MAX_SHM_BYTES else ""
        wires = _of_host(tensor)
        copies = [(torch.zeros_like(tensor), t) for t in (tensor, tensor.clone())]
    count = max(4, min(count, (1 << 26) // num_bytes))
    latencies: dict[str, list[float]] = defaultdict(list)
    bandwidths: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):  # the first turn is a warm-up
        for name, wire in wires.items():
            taken_s = ping_pong(wire, tensor, count, arrived)
            bandwidth = stream(wire, tensor, count, arrived)
            if turn > 0:
                latencies[name] += taken_s
                bandwidths[name].append(bandwidth)
        dist.barrier()
        if alone and dist.get_rank() == 0:  # while the other rank waits
            for number in range(count):
                # Alternate between buffers to touch as much
                # memory as two processes would.
                to, source = copies[number % len(copies)]
                begin = time.perf_counter()
                to.copy_(source)
                if backend:
                    source.copy_(to)
                arrived()
                if turn > 0:
                    latencies[alone].append(time.perf_counter() - begin)
                    bandwidths[alone].append(num_bytes / latencies[alone][-1])
    for wire in wires.values():
        wire.close()
    return {
        name: (statistics.median(taken_s), statistics.median(bandwidths[name]))
        for name, taken_s in latencies.items()
    }


def _of_host(tensor: torch.Tensor) -> dict[str, _Torch]:
    num_bytes = tensor.nbytes
    wires: dict[str, _Torch] = {"gloo": _Torch(tensor), "socket": _Socket(tensor)}

    def add(name: str, slot_bytes: int, **options: Any) -> None:
        wire: Wire = "tcp" if name.startswith("tcp") else "shm"
        wires[name] = _Ours(native(wire, slot_bytes, f"{name} {num_bytes}", **options))

    add("tcp", num_bytes)
    if num_bytes > _TCP_PIECE_BYTES:
        add("tcp, pieces", _TCP_PIECE_BYTES)
    if num_bytes <= _MAX_SHM_BYTES:
        add("shm", num_bytes)
        add("shm, asleep", num_bytes, spin_s=0.0)
        if num_bytes > _PIECE_BYTES:
            add("shm, pieces", _PIECE_BYTES)
    return wires


def left_out() -> str:
    """Say which rows are missing for lack of GPUs, or return an empty text if none are."""
    if not torch.cuda.is_available():
        return "skipped for lack of a GPU: gpu, staged; gpu, ipc; gpu, copy; nccl"
    if torch.cuda.device_count() < 2:
        return "skipped for lack of a second GPU: nccl"
    return ""


def text_of(figures_by_size: dict[int, dict[str, Figures]]) -> str:
    """Return the latencies as the table in docs/transport.md, followed by the bandwidths."""
    units = [
        f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" for n in figures_by_size
    ]
    wires: dict[str, None] = {}  # an ordered set
    for figures_by_wire in figures_by_size.values():
        wires |= dict.fromkeys(figures_by_wire)
    latencies = []
    bandwidths = []
    for wire in wires:
        latencies.append([wire, *["-"] * len(figures_by_size)])
        bandwidths.append([wire, *["-"] * len(figures_by_size)])
        for column, figures_by_wire in enumerate(figures_by_size.values(), 1):
            if wire in figures_by_wire:
                latency_s, bytes_per_s = figures_by_wire[wire]
                times = figures_by_wire["gloo"][0] / latency_s
                latencies[-1][column] = f"{1e6 * latency_s:.1f} ({times:.1f})"
                bandwidths[-1][column] = f"{bytes_per_s / 1e9:.2f}"
    return (
        "<!-- transport: begin -->\n"
        f"{markdown(['latency in us (times as fast as gloo)', *units], latencies)}\n"
        "<!-- transport: end -->\n\n"
        f"{markdown(['bandwidth in GB/s, one message after the other', *units], bandwidths)}"
    )


def main() -> None:
    """Measure and print the tables."""
    args = options(__doc__, "one round with two sizes").parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures_by_size: dict[int, dict[str, Figures]] = {}
    for num_bytes in SIZES[1:3] if args.quick else SIZES:
        figures_by_size[num_bytes] = {}
        for backend in ("", *["cuda"] * torch.cuda.is_available()):
            arguments = num_bytes, 1 if args.quick else 15, backend
            figures_by_size[num_bytes] |= run_ranks(
                2, measure, *arguments, timeout_s=300
            )[0]
        print(f"{num_bytes} bytes", file=sys.stderr)
    print(text_of(figures_by_size))
    if missing := left_out():
        print(missing)


if __name__ == "__main__":
    from benchmarks import (
        transport,  # ranks look up what they run by its module's name
    )

    transport.main()
