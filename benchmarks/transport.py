"""Latency and bandwidth of tensors between two processes: this package's wires and gloo.

    python benchmarks/transport.py [--rounds N] [--json FILE]

Two processes use the Python interface of each transport. Latency is half of a round trip, the
median of all; bandwidth is that of back-to-back messages, the median of the rounds. The wires take
turns, so a drift of the machine affects them alike.

    shm              slots as large as the message, so the receiver needs no copy; with a CPU for
                     each rank, a wait spins for 20 us before it sleeps
    shm, asleep      the same without a spin, as on a host with fewer CPUs than ranks
    shm, pieces      slots of 256 KiB
    tcp              over the loopback interface, like gloo
    tcp, pieces      slots of 64 KiB, so little room that the receiver must grant more in the middle
                     of messages above 4 MiB
    socket           a bare socket over the loopback interface, into an existing tensor, as gloo
    copy             a copy by one thread, the lower bound of a message; it alternates between two
                     pairs of tensors, because the two processes touch as much memory
    multiprocessing  a queue of torch.multiprocessing to a child of one rank, a new tensor for each
                     message

With NVIDIA GPUs, it sends device tensors too (`gpu_transport`).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from megatron_ext.message import Message  # noqa: E402
from megatron_ext.transport.base import Expected  # noqa: E402
from megatron_ext.transport.native_transport import NativeTransport  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.base import Transport

SIZES = tuple(1 << bits for bits in (10, 16, 20, 24, 26, 28))
_SLOTS = 8
_PIECE_BYTES = 1 << 18
_TCP_PIECE_BYTES = 1 << 16
_MAX_SHM_BYTES = 1 << 26
"""Longer messages are not sent through memory: some hosts have too little for their slots."""
_TIMEOUT_S = 60.0
_BEGIN, _END = "<!-- transport: begin -->", "<!-- transport: end -->"


class Exchange(Protocol):
    """One way of exchanging messages with the other rank."""

    def start(self, count: int) -> None:
        """Get ready for `count` messages in each direction."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send one."""

    def recv(self) -> object:
        """Receive one."""

    def finish(self) -> None:
        """Wait until everything sent has left."""

    def close(self) -> None:
        """Give everything up."""


class _Gloo:
    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._peer = 1 - dist.get_rank()

    def start(self, count: int) -> None:
        pass

    def send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self._peer)

    def recv(self) -> object:
        return dist.recv(self._buffer, self._peer)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Messages:
    """Messages of a transport of ours."""

    def __init__(self, transport: Transport) -> None:
        self._peer = 1 - dist.get_rank()
        self._transport = transport

    def start(self, count: int) -> None:
        """Begin a step."""
        expected = [
            Expected(self._peer, Message("F", 0, i), None, torch.uint8) for i in range(count)
        ]
        self._transport.begin(expected, count)
        self._sent = self._received = 0

    def send(self, tensor: torch.Tensor) -> None:
        """Send the next message."""
        self._transport.isend(tensor, self._peer, Message("F", 0, self._sent))
        self._sent += 1

    def recv(self) -> object:
        """Receive the next message."""
        key = Message("F", 0, self._received)
        self._received += 1
        return self._transport.recv(self._peer, key, _TIMEOUT_S)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self._transport.flush(_TIMEOUT_S)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()


def native(
    wire: Wire,
    slot_bytes: int,
    run_id: str,
    spin_s: float | None = None,
    *,
    for_device: bool = False,
) -> NativeTransport:
    """Connect the two ranks."""
    return NativeTransport(
        dist.distributed_c10d._get_default_store(), dist.get_rank(), [1 - dist.get_rank()],
        run_id=run_id, wire=wire, slots=_SLOTS, slot_bytes=slot_bytes,
        spin_s=spin_s, for_device=for_device,
    )  # fmt: skip


class _RawSocket:
    """The least that TCP takes: both ends know what comes, and where it belongs."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(num_bytes))
        # Rank 0 says in the store where it listens.
        name, store = f"socket-{num_bytes}", dist.distributed_c10d._get_default_store()
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

    def start(self, count: int) -> None:
        """Nothing has to be ready."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send the next message."""
        self._link.sendall(memoryview(tensor.numpy()))

    def recv(self) -> object:
        """Receive the next message, to where the one before was."""
        left = self._buffer
        while left:
            num_bytes = self._link.recv_into(left)
            if not num_bytes:
                raise ConnectionError("the other rank ended the connection")
            left = left[num_bytes:]
        return self._buffer

    def finish(self) -> None:
        """All bytes have left."""

    def close(self) -> None:
        """End the connection."""
        self._link.close()


