"""Tensors of a device that runs behind the host: late kernels and copies, memory used again soon.

A wait or a `record_stream` that the code forgets reads poison here (`tests/fake_musa/README.md`);
`tests/mutations` removes them one by one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_ext import devices
from megatron_ext.devices import copies, sharing  # noqa: F401  (mutants are looked for there)
from megatron_ext.errors import TransportTimeout
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected, Transport
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import StagedTransport
from megatron_ext.transport.torch_dist import TorchTransport
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks
from tests.transport.native_ranks import store

pytestmark = pytest.mark.usefixtures("native", "emulated_musa")

_LONG_S = 60.0
_SHAPE = (64, 32)
_NUM_MESSAGES = 12

_LATE = {
    "kernels": ("kernel_us=3000", "kernel_us=3000"),
    "kernels of rank 1": ("kernel_us=1", "kernel_us=3000"),
    "copies": ("copy_us=8000", "copy_us=8000"),
    "copies of rank 0": ("copy_us=8000", "copy_us=1"),
    "anything": ("jitter_us=300,seed=1", "jitter_us=300,seed=2"),
}
"""The late part: the cost of either rank."""


def _open(way: str, me: int) -> Transport:
    device = devices.current()
    device.bind(me)
    here = device.torch_device(me)
    if way == "torch":
        dist.init_process_group("nccl")
        links = [(0, 1), (1, 0)]
        return TorchTransport(here, links, timeout_s=_LONG_S, shapes_travel=False)
    host = NativeTransport(
        store(), me, [1 - me], run_id="queued", slots=4,
        wire="tcp" if way == "tcp" else "shm",
        slot_bytes=NOTE_BYTES if "ipc" in way else 4 * _SHAPE[0] * _SHAPE[1],
        for_device=True,
    )  # fmt: skip
    if "ipc" in way:
        return DirectTransport(
            host,
            device.sharing(here),
            me,
            timeout_s=_LONG_S,
            reports_copies=way == "ipc, telling",
        )
    return StagedTransport(host, device.copies(here), timeout_s=_LONG_S)


def _overwrite(device: torch.device) -> None:
    """Use the memory again that was freed last."""
    torch.full(_SHAPE, -5.0, device=device)


def _exchange(way: str, costs: Sequence[str]) -> list[str]:
    """Send what kernels compute, compute with what arrives, keep nothing; return what is wrong."""
    me = int(os.environ["RANK"])
    os.environ["FAKE_MUSA_COST"] = costs[me]  # read at the first use of the device
    transport, peer = _open(way, me), 1 - me
    device = torch.device("cuda", me)
    base = torch.arange(float(_SHAPE[0] * _SHAPE[1]), device=device).view(_SHAPE)
    wrong = []
    for step in range(2):
        found = []
        keys = [Message("F", 0, number) for number in range(_NUM_MESSAGES)]
        # One sends before it receives, the other after; wires whose order counts need to know.
        expected = [
            Expected(
                peer, key, _SHAPE, torch.float32, number + 2 * (number // 2 + 1 - me)
            )
            for number, key in enumerate(keys)
        ]
        transport.begin(expected, _NUM_MESSAGES)

        def send(key: Message, step: int = step) -> None:
            tensor = base * (1 + key.microbatch) + 100 * step + me
            transport.isend(tensor, peer, key)
            del tensor
            _overwrite(device)

        def take(key: Message, found: list[torch.Tensor] = found) -> None:
            tensor = transport.recv(peer, key, _LONG_S)
            found.append(tensor * 2)
            del tensor
            _overwrite(device)

        # Two at a time: the first is freed while its reader is late, and the second takes memory.
        for two in zip(keys[::2], keys[1::2], strict=True):
            for act in (take, send) if me else (send, take):
                for key in two:
                    act(key)
        transport.flush(_LONG_S)
        for key, tensor in zip(keys, found, strict=True):
            right = 2 * (base.cpu() * (1 + key.microbatch) + 100 * step + peer)
            if not torch.equal(tensor.cpu(), right):
                wrong.append(f"{key} of step {step}: {tensor.cpu()[0, :4].tolist()}")
    transport.close()
    return wrong


@pytest.mark.parametrize("late", _LATE)
@pytest.mark.parametrize("way", ["ipc", "ipc, telling", "shm", "tcp", "torch"])
def test_nothing_is_read_or_freed_too_early(way: str, late: str) -> None:
    found = run_ranks(2, _exchange, way, _LATE[late], device="musa", env=queued())
    assert found == [[], []]


def _one_way(way: str) -> list[str]:
    """Send to a rank whose device takes messages long after its host."""
    me = int(os.environ["RANK"])
    os.environ["FAKE_MUSA_COST"] = "copy_us=1" if me else "copy_us=20000"
    transport, peer = _open(way, me), 1 - me
    device = torch.device("cuda", me)
    base = torch.arange(float(_SHAPE[0] * _SHAPE[1]), device=device).view(_SHAPE)
    keys = [Message("F", 0, number) for number in range(6)]
    permits = [Message("C", 0, number) for number in range(6)]
    if me:
        transport.begin([Expected(peer, one, (0,), torch.uint8) for one in permits], 1)
        for key, credit in zip(keys, permits, strict=True):
            transport.isend(base * (1 + key.microbatch), peer, key)
            transport.recv(peer, credit, _LONG_S)
        transport.flush(_LONG_S)
        transport.close()
        return []
    found = []
    transport.begin([Expected(peer, key, _SHAPE, torch.float32) for key in keys], 1)
    for key, credit in zip(keys, permits, strict=True):
        found.append(transport.recv(peer, key, _LONG_S))
        transport.isend(torch.empty(0, dtype=torch.uint8), peer, credit)
    transport.flush(_LONG_S)
    wrong = [
        f"{key}: {tensor.cpu()[0, :4].tolist()}"
        for key, tensor in zip(keys, found, strict=True)
        if not torch.equal(tensor.cpu(), base.cpu() * (1 + key.microbatch))
    ]
    transport.close()
    return wrong


@pytest.mark.parametrize("way", ["ipc", "shm", "tcp"])
def test_a_buffer_is_used_again_when_its_reader_has_read(way: str) -> None:
    assert run_ranks(2, _one_way, way, device="musa", env=queued()) == [[], []]


@pytest.mark.parametrize("way", ["ipc", "shm", "tcp", "torch"])
def test_one_queue_for_everything(way: str) -> None:
    costs = ("jitter_us=100,seed=5", "jitter_us=100,seed=6")
    env = queued(connections=1)
    assert run_ranks(2, _exchange, way, costs, device="musa", env=env) == [[], []]


def _told() -> tuple[list[list[Message]], str, bool]:
    """Take one tensor when its launch is announced, and another when it is there."""
    me = int(os.environ["RANK"])
    os.environ["FAKE_MUSA_COST"] = "kernel_us=300000" if me == 0 else "kernel_us=1"
    transport = _open("ipc, telling", me)
    device = torch.device("cuda", me)
    one, other = (Message("F", 0, number) for number in range(2))
    if me == 0:
        transport.begin([], 2)
        for key in (one, other):
            transport.isend(torch.full(_SHAPE, 5.0, device=device), 1, key)
        transport.flush(_LONG_S)
        transport.close()
        return [], "", True
    transport.begin(
        [Expected(0, key, _SHAPE, torch.float32) for key in (one, other)], 2
    )
    polls = [list(transport.poll(_LONG_S))]
    while len(polls[0]) < 2:
        polls[0] += transport.poll(_LONG_S)
    behind = transport.recv(0, one, _LONG_S)
    error = ""
    try:
        transport.flush(0.01)
    except TransportTimeout as found:
        error = str(found)
    polls += [list(transport.poll(_LONG_S)), list(transport.poll(_LONG_S))]
    tensors = [behind, transport.recv(0, other, _LONG_S)]
    transport.flush(_LONG_S)
    right = all(bool((tensor.cpu() == 5.0).all()) for tensor in tensors)
    transport.close()
    return polls, error, right


def test_launches_are_told_before_tensors_are_there() -> None:
    _, (polls, error, right) = run_ranks(2, _told, device="musa", env=queued())
    one, other = (Message("F", 0, number) for number in range(2))
    assert polls == [[one.notice, other.notice], [one], [other]]
    assert error.startswith(f"{one} did not come from rank 0"), (
        "flush waits for what was received"
    )
    assert right


def _flushed() -> list[int]:
    """Take two tensors when their launches are announced; flush until both are there."""
    me = int(os.environ["RANK"])
    os.environ["FAKE_MUSA_COST"] = "kernel_us=300000" if me == 0 else "kernel_us=1"
    transport = _open("ipc, telling", me)
    device = torch.device("cuda", me)
    keys = [Message("F", 0, number) for number in range(2)]
    transport.begin([Expected(0, key, _SHAPE, torch.float32) for key in keys * me], 2)
    waited_for: list[int] = []
    if me == 0:
        for key in keys:
            transport.isend(torch.full(_SHAPE, 5.0, device=device), 1, key)
        transport.flush(_LONG_S)
    else:
        for key in keys:
            transport.recv(0, key, _LONG_S)
        for _ in range(100):
            try:
                transport.flush(0.05)
                break
            except TransportTimeout as error:
                waited_for += [
                    key.microbatch for key in keys if str(error).startswith(str(key))
                ]
    transport.close()
    return waited_for


def test_a_flush_that_timed_out_is_repeated_for_what_is_left() -> None:
    _, waited_for = run_ranks(2, _flushed, device="musa", env=queued())
    assert waited_for == sorted(waited_for)
    assert set(waited_for) == {0, 1}
