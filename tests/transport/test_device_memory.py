"""A device writes messages where they are sent from, and reads them where they arrived.

All of that memory is registered with the device, so no copy makes the host wait. What happens to it
when a rank or a device fails: a device that copies cannot be stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import devices
from megatron_ext.devices import copies as device_copies  # noqa: F401  (mutants are looked for there)
from megatron_ext.errors import PeerDied, TransportError
from megatron_ext.message import Message
from megatron_ext.transport import native_transport, staging  # noqa: F401
from megatron_ext.transport.afterwards import Afterwards
from megatron_ext.transport.base import Expected
from megatron_ext.transport.dtypes import tensor_on
from megatron_ext.transport.staging import StagedTransport
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks, start_ranks
from tests.transport.native_ranks import LONG_S, SLOT_BYTES, equal, open_transport, rank

_SHAPE = (SLOT_BYTES // 4,)
_NUM_TRIPS = 6


class _Watched:
    """A device's copies, and where they were from and to."""

    def __init__(self, real: Any) -> None:
        torch.empty(
            1, pin_memory=True
        )  # from then on torch asks the device what is pinned
        self._real = real
        self.pin, self.unpin = real.pin, real.unpin
        self.to_slots: list[bool] = []
        self.from_registered: list[bool] = []

    def to_host(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        self.to_slots.append(target is not None and target.is_pinned())
        return self._real.to_host(tensor, target)

    def to_device(self, tensor: torch.Tensor) -> Any:
        self.from_registered.append(tensor.is_pinned())
        return self._real.to_device(tensor)


def _round_trips(wire: Any) -> tuple[list[bool], list[bool], list[str], list[str]]:
    """Send a tensor there and back a few times.

    Returns:
        Of each send, whether the device wrote into a slot; of each receive, whether it read
        registered memory; what made the calling thread wait; what arrived wrong.
    """
    from torch_musa import host_waits

    me, peer = rank(), 1 - rank()
    devices.current().bind(me)
    device = devices.current().torch_device(me)
    copies = _Watched(devices.current().copies(device))
    host = open_transport(wire, for_device=True)
    transport = StagedTransport(host, copies, timeout_s=LONG_S)  # type: ignore[arg-type]
    tensor = torch.arange(float(_SHAPE[0]), device=device)
    keys = [Message("F", peer, number) for number in range(_NUM_TRIPS)]
    inbound = [Message("F", me, number) for number in range(_NUM_TRIPS)]
    transport.begin([Expected(peer, key, _SHAPE, torch.float32) for key in inbound], 1)
    host_waits.reset()
    for out, back in zip(keys, inbound, strict=True):
        if me == 0:
            transport.isend(tensor * 2, peer, out)
        tensor = transport.recv(peer, back, LONG_S)
        if me == 1:
            transport.isend(tensor * 2, peer, out)
    own = threading.current_thread().name
    waits = [
        f"{what}: {line}"
        for what, line, thread in host_waits.by_line()
        if thread == own
    ]
    transport.flush(LONG_S)
    right = torch.arange(float(_SHAPE[0])) * 2.0 ** (2 * _NUM_TRIPS - me)
    wrong = [] if equal(tensor.cpu(), right) else [str(tensor[:4])]
    transport.close()
    return copies.to_slots, copies.from_registered, waits, wrong


@pytest.mark.usefixtures("native", "emulated_musa")
@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_no_copy_of_a_message_makes_the_host_wait(wire: str, connections: int) -> None:
    env = queued(connections=connections, jitter_us=200, seed=connections)
    for found in run_ranks(2, _round_trips, wire, device="musa", env=env):
        to_slots, from_registered, waits, wrong = found
        assert (
            to_slots == [wire == "shm"] * _NUM_TRIPS
        )  # TCP sends from torch's pinned memory
        assert from_registered == [True] * _NUM_TRIPS
        assert (waits, wrong) == ([], [])


def _late_reader() -> list[bool]:
    """Rank 0 sends before the device of rank 1 knows the memory that its messages arrive in."""
    me, peer = rank(), 1 - rank()
    devices.current().bind(me)
    device = devices.current().torch_device(me)
    copies = _Watched(devices.current().copies(device))
    host = open_transport("tcp", for_device=True)
    key = Message("F", 1, 0)
    expected = [Expected(peer, key, _SHAPE, torch.float32)] if me == 1 else []
    if me == 1:
        host.begin(expected, 1)
        assert host.poll(LONG_S) == [key]
    transport = StagedTransport(host, copies, timeout_s=LONG_S)  # type: ignore[arg-type]
    if me == 0:
        transport.begin(expected, 1)
        transport.isend(torch.ones(_SHAPE, device=device), peer, key)
        transport.flush(LONG_S)
    else:
        assert equal(transport.recv(peer, key, LONG_S).cpu(), torch.ones(_SHAPE))
    transport.close()
    return copies.from_registered


@pytest.mark.usefixtures("native", "emulated_musa")
def test_a_message_that_comes_early_lies_in_registered_memory() -> None:
    env = queued(connections=1)
    assert run_ranks(2, _late_reader, device="musa", env=env) == [[], [True]]


def _killed_reader() -> tuple[str, bool]:
    """Rank 1 dies while the device of rank 0 writes into the slots of it."""
    me, peer = rank(), 1 - rank()
    devices.current().bind(me)
    device = devices.current().torch_device(me)
    copies = _Watched(devices.current().copies(device))
    host = open_transport("shm", for_device=True)
    transport = StagedTransport(host, copies, timeout_s=LONG_S)  # type: ignore[arg-type]
    inbound = Message("B", 0, 0)
    transport.begin([Expected(peer, inbound, _SHAPE, torch.float32)], 1)
    sent = Path("sent")
    if me == 1:
        while not sent.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(_SHAPE, device=device)
    for number in range(3):
        transport.isend(tensor, peer, Message("F", 1, number))
    sent.touch()
    try:
        transport.recv(peer, inbound, LONG_S)
    except TransportError as error:
        first = error
    transport.abort(str(first))
    transport.close()
    devices.current().synchronize()  # raises if a copy found its memory gone
    return type(first).__name__, any(copies.to_slots)


@pytest.mark.usefixtures("native", "emulated_musa")
@pytest.mark.parametrize("connections", [1, 8])
def test_a_device_ends_its_copies_though_their_reader_died(connections: int) -> None:
    env = queued(connections=connections, copy_us=400_000)
    run = start_ranks(2, _killed_reader, device="musa", env=env)
    assert run.exit_codes == [0, -signal.SIGKILL], run.describe()
    assert run.values[0] == (PeerDied.__name__, True)


class _Gate:
    """A copy that ends when it is told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(LONG_S)


class _Host:
    """A host transport that gives out nothing."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.closed = False

    def fixed_memory(self) -> list[tuple[int, int]]:
        return [(4096, 10), (8192, 20)]

    def reserve(self, *_: object) -> None:
        """Have no room."""

    def isend(self, *_: object) -> None:
        raise TransportError("the peer is gone")

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self) -> None:
        self.closed = True


