"""Tensors of a device over the native transport: in order with copies that end late, and failing.

The emulated device does copies of side streams as late as it may, and those that nobody waits for
never; so what is not waited for shows each time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext import devices
from megatron_ext.errors import PeerAborted, TransportError, TransportTimeout
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport
from tests.ranks import run_ranks
from tests.transport.native_ranks import store

pytestmark = pytest.mark.usefixtures("native")

_SLOT_BYTES = 4096
_LONG_S = 60.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)


def _rank() -> int:
    return int(os.environ["RANK"])


def _device() -> torch.device:
    return devices.current().torch_device(_rank())


def _open(
    copies: Any, name: str = "test", *, slots: int = 4, wire: Any = "shm"
) -> StagedTransport:
    """Connect the two ranks of a run."""
    host = NativeTransport(
        store(), _rank(), [1 - _rank()], run_id=name,
        wire=wire, slots=slots, slot_bytes=_SLOT_BYTES,
        for_device=True,
    )  # fmt: skip
    return StagedTransport(host, copies, timeout_s=_LONG_S)


def _values(number: int, source: int) -> torch.Tensor:
    """A payload, of all sizes up to several slots; both sides can make it."""
    shape = ((), (0, 3), (7,), (2, 3, 5), (1000,), (30, 100))[number % 6]
    dtype = _DTYPES[number % len(_DTYPES)]
    generator = torch.Generator().manual_seed(100 * number + source)
    return torch.randint(
        0, 2 if dtype == torch.bool else 50, shape, generator=generator
    ).to(dtype)


def _equal(tensor: torch.Tensor, number: int, source: int) -> bool:
    expected = _values(number, source)
    found = tensor.cpu()
    return found.dtype == expected.dtype and torch.equal(
        found.double(), expected.double()
    )


def _made_late(values: torch.Tensor) -> torch.Tensor:
    """A device tensor whose values a stream of its own brings; the caller's stream from now on."""
    stream = torch.musa.Stream()
    torch.musa.set_stream(stream)
    tensor = torch.empty_like(values, device=_device())
    tensor.copy_(values, non_blocking=True)
    return tensor


def _exchange(transport: StagedTransport, num_messages: int) -> None:
    """One step: each sends all, then takes what the other sent the other way round."""
    me, peer = _rank(), 1 - _rank()
    keys = [Message("F", me, number) for number in range(num_messages)]
    inbound = [Message("F", peer, number) for number in range(num_messages)]
    transport.begin(
        [
            Expected(peer, key, None, _values(key.microbatch, peer).dtype)
            for key in inbound
        ]
        + [Expected(peer, Message("C", 0, 0), (1,), torch.int32)],
        1,
    )
    values = [_values(key.microbatch, me) for key in keys]  # the late copies read them
    for key, value in zip(keys, values, strict=True):
        tensor = _made_late(value)
        if tensor.dim() == 2 and tensor.numel():
            tensor = tensor.t().contiguous().t()
        transport.isend(tensor, peer, key)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=_device())
    transport.isend(torch.tensor([me], dtype=torch.int32), peer, Message("C", 0, 0))
    kept = []
    for key in reversed(inbound):
        received = transport.recv(peer, key, _LONG_S)
        assert received.device == _device()
        assert _equal(received, key.microbatch, peer), key
        kept.append((key, received))
    choice = transport.recv(peer, Message("C", 0, 0), _LONG_S)
    assert (choice.device.type, choice.tolist()) == ("cpu", [peer])
    transport.flush(_LONG_S)
    assert all(_equal(tensor, key.microbatch, peer) for key, tensor in kept)


def _on_each_wire() -> list[str]:
    devices.current().bind(_rank())
    messages = _logged()
    for wire in ("shm", "tcp"):
        transport = _open(devices.current().copies(_device()), wire, wire=wire)
        for _ in range(2):
            _exchange(transport, 24)
        transport.close()
    return messages


def _logged() -> list[str]:
    """Log lines of this package from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return messages


@pytest.mark.usefixtures("emulated_musa")
def test_messages_of_a_device_are_the_same_bit_by_bit() -> None:
    for messages in run_ranks(2, _on_each_wire, device="musa"):
        assert sum("of memory for messages" in message for message in messages) == 2
        assert not [
            message for message in messages if "cannot be registered" in message
        ]


def _unpinned(register: Callable[..., int] | None) -> list[str]:
    devices.current().bind(_rank())
    runtime = torch.musa.musart()
    if register is None:
        del runtime.musaHostRegister
    else:
        runtime.musaHostRegister = staticmethod(register)
    messages = _logged()
    transport = _open(devices.current().copies(_device()))
    _exchange(transport, 12)
    transport.close()
    return [message for message in messages if "rank waits while" in message]


def _refuses(_address: int, _num_bytes: int, _flags: int) -> int:
    return 2


@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize(
    ("register", "reason"),
    [(None, "the musa runtime cannot register"), (_refuses, "error 2 of its driver")],
)
def test_memory_that_cannot_be_pinned_is_told_of_and_copied_at_once(
    register, reason
) -> None:
    for messages in run_ranks(2, _unpinned, register, device="musa"):
        [told] = messages
        assert reason in told


class _Gate:
    """A copy that ends when it is told to, or fails."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self.opened = threading.Event()
        self._copy = copy

    def wait(self) -> None:
        assert self.opened.wait(_LONG_S)
        self._copy()


