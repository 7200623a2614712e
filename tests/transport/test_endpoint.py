"""The endpoint of the native core as Python sees it; messages to itself need no peer."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from megatron_ext.errors import MessageMismatch, TransportError
from megatron_ext.transport.dtypes import tensor_on

_BYTES = 1 << 8 | 8


def _send(
    endpoint, tag: int, dtype: int, shape: tuple[int, ...], content: bytes
) -> None:
    buffer = ctypes.create_string_buffer(content, max(1, len(content)))
    endpoint.send(0, tag, dtype, shape, ctypes.addressof(buffer), buffer)


def test_a_message_of_the_dtype_that_is_asked_for_comes_as_a_capsule(native):
    endpoint = native.Endpoint(0, 2, 4096)
    for tag in range(3):
        _send(endpoint, tag, _BYTES, (2, 3), b"abcdef")
    tensor = torch.from_dlpack(endpoint.take(0, 0, 0, _BYTES))
    assert (tensor.shape, bytes(tensor.numpy())) == ((2, 3), b"abcdef")
    for tag, wanted in ((1, 0), (2, 2 << 8 | 8)):  # not asked for; another one
        message = endpoint.take(0, tag, 0, wanted)
        assert (message.dtype, message.shape, bytes(message)) == (
            _BYTES,
            (2, 3),
            b"abcdef",
        )
    _send(endpoint, 3, _BYTES, (0, 3), b"")
    assert len(endpoint.take(0, 3, 0, _BYTES)) == 0  # no capsule on no bytes
    assert endpoint.take(0, 4, 0, _BYTES) is None
    endpoint.close()
    assert bytes(tensor.numpy()) == b"abcdef"


def test_a_dtype_that_this_torch_does_not_have_is_refused(native):
    endpoint = native.Endpoint(0, 2, 4096)
    _send(endpoint, 0, 99 << 8 | 16, (3,), b"abcdef")
    with pytest.raises(
        MessageMismatch, match=r"6 bytes has dtype 0x6310, .* install the same"
    ):
        tensor_on(endpoint.take(0, 0, 0))


def test_the_size_of_a_message_is_that_of_its_shape(native):
    endpoint = native.Endpoint(0, 2, 4096)
    _send(endpoint, 0, 2 << 8 | 32, (2, 1, 3), bytes(24))
    _send(endpoint, 1, 2 << 8 | 64, (), bytes(8))
    assert [len(endpoint.take(0, tag, 0)) for tag in range(2)] == [24, 8]
    counts = endpoint.counts()
    assert (counts.num_messages, counts.num_bytes) == (2, 32)
    with pytest.raises(ValueError, match="cannot be -1"):
        _send(endpoint, 2, _BYTES, (4, -1), b"")
    with pytest.raises(ValueError, match="at most 8 dimensions, got 9"):
        _send(endpoint, 2, _BYTES, (1,) * 9, b"a")
    with pytest.raises(ValueError, match="2\\^64 bytes or more"):
        _send(endpoint, 2, _BYTES, (1 << 32, 1 << 32), b"")
    with pytest.raises(TypeError):
        _send(endpoint, 2, _BYTES, (1.5,), b"a")


def _checksum(content: bytes) -> int:
    """The core's checksum over the words of a header."""
    result = 0xCBF29CE484222325 ^ len(content)
    for (word,) in struct.iter_unpack("<Q", content):
        result = (result ^ word) * 0x100000001B3 % 2**64
        result ^= result >> 29
    return result


def _tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        return calling, listener.accept()[0]


@pytest.mark.parametrize("shape", [(1 << 40,), (-4,), (3,), (1 << 62, 4), ()])
def test_a_tensor_is_never_made_larger_than_the_bytes_that_came(native, shape):
    mine, theirs = _tcp_sockets()
    endpoint = native.Endpoint(0, 2, 4096)
    with mine, theirs:
        endpoint.add(1, native.TcpLink(endpoint, 1, mine))
        sizes = [*shape, *[0] * (8 - len(shape))]
        head = struct.pack(
            "<I4B6Q8q", 0x4D455831, 1, 8, len(shape), 0, 0, 7, 4, 0, 4, 0, *sizes
        )
        theirs.sendall(head + struct.pack("<Q", _checksum(head)) + b"abcd")
        with pytest.raises(TransportError, match=r"rank 1 are damaged: .* its 4 bytes"):
            endpoint.take(1, 7, 60, _BYTES)
        endpoint.close()


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_a_reason_is_text_wherever_it_was_cut(native, wire):
    sockets = (
        _tcp_sockets()
        if wire == "tcp"
        else socket.socketpair(type=socket.SOCK_SEQPACKET)
    )
    first, second = (native.Endpoint(rank, 2, 4096) for rank in range(2))
    with closing(first), closing(second), sockets[0], sockets[1]:
        make = native.TcpLink if wire == "tcp" else native.ShmLink
        links = [make(first, 1, sockets[0]), make(second, 0, sockets[1])]
        if wire == "shm":
            for link in links:
                link.accept(60)
        first.add(1, links[0])
        second.add(0, links[1])
        first.abort("reason: " + "\u20ac" * 3000)  # three bytes each
        assert second.take(0, 1, 60) is None
        (report,) = second.peers()
        assert report.state == "aborted"
        assert report.reason.startswith("reason: " + "\u20ac" * 1300)


@pytest.mark.parametrize("seconds", [-1e-6, 1.5, float("nan")])
def test_a_spin_that_is_no_short_time_is_refused(native, seconds):
    with pytest.raises(ValueError, match="a spin lasts 0 to 1 seconds"):
        native.Endpoint(0, 2, 4096).set_spin(seconds)


def test_time_in_waits_is_counted(native):
    endpoint = native.Endpoint(0, 2, 4096)
    assert endpoint.take(0, 1, 0.02) is None
    assert endpoint.counts().last_wait_s >= 0.02
    assert endpoint.take(0, 1, 0.0) is None
    counts = endpoint.counts()
    assert counts.last_wait_s == 0.0
    assert counts.waited_s >= 0.02


_FINALIZER = """
import socket, sys
from megatron_ext.transport import _C as native

class Owner(bytearray):
    def __del__(self):
        gone.append(endpoint.counts().num_messages)

with socket.create_server(("127.0.0.1", 0)) as listener:
    calling = socket.create_connection(listener.getsockname())
    answering, _ = listener.accept()
if sys.argv[1] == "shm":
    calling, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
gone = []
endpoint = native.Endpoint(0, 2, 4096)
peer = native.Endpoint(1, 2, 4096)
if sys.argv[1] == "shm":
    links = native.ShmLink(endpoint, 1, calling), native.ShmLink(peer, 0, answering)
    for link in links:
        link.accept(60.0)
else:
    links = (native.TcpLink(endpoint, 1, calling),)  # and nobody reads
endpoint.add(1, links[0])
del links  # the endpoint has its own
num_bytes = 1 << 23  # more than the room, and than the kernel holds
content = torch.zeros(num_bytes, dtype=torch.uint8)
for tag in range(3):
    endpoint.send(1, tag, 0x108, (num_bytes,), content.data_ptr(), Owner())
assert endpoint.peers()[0].num_queued
endpoint.abort("enough") if sys.argv[2] == "abort" else endpoint.close()
endpoint.close()
assert gone == [3, 3, 3], gone
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wire", ["shm", "tcp"])
@pytest.mark.parametrize("end", ["abort", "close"])
def test_an_owner_that_is_dropped_may_call_the_endpoint(wire, end):
    command = [sys.executable, "-c", f"import torch{_FINALIZER}", wire, end]
    subprocess.run(command, check=True, timeout=60)