class _Queues:
    """Another process, which answers each tensor with one of its own over torch.multiprocessing.

    Tensors are made before time is taken: a queue shares the memory of those that it was given.
    """

    def __init__(self, num_bytes: int, count: int) -> None:
        processes = torch.multiprocessing.get_context("spawn")
        self._num_bytes, self._count = num_bytes, count
        self._there, self._back = processes.Queue(), processes.Queue()
        self._process = processes.Process(
            target=_answer, args=(self._there, self._back, num_bytes, count), daemon=True
        )
        self._process.start()

    def ping_pong(self) -> list[float]:
        """Half round trips."""
        tensors = _fresh(self._num_bytes, self._count)
        self._there.put(True)
        self._back.get(timeout=_TIMEOUT_S)  # it has its tensors, too
        times = []
        for tensor in tensors:
            begin = time.perf_counter()
            self._there.put(tensor)
            self._back.get(timeout=_TIMEOUT_S)
            times.append((time.perf_counter() - begin) / 2)
        return times

    def close(self) -> None:
        self._there.put(False)
        self._process.join(_TIMEOUT_S)


def _answer(there: Any, back: Any, num_bytes: int, count: int) -> None:
    torch.set_num_threads(1)
    while there.get(timeout=_TIMEOUT_S):
        tensors = _fresh(num_bytes, count)
        back.put(True)
        for tensor in tensors:
            there.get(timeout=_TIMEOUT_S)
            back.put(tensor)


def _fresh(num_bytes: int, count: int) -> list[torch.Tensor]:
    return [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(count)]


@dataclass
class Times:
    """Measurements with one wire and size."""

    latency_s: list[float] = field(default_factory=list)
    bandwidth_bytes_per_s: list[float] = field(default_factory=list)


def ping_pong(wire: Exchange, tensor: torch.Tensor, count: int) -> list[float]:
    """Half round trips, seen by rank 0."""
    wire.start(count)
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        if dist.get_rank() == 0:
            wire.send(tensor)
            wire.recv()
        else:
            wire.recv()
            wire.send(tensor)
        times.append((time.perf_counter() - begin) / 2)
    wire.finish()
    return times


def stream(wire: Exchange, tensor: torch.Tensor, count: int) -> float:
    """Bytes for each second from rank 0 to rank 1, up to the answer to the last one."""
    wire.start(count)
    dist.barrier()
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        for _ in range(count):
            wire.send(tensor)
        wire.recv()
    else:
        for _ in range(count):
            wire.recv()
        wire.send(tensor)
    seconds = time.perf_counter() - begin
    if dist.get_rank() == 0:  # what is announced is received, to the last message
        for _ in range(count - 1):
            wire.recv()
    else:
        for _ in range(count - 1):
            wire.send(tensor)
    wire.finish()
    return count * tensor.nbytes / seconds


def take_turns(
    wires: dict[str, Exchange], tensor: torch.Tensor, count: int, times: dict[str, Times] | None
) -> None:
    """Measure each wire once and note it, but for a turn that only warms up."""
    for name, wire in wires.items():
        latencies, bandwidth = ping_pong(wire, tensor, count), stream(wire, tensor, count)
        if times is not None:
            times[name].latency_s += latencies
            times[name].bandwidth_bytes_per_s.append(bandwidth)


