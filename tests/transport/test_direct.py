"""Tensors from device to device: real ranks, each on an emulated device of its own.

Memory and events are shared by the calls of the emulated runtime's library, which are those of a
real one. What is pushed gets there late, so a device that does not wait for it shows.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_ext import devices
from megatron_ext.errors import PeerAborted, PeerDied, TransportError
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport, Reach, find_reach
from megatron_ext.transport.native_transport import NativeTransport
from tests.ranks import run_ranks
from tests.transport.native_ranks import store
from tests.transport.test_staging import _logged

pytestmark = pytest.mark.usefixtures("native", "emulated_musa")

_LONG_S = 60.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)
_SHAPES = ((), (0, 3), (7,), (2, 3, 5), (1000,), (30, 100), (3, 1 << 17))


def _rank() -> int:
    return int(os.environ["RANK"])


def _device() -> torch.device:
    return devices.current().torch_device(_rank())


def _open(
    num_ranks: int = 2, *, name: str = "test", wire: str = "shm"
) -> DirectTransport:
    devices.current().bind(_rank())
    host = NativeTransport(
        store(), _rank(), set(range(num_ranks)) - {_rank()},
        run_id=name, wire=wire, slots=4,  # type: ignore[arg-type]
        slot_bytes=NOTE_BYTES,
    )  # fmt: skip
    return DirectTransport(
        host, devices.current().sharing(_device()), _rank(), timeout_s=_LONG_S
    )


@functools.cache
def _values(number: int, source: int) -> torch.Tensor:
    """A payload; both sides can make it."""
    dtype = _DTYPES[number % len(_DTYPES)]
    generator = torch.Generator().manual_seed(100 * number + source)
    shape = _SHAPES[number % len(_SHAPES)]
    return torch.randint(
        0, 2 if dtype == torch.bool else 50, shape, generator=generator
    ).to(dtype)


def _equal(tensor: torch.Tensor, number: int, source: int) -> bool:
    expected, found = _values(number, source), tensor.cpu()
    return found.dtype == expected.dtype and torch.equal(
        found.double(), expected.double()
    )


def _num_buffers() -> int:
    """How many buffers this process has mapped, own ones and those of peers."""
    return Path("/proc/self/maps").read_text().count("memfd:fake_musa_memory")


def _num_left() -> int:
    """How many of those are left, and how many files of them and of events."""
    gc.collect()
    files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    return _num_buffers() + sum("memfd:fake_musa" in file for file in files)


def _await_readers(transport: DirectTransport) -> None:
    """Wait until all buffers have been read: others are not used again."""
    transport._await_peers(lambda peer: not peer.lent, _LONG_S)
    for peer in transport._peers.values():
        for buffer in peer.free.values():
            while not transport._sharing.is_read(buffer):
                time.sleep(1e-3)


def _await_devices(transport: DirectTransport, num_ranks: int) -> None:
    """Wait until no device has work left: until then the driver keeps what a rank has freed."""
    _await_readers(transport)
    everybody = store()
    everybody.set(
        f"read by {_rank()}", ""
    )  # a peer that has ended has no events to wait for
    everybody.wait([f"read by {rank}" for rank in range(num_ranks)])


def _step(
    transport: DirectTransport, num_ranks: int, num_messages: int, seed: int
) -> None:
    """Each rank sends all it has, to all, and takes what it gets in another order."""
    me, order = _rank(), random.Random(seed + _rank())
    peers = [rank for rank in range(num_ranks) if rank != me]
    inbound = [
        (peer, Message("F", me, number))
        for number in range(num_messages)
        for peer in peers
    ]
    for_host = (Message("C", 0, 0), Message("P", 0, 0, header=True))
    choices = [
        Expected(peer, key, (1,), torch.int32) for peer in peers for key in for_host
    ]
    transport.begin(
        [
            Expected(peer, key, None, _DTYPES[key.microbatch % len(_DTYPES)])
            for peer, key in inbound
        ]
        + choices,
        1,
    )
    for number in range(num_messages):
        for peer in peers:
            tensor = _values(number, me).to(_device())
            if tensor.dim() == 2:
                tensor = tensor.t().contiguous().t()
            transport.isend(tensor, peer, Message("F", peer, number))
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=_device())
    for peer in peers:
        for key in for_host:
            transport.isend(torch.tensor([me], dtype=torch.int32), peer, key)
    order.shuffle(inbound)
    kept = []
    for peer, key in inbound:
        received = transport.recv(peer, key, _LONG_S)
        assert received.device == _device()
        if key.microbatch % 2:  # at once, or when all have come
            assert _equal(received, key.microbatch, peer), key
        kept.append((received, key.microbatch, peer))
    assert all(_equal(*message) for message in kept)
    for peer in peers:
        for key in for_host:
            choice = transport.recv(peer, key, _LONG_S)
            assert (choice.device.type, choice.tolist()) == ("cpu", [peer])
    transport.flush(_LONG_S)


def _exchange(num_ranks: int, num_messages: int) -> tuple[list[str], list[int], int]:
    messages = _logged()
    transport = _open(num_ranks)
    num_buffers = []
    for seed in range(3):
        _step(transport, num_ranks, num_messages, seed)
        num_buffers.append(_num_buffers())
        _await_readers(transport)
    _await_devices(transport, num_ranks)
    stats = transport.stats()
    assert set(stats.wires.values()) == {"ipc"}
    assert stats.messages == 3 * num_messages * (num_ranks - 1)
    transport.close()
    transport.close()
    del transport
    return [line for line in messages if "ipc" in line], num_buffers, _num_left()


def _close_where_no_thread_starts() -> int:
    transport, peer = _open(), 1 - _rank()
    message = Message("F", peer, 0)
    transport.begin([Expected(peer, Message("F", _rank(), 0), (4,), torch.float32)], 1)
    transport.isend(torch.ones(4, device=_device()), peer, message)
    transport.recv(peer, Message("F", _rank(), 0), _LONG_S)
    transport.flush(_LONG_S)
    _await_devices(transport, 2)
    with patch.object(
        threading.Thread, "start", side_effect=RuntimeError("at shutdown")
    ):
        transport.close()
    del transport
    return _num_left()


def test_it_is_closed_at_exit_too() -> None:
    """From 3.12 on Python starts no thread while it exits."""
    assert run_ranks(2, _close_where_no_thread_starts, device="musa") == [0, 0]


def test_random_messages_are_the_same_bit_by_bit_and_leave_nothing() -> None:
    found = run_ranks(3, _exchange, 3, 10, device="musa")
    told = [line for lines, _, _ in found for line in lines]
    assert sorted(told) == [
        f"rank {low} and rank {high}: ipc (from device to device)"
        for low, high in ((0, 1), (0, 2), (1, 2))
    ]
    for _, num_buffers, num_left in found:
        assert 0 < num_buffers[-1] <= 2 * 2 * 10  # one for each message under way
        assert num_left == 0


def _one_way() -> tuple[int, int, int]:
    """Rank 1 takes nothing before the last; later steps find all buffers free."""
    transport, counts = _open(), []
    answer = Message("B", 0, 0)
    for _ in range(3):
        keys = [Message("F", 1, number) for number in range(20)]
        if _rank() == 0:
            transport.begin([Expected(1, answer, (1,), torch.float32)], 1)
            for key in keys:
                value = torch.full((10,), float(key.microbatch), device=_device())
                transport.isend(value, 1, key)
            transport.recv(1, answer, _LONG_S)
        else:
            transport.begin([Expected(0, key, (10,), torch.float32) for key in keys], 1)
            received = [transport.recv(0, key, _LONG_S) for key in reversed(keys)]
            transport.isend(torch.ones(1, device=_device()), 0, answer)
            assert [tensor.unique().tolist() for tensor in received[::-1]] == [
                [k] for k in range(20)
            ]
        transport.flush(_LONG_S)
        counts.append(_num_buffers())
        _await_readers(transport)
    transport.close()
    return tuple(counts)


def test_there_are_as_many_buffers_as_messages_under_way() -> None:
    for first, second, third in run_ranks(2, _one_way, device="musa"):
        assert first == second == third == 21  # and the answer's


def test_messages_that_become_longer_leave_few_buffers_behind() -> None:
    """As of sequences that a schedule has sorted by their lengths."""
    host = SimpleNamespace(stats=lambda: Stats(wires={1: "shm"}), abort=print)
    made: list[SimpleNamespace] = []

    def make(num_bytes: int) -> SimpleNamespace:
        made.append(
            SimpleNamespace(num_bytes=num_bytes, handle=b"new", used_there=None)
        )
        return made[-1]

    sharing = SimpleNamespace(make=make, is_read=lambda _buffer: True)
    transport = DirectTransport(host, sharing, 0, timeout_s=_LONG_S)
    peer = transport._peers[1]
    for num_bytes in range(1000, 64000, 1000):
        number, _ = transport._lend(peer, num_bytes)
        peer.free[number] = peer.lent.pop(number)
    assert sum(buffer.num_bytes for buffer in made) <= 4 * 64000


def _error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except TransportError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _reach(cannot_reach: int) -> Reach:
    me = _rank()
    devices.current().bind(me)
    dist.init_process_group("gloo")
    if me == cannot_reach:
        torch.musa.can_device_access_peer = lambda *_devices: False
    found = find_reach([1 - me], lambda: devices.current().sharing(_device()))
    return found._replace(sharing=None)


@pytest.mark.parametrize(
    ("cannot_reach", "env", "reason"),
    [
        (-1, {}, ""),
        (
            1,
            {},
            "the driver says that device 0000:02:00.0 cannot access device 0000:01:00",
        ),
        (-1, {"FAKE_MUSA_NO_IPC": "1"}, "operation not supported (error 801"),
    ],
)
def test_both_ranks_know_what_is_not_possible(cannot_reach, env, reason) -> None:
    for rank, reach in enumerate(
        run_ranks(2, _reach, cannot_reach, env=env, device="musa")
    ):
        assert reach.is_complete == (not reason)
        assert list(reach.reasons) == [1 - rank] * bool(reason)
        assert all(reason in told for told in reach.reasons.values())


def _without_memory() -> tuple[str, str]:
    transport = _open()
    inbound = Message("F", _rank(), 0)
    transport.begin([Expected(1 - _rank(), inbound, None, torch.float32)], 1)
    if _rank() == 0:
        much = torch.zeros(1, device=_device()).expand(1 << 46)
        found = _error_of(lambda: transport.isend(much, 1, Message("F", 1, 0)))
    else:
        found = _error_of(lambda: transport.recv(0, inbound, _LONG_S))
    transport.close()
    return found


def test_a_device_without_memory_ends_the_waits_of_peers() -> None:
    own, other = run_ranks(2, _without_memory, device="musa")
    assert own[0] == TransportError.__name__
    assert "out of memory (error 2 of Malloc)" in own[1]
    assert other[0] == PeerAborted.__name__
    assert "out of memory" in other[1]


def _survive(killed_after: str) -> tuple[str, str]:
    """Rank 1 is killed: before it sends, or when its device has yet to copy what it sent."""
    pid = os.fork()
    os.environ["RANK"] = str(int(pid == 0))
    if pid == 0:
        transport = _open()
        transport.begin([], 1)
        if killed_after == "a send":
            big = torch.ones(1 << 20, device=_device())
            transport.isend(big, 0, Message("F", 0, 0))
        os.kill(os.getpid(), signal.SIGKILL)
    transport, key, own = _open(), Message("F", 0, 0), Message("C", 0, 0)
    expected = (
        Expected(1, key, None, torch.float32),
        Expected(0, own, (0,), torch.uint8),
    )
    transport.begin(expected, 1)
    transport.isend(
        torch.empty(0, dtype=torch.uint8), 0, own
    )  # it has arrived, and is no cause
    if sent := killed_after == "a send":
        os.waitpid(pid, 0)  # what it sent can be read until then
    kind, told = _error_of(functools.partial(transport.recv, 1, key, _LONG_S))
    transport.close()
    if not sent:
        os.waitpid(pid, 0)
    return kind, told


@pytest.mark.parametrize("killed_after", ["nothing", "a send"])
def test_a_rank_that_is_killed_is_named_soon(killed_after: str) -> None:
    [(kind, told)] = run_ranks(1, _survive, killed_after, device="musa")
    assert kind == PeerDied.__name__, told
    assert "rank 1" in told