class _Copies:
    """Copies to the host whose ends the test decides on; `refused` addresses cannot be pinned."""

    def __init__(self, *refused: int) -> None:
        self.gates: list[_Gate] = []
        self.pinned: set[int] = set()
        self._refused = refused

    def pin(self, address: int, _num_bytes: int) -> bool:
        if address in self._refused:
            return False
        self.pinned.add(address)
        return True

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def to_host(
        self, tensor: torch.Tensor, target: object = None
    ) -> tuple[torch.Tensor, _Gate]:
        assert target is None
        self.gates.append(_Gate())
        return tensor, self.gates[-1]


def _on_a_device() -> Any:
    """Passes for a tensor of a device."""
    return torch.ones(3, device="meta")


def test_memory_is_registered_as_long_as_a_copy_may_use_it(monkeypatch) -> None:
    monkeypatch.setattr(staging, "_CLOSE_S", 0.05)
    host, copies = _Host(), _Copies()
    transport = StagedTransport(host, copies, timeout_s=LONG_S)  # type: ignore[arg-type]
    transport.isend(_on_a_device(), 1, Message("F", 1, 0))
    transport.close()
    assert copies.pinned == {4096, 8192}
    assert host.closed
    copies.gates[0].opened.set()


def test_memory_is_unregistered_at_the_end() -> None:
    host, copies = _Host(), _Copies()
    StagedTransport(host, copies, timeout_s=LONG_S).close()  # type: ignore[arg-type]
    assert copies.pinned == set()