class _GatedCopies:
    """Copies to the device that nothing but a gate lets happen."""

    def __init__(self) -> None:
        self.gates: list[_Gate] = []

    def pin(self, _address: int, _num_bytes: int) -> bool:
        return False

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Gate]:
        copy = torch.zeros_like(tensor)
        bytes_there = tensor.data_ptr()  # a copy keeps nothing alive
        self.gates.append(_Gate(partial(_copy_from, copy, bytes_there)))
        return copy, self.gates[-1]


def _copy_from(target: torch.Tensor, address: int) -> None:
    import ctypes

    ctypes.memmove(target.data_ptr(), address, target.nbytes)


def _kept_slot() -> None:
    """Rank 1 holds back its copies while rank 0 sends more than there are slots."""
    copies = _GatedCopies()
    transport = _open(copies, slots=4)
    keys = [Message("F", 1, number) for number in range(12)]
    answer = Message("B", 0, 0)
    if _rank() == 0:
        transport.begin([Expected(1, answer, (1,), torch.float32)], 1)
        transport.isend(torch.full((10,), 0.0), 1, keys[0])
        transport.recv(1, answer, _LONG_S)
        copies.gates[0].opened.set()
        for key in keys[1:]:
            transport.isend(torch.full((10,), float(key.microbatch)), 1, key)
    else:
        transport.begin([Expected(0, key, (10,), torch.float32) for key in keys], 1)
        received = [transport.recv(0, keys[0], _LONG_S)]
        transport.isend(torch.ones(1), 0, answer)
        received += [transport.recv(0, key, _LONG_S) for key in keys[1:]]
        for gate in copies.gates:
            gate.opened.set()
    transport.flush(_LONG_S)
    transport.close()
    if _rank() == 1:
        assert [tensor.unique().tolist() for tensor in received] == [
            [float(i)] for i in range(12)
        ]


def test_a_slot_is_given_back_when_it_was_copied() -> None:
    run_ranks(2, _kept_slot)


class _Stalled:
    """Copies of a device that end with `failure`, once they are let."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self.gate = _Gate(self._end)

    def _end(self) -> None:
        if self._failure is not None:
            raise self._failure

    def pin(self, _address: int, _num_bytes: int) -> bool:
        return False

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Gate]:
        return tensor.cpu(), self.gate

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Gate]:
        return tensor.to(_device()), self.gate


def _failing_device() -> tuple[str, str]:
    """The copy of rank 0 fails while both ranks wait for each other."""
    devices.current().bind(_rank())
    copies = _Stalled(RuntimeError("the device is lost"))
    transport = _open(copies)
    peer = 1 - _rank()
    key, inbound = Message("F", peer, 0), Message("F", _rank(), 0)
    transport.begin([Expected(peer, inbound, (3,), torch.float32)], 1)
    if _rank() == 0:
        transport.isend(torch.ones(3, device=_device()), peer, key)
        threading.Timer(0.2, copies.gate.opened.set).start()
    try:
        transport.recv(peer, inbound, _LONG_S)
    except TransportError as error:
        first = error
    transport.close()
    return type(first).__name__, str(first)


@pytest.mark.usefixtures("emulated_musa")
def test_a_device_that_fails_ends_the_waits_of_both_ranks() -> None:
    own, other = run_ranks(2, _failing_device, device="musa")
    assert own[0] == TransportError.__name__
    assert "between device and host: the device is lost" in own[1]
    assert other[0] == PeerAborted.__name__
    assert "the device is lost" in other[1]


def _stuck_device() -> str:
    devices.current().bind(_rank())
    copies = _Stalled()
    transport = _open(copies)
    peer = 1 - _rank()
    inbound = Message("F", _rank(), 0)
    transport.begin([Expected(peer, inbound, (3,), torch.float32)], 1)
    try:
        transport.isend(torch.ones(3, device=_device()), peer, Message("F", peer, 0))
        transport.flush(0.2)
    except TransportTimeout as error:
        told = str(error)
    copies.gate.opened.set()
    transport.flush(_LONG_S)
    transport.recv(
        peer, inbound, _LONG_S
    )  # who closes before the peer has sent breaks its send
    transport.close()
    return told


@pytest.mark.usefixtures("emulated_musa")
def test_a_device_that_does_not_finish_is_told_of_in_time() -> None:
    for told in run_ranks(2, _stuck_device, device="musa"):
        assert "the device did not copy 1 tensors" in told
