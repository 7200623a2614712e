"""No bit that flips between two hosts goes unnoticed, and none is met as anything but damage."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import TransportError, TransportTimeout
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport

from .native_ranks import LONG_S, equal, tensor_of

_SHAPES = (
    ((3,), torch.float32),
    ((2, 5), torch.bfloat16),
    ((0,), torch.int64),
    ((700,), torch.uint8),
)
_HEADER_BYTES = 128
_BYTES = sum(
    _HEADER_BYTES + torch.Size(shape).numel() * dtype.itemsize
    for shape, dtype in _SHAPES
)
_runs = itertools.count()


class _Store:
    """Addresses of two ranks in one process; rank 0 finds rank 1 behind the proxy."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._news = threading.Condition()
        self.proxy_port = 0
        self.real_port = 0

    def set(self, key: str, value: str) -> None:
        if key.endswith("/1"):
            address = json.loads(value)
            self.real_port, address["port"] = address["port"], self.proxy_port
            value = json.dumps(address)
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def get(self, key: str) -> bytes:
        with self._news:
            if not self._news.wait_for(lambda: key in self._values, LONG_S):
                raise RuntimeError(f"{key} was never published")
            return self._values[key].encode()


def _carry(
    source: socket.socket, target: socket.socket, greeting: int, flip: int | None
) -> None:
    """Pass bytes on, with bit `flip` of those after the greeting flipped."""
    position = -greeting
    try:
        while part := bytearray(source.recv(1 << 16)):
            if flip is not None and 0 <= flip // 8 - position < len(part):
                part[flip // 8 - position] ^= 1 << flip % 8
            position += len(part)
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # either end has closed: the other hears of it when the proxy does


@contextmanager
def _proxy(store: _Store, answers: bool, flip: int) -> Iterator[None]:
    """Stand between the ranks, and flip a bit in one of the two directions."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(3) as pool,
    ):
        store.proxy_port = listener.getsockname()[1]

        def serve() -> None:
            calling, _ = listener.accept()
            with (
                calling,
                socket.create_connection(("127.0.0.1", store.real_port)) as real,
            ):
                hello = bytearray()
                while not hello.endswith(b"\n"):
                    hello += calling.recv(1)
                real.sendall(hello)
                there = pool.submit(_carry, calling, real, 0, None if answers else flip)
                back = pool.submit(_carry, real, calling, 32, flip if answers else None)
                there.result(LONG_S)
                back.result(LONG_S)

        served = pool.submit(serve)
        yield
        served.result(LONG_S)


def _talk(rank: int, store: _Store, run_id: str) -> TransportError | None:
    """Send everything and receive the same; why that failed, if it did."""
    peer = 1 - rank
    expected = [
        Expected(peer, Message("F", rank, i), shape, dtype)
        for i, (shape, dtype) in enumerate(_SHAPES)
    ]
    transport = NativeTransport(
        store, rank, [peer], run_id=run_id, wire="tcp", ip="127.0.0.1", slots=4,
        slot_bytes=4096, checksums=True, connect_timeout_s=LONG_S,
    )  # fmt: skip
    try:
        transport.begin(expected, len(expected))
        for i, (shape, dtype) in enumerate(_SHAPES):
            key = Message("F", peer, i)
            transport.isend(tensor_of(key, rank, shape, dtype), peer, key)
        for _, key, shape, dtype, _ in expected:
            assert shape is not None
            received = transport.recv(peer, key, LONG_S)
            assert equal(received, tensor_of(key, peer, shape, dtype)), (
                f"damaged: {key}"
            )
        transport.flush(LONG_S)
    except TransportError as error:
        transport.abort(str(error))
        return error
    finally:
        transport.close()
    return None


@pytest.mark.usefixtures("native")
@settings(max_examples=60)
@given(answers=st.booleans(), flip=st.integers(0, 8 * _BYTES - 1))
@example(answers=False, flip=8 * 4)  # the dtype
@example(answers=False, flip=8 * 16)  # the tag
@example(answers=False, flip=8 * 24 + 62)  # the size
@example(answers=True, flip=8 * _HEADER_BYTES)  # a tensor
def test_each_flipped_bit_is_found(answers: bool, flip: int) -> None:
    store = _Store()
    run_id = str(next(_runs))
    with _proxy(store, answers, flip), ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(_talk, range(2), [store] * 2, [run_id] * 2))
    receiver = 0 if answers else 1
    found = errors[receiver]
    assert found is not None, "it was neither noticed nor changed a tensor"
    assert not any(isinstance(error, TransportTimeout) for error in errors)
    assert f"rank {1 - receiver} are damaged" in str(found)