def test_a_device_that_does_not_know_all_memory_writes_no_slots() -> None:
    host, copies = _Host(), _Copies(8192)
    host.reserve = None  # type: ignore[assignment]  # and is not asked for any
    transport = StagedTransport(host, copies, timeout_s=LONG_S)  # type: ignore[arg-type]
    transport.isend(_on_a_device(), 1, Message("F", 1, 0))
    copies.gates[0].opened.set()
    transport.close()
    assert copies.pinned == set()


def test_after_an_error_memory_is_kept_until_its_copy_has_ended() -> None:
    told: list[str] = []
    thread = Afterwards("sends", told.append)
    first, second = _Gate(), _Gate()
    kept, freed = torch.ones(3), threading.Event()
    weakref.finalize(kept, freed.set)

    def fail() -> None:
        raise TransportError("the peer is gone")

    called: list[int] = []
    thread.after(first, fail, None)
    thread.after(second, partial(called.append, 1), kept)
    del kept
    first.opened.set()
    with pytest.raises(TransportError, match="the peer is gone"):
        thread.finish(LONG_S)
    assert not freed.wait(0.1)
    second.opened.set()
    assert freed.wait(LONG_S)
    assert thread.stop(LONG_S)
    assert (len(told), called) == (1, [])


def _by_reservation(wire: Any) -> list[str]:
    """Send from memory of `reserve` where there is some; return what is wrong."""
    transport = open_transport(wire)
    me, peer = rank(), 1 - rank()
    keys = [Message("F", peer, number) for number in range(12)]
    sizes = [0, 1, 7, SLOT_BYTES, SLOT_BYTES + 1]
    shapes = [(sizes[number % 5],) for number in range(12)]
    transport.begin(
        [
            Expected(peer, key._replace(stage=me), shape, torch.uint8)
            for key, shape in zip(keys, shapes, strict=True)
        ],
        1,
    )
    left = transport.reserve(peer, keys[1], torch.Size([2]), torch.uint8)
    unknown = transport.reserve(peer, keys[0], torch.Size([2]), torch.quint8)
    wrong = []
    for key, shape in zip(keys, shapes, strict=True):
        values = torch.full(shape, key.microbatch + 10 * me, dtype=torch.uint8)
        reserved = transport.reserve(peer, key, values.shape, values.dtype)
        if wire == "tcp" or shape[0] in (0, SLOT_BYTES + 1):
            assert reserved is None
        if reserved is None:
            transport.isend(values, peer, key)
        else:
            tensor_on(reserved).copy_(values)
            transport.publish(peer, key, reserved)
        got = transport.recv(peer, key._replace(stage=me), LONG_S)
        if not equal(
            got, torch.full(shape, key.microbatch + 10 * peer, dtype=torch.uint8)
        ):
            wrong.append(str(key))
    transport.flush(LONG_S)
    transport.abort("enough")
    for call in _calls_after_abort(transport, peer, keys[1], left):
        with pytest.raises(TransportError, match="enough"):
            call()
    transport.close()
    return wrong + ([] if unknown is None else ["quint8"])


def _calls_after_abort(
    transport: Any, peer: int, key: Message, reserved: Any
) -> list[Callable[[], object]]:
    return [
        partial(transport.reserve, peer, key, torch.Size([2]), torch.uint8),
        partial(transport.publish, peer, key, reserved),
    ]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_what_is_written_into_reserved_memory_arrives(wire: str) -> None:
    assert run_ranks(2, _by_reservation, wire) == [[], []]