def measure(num_bytes: int, rounds: int) -> dict[str, Times]:
    """Measure all wires with one size, on one of two ranks."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wires = _wires(num_bytes)
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    pairs = [(tensor, torch.zeros_like(tensor)), (tensor.clone(), torch.zeros_like(tensor))]
    count = max(4, min(300, (1 << 26) // num_bytes))
    alone = ("multiprocessing", "copy") if num_bytes <= _MAX_SHM_BYTES else ()
    times = {name: Times() for name in (*wires, *alone)}
    queues = _Queues(num_bytes, count) if alone and dist.get_rank() == 0 else None
    for turn in range(rounds + 1):  # the first one warms up
        take_turns(wires, tensor, count, times if turn > 0 else None)
        dist.barrier()
        if queues is not None:  # alone, while the other one waits
            copies = [_copy(*pairs[turn_of_pair % 2]) for turn_of_pair in range(count)]
            answers = queues.ping_pong()
            if turn > 0:
                times["copy"].latency_s += copies
                times["multiprocessing"].latency_s += answers
    if queues is not None:
        queues.close()
    for wire in wires.values():
        wire.close()
    return times


def _wires(num_bytes: int) -> dict[str, Exchange]:
    wires: dict[str, Exchange] = {
        "gloo": _Gloo(num_bytes),
        "socket": _RawSocket(num_bytes),
        "tcp": Messages(native("tcp", num_bytes, f"tcp-{num_bytes}")),
    }
    if num_bytes > _TCP_PIECE_BYTES:
        wires["tcp, pieces"] = Messages(native("tcp", _TCP_PIECE_BYTES, f"tcp-pieces-{num_bytes}"))
    if num_bytes <= _MAX_SHM_BYTES:
        wires["shm"] = Messages(native("shm", num_bytes, f"whole-{num_bytes}"))
        wires["shm, asleep"] = Messages(native("shm", num_bytes, f"asleep-{num_bytes}", 0.0))
        if num_bytes > _PIECE_BYTES:
            wires["shm, pieces"] = Messages(native("shm", _PIECE_BYTES, f"pieces-{num_bytes}"))
    return wires


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def rows_of(num_bytes: int, times: dict[str, Times]) -> list[dict[str, Any]]:
    """Turn what rank 0 measured into rows of the table."""
    rows: list[dict[str, Any]] = []
    gloo_s = statistics.median(times["gloo"].latency_s)
    for wire, measured in times.items():
        latency_s = statistics.median(measured.latency_s)
        bandwidths = measured.bandwidth_bytes_per_s or [num_bytes / latency_s]
        rows.append(
            {
                "wire": wire,
                "nbytes": num_bytes,
                "latency_s": latency_s,
                "bandwidth_bytes_per_s": statistics.median(bandwidths),
                "ratio_to_gloo": gloo_s / latency_s,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as the tables of the page about the transport."""
    sizes = sorted({row["nbytes"] for row in rows})
    wires = list(dict.fromkeys(row["wire"] for row in rows))
    of = {(row["wire"], row["nbytes"]): row for row in rows}

    def table(title: str, cell: str) -> list[str]:
        units = (f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" for n in sizes)
        lines = [f"| {title} | {' | '.join(units)} |", "|---" * (len(sizes) + 1) + "|"]
        for wire in wires:
            measured = (of.get((wire, num_bytes)) for num_bytes in sizes)
            cells = ("-" if row is None else cell.format(**_scaled(row)) for row in measured)
            lines.append(f"| {wire} | {' | '.join(cells)} |")
        return lines

    latency = table("latency in us (times as fast as gloo)", "{us:.1f} ({ratio_to_gloo:.1f})")
    bandwidth = table("bandwidth in GB/s, one message after the other", "{gb_per_s:.2f}")
    return "\n".join([_BEGIN, *latency, "", *bandwidth, _END])


def _scaled(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "us": 1e6 * row["latency_s"],
        "gb_per_s": row["bandwidth_bytes_per_s"] / 1e9,
        "ratio_to_gloo": row["ratio_to_gloo"],
    }


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    add_json(parser, "the rows")
    args = parser.parse_args()

    # Ranks find what they run by the name of its module.
    from benchmarks import gpu_transport, transport

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    print(f"{'bytes':>10}  {'wire':<16}{'latency us':>12}{'GB/s':>8}{'x gloo':>8}")
    for num_bytes in SIZES:
        times = run_ranks(2, transport.measure, num_bytes, args.rounds, timeout_s=300)[0]
        if torch.cuda.is_available():
            asked = "cuda", num_bytes, args.rounds
            times |= run_ranks(2, gpu_transport.measure, *asked, timeout_s=300)[0]
        for row in rows_of(num_bytes, times):
            print(
                f"{num_bytes:>10}  {row['wire']:<16}{1e6 * row['latency_s']:>12.1f}"
                f"{row['bandwidth_bytes_per_s'] / 1e9:>8.2f}{row['ratio_to_gloo']:>8.1f}"
            )
            rows.append(row)
    print(markdown(rows))
    if left_out := gpu_transport.left_out():
        print(left_out)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
