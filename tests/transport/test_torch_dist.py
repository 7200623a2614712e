"""The transport over torch.distributed, between real gloo ranks."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.errors import TransportError
from megatron_ext.message import Message
from megatron_ext.transport import torch_dist
from megatron_ext.transport.base import Expected
from megatron_ext.transport.torch_dist import TorchTransport
from tests.ranks import run_ranks, start_ranks
from tests.transport.native_ranks import store

_SHAPE = (2, 3)


def _open(*, shapes_travel: bool = False) -> TorchTransport:
    dist.init_process_group("gloo")
    links = [(0, 1), (1, 0)]
    return TorchTransport(
        torch.device("cpu"), links, timeout_s=30, shapes_travel=shapes_travel
    )


def _value(key: Message) -> torch.Tensor:
    return torch.full(
        _SHAPE, float(key.microbatch + 10 * key.slice + 100 * (key.kind == "B"))
    )


def _expected(
    keys: list[Message], source: int, dtype: torch.dtype = torch.float32
) -> list[Expected]:
    return [Expected(source, key, _SHAPE, dtype) for key in keys]


def _gone() -> str:
    """Rank 1 aborts and ends; rank 0, which keeps the store, waits for it."""
    transport = _open()
    key = Message("F", 1, 0)
    if dist.get_rank() == 1:
        store().wait(["open"])  # or its end could meet rank 0 while that still connects
        transport.abort("stage 1, micro-batch 0: too long")
        os._exit(0)
    transport.begin(_expected([key], 1), slots=1)
    store().set("open", "")
    with pytest.raises(TransportError) as raised:
        transport.recv(1, key, 30)
    return str(raised.value)


def test_the_reason_of_a_peer_that_aborted() -> None:
    ended = start_ranks(2, _gone)
    assert ended.values[0], ended.describe()
    assert ended.values[0].endswith("it aborted: stage 1, micro-batch 0: too long")


def test_a_store_that_does_not_answer_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = SimpleNamespace(check=lambda _: time.sleep(60))
    monkeypatch.setattr(torch_dist, "_store", lambda: silent)
    monkeypatch.setattr(torch_dist, "_STORE_S", 0.1)
    assert torch_dist._reason(1, RuntimeError("Timed out\nand where")) == "Timed out"


def _any_order() -> int:
    """Both ends send everything first, then take it in an order of their own."""
    transport = _open()
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    for step in range(3):
        keys = [
            Message(kind, 1, i % 3, i // 3) for i in range(6) for kind in ("F", "B")
        ]
        transport.begin(_expected(keys, peer), slots=6)
        for key in keys:
            tensor = _value(key) + step
            transport.isend(tensor, peer, key)
            tensor.data = torch.empty(1)  # what freeing an output does
        for key in sorted(keys, key=lambda key: hash((me, key.microbatch * 5 % 7))):
            assert torch.equal(transport.recv(peer, key, 30), _value(key) + step)
        transport.flush(30)
    stats = transport.stats()
    assert (stats.messages, stats.bytes) == (36, 36 * 24)
    transport.close()
    return stats.messages


def test_messages_are_taken_in_any_order() -> None:
    assert run_ranks(2, _any_order) == [36, 36]


def _several_tensors() -> None:
    """Both ends send all tensors of a message before either starts to receive."""
    transport = _open()
    peer = 1 - dist.get_rank()
    keys = [Message("F", 1, 0, part=part) for part in range(6)]
    transport.begin(
        [Expected(peer, key, _SHAPE, torch.float32, len(keys)) for key in keys], 1
    )
    for key in keys:
        transport.isend(_value(key) + key.part, peer, key)
    for key in keys:
        assert torch.equal(transport.recv(peer, key, 30), _value(key) + key.part)
    transport.flush(30)


def test_no_send_waits_for_the_other_tensors_of_its_message() -> None:
    run_ranks(2, _several_tensors)


def _shapes() -> None:
    transport = _open(shapes_travel=True)
    peer = 1 - dist.get_rank()
    tensors = [torch.randn(i + 1, 2 * i, dtype=torch.bfloat16) for i in range(3)]
    tensors.append(torch.tensor(3.0, dtype=torch.bfloat16))
    keys = [Message("F", 0, i, part=1) for i in range(len(tensors))]
    transport.begin(
        [Expected(peer, key, None, torch.bfloat16) for key in keys], slots=1
    )
    received = []
    for key, tensor in zip(keys, tensors, strict=True):
        transport.isend(tensor, peer, key)
        received.append(transport.recv(peer, key, 30))
    assert [r.shape for r in received] == [t.shape for t in tensors]
    others: list[object] = [None, None]
    dist.all_gather_object(others, tensors)
    theirs = others[peer]
    assert isinstance(theirs, list)
    assert all(torch.equal(r, t) for r, t in zip(received, theirs, strict=True))


def test_shapes_travel_where_the_receiver_does_not_know_them() -> None:
    run_ranks(2, _shapes)


def _silent_peer() -> str:
    transport = _open()
    if dist.get_rank() == 1:
        key = Message("F", 3, 7)
        transport.begin(_expected([key], 0), slots=1)
        with pytest.raises(TransportError) as raised:
            transport.recv(0, key, 0.5)
        store().set("raised", "")
        return str(raised.value)
    store().wait(["raised"])  # a peer that is gone is another error
    return ""


def test_a_message_that_does_not_come_is_named() -> None:
    message = run_ranks(2, _silent_peer)[1]
    assert "the activation that stage 3 needs for micro-batch 7" in message
    assert "did not come from rank 0" in message
    assert "of 0.5 s" in message


def _misuse() -> None:
    transport = _open()
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    key = Message("B", 0, 0)
    transport.begin(_expected([key], peer), slots=1)
    with pytest.raises(TransportError, match="is not expected from rank"):
        transport.recv(peer, Message("B", 0, 1), 1)
    with pytest.raises(
        TransportError, match="cannot report whether a message has arrived"
    ):
        transport.poll(0)
    with pytest.raises(TransportError, match="was never received"):
        transport.begin([], slots=1)
    with pytest.raises(TransportError, match="at most 512 stages"):
        transport.isend(_value(key), peer, Message("F", 2000, 0))
    with pytest.raises(TransportError, match="does not send shapes"):
        TorchTransport(
            torch.device("cpu"), [(peer, me)], timeout_s=30, shapes_travel=False
        ).begin([Expected(peer, Message("F", 0, 0), None, torch.float32)], slots=1)
    transport.isend(_value(key), peer, key)
    assert torch.equal(transport.recv(peer, key, 30), _value(key))
    transport.flush(30)
    transport.close()
    transport.close()


def test_misuse_is_told() -> None:
    run_ranks(2, _misuse)


def _lazy_signs() -> None:
    transport = _open()
    peer = 1 - dist.get_rank()
    key = Message("F", 1, 0)
    lazy = torch._neg_view(
        torch.arange(6.0).reshape(_SHAPE)
    )  # gloo sends no complex numbers
    assert lazy.is_neg()
    transport.begin(_expected([key], peer), slots=1)
    transport.isend(lazy, peer, key)
    assert torch.equal(transport.recv(peer, key, 30), lazy.clone())
    transport.flush(30)
    transport.close()


def test_views_that_only_note_their_sign_arrive_with_it() -> None:
    run_ranks(2, _lazy_signs)
