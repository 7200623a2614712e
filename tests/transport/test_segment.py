from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import TransportError


def num_open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_new_segment_is_a_writable_buffer_of_zeros(native):
    segment = native.Segment.create(5000)
    assert (len(segment), segment.size_bytes) == (5000, 5000)
    assert repr(segment) == f"<Segment of 5000 bytes, fd {segment.fileno()}>"
    view = memoryview(segment)
    assert (view.format, view.nbytes, view.readonly) == ("B", 5000, False)
    assert bytes(view) == bytes(5000)
    view[4999] = 7
    assert bytes(segment)[4999] == 7


def test_tensors_share_the_memory_and_keep_it(native):
    segment = native.Segment.create(4096)
    tensor = torch.frombuffer(segment, dtype=torch.float32)
    tensor.fill_(1.5)
    assert bytes(segment) == bytes(tensor.numpy())
    assert tensor.data_ptr() % 4096 == 0
    del segment
    assert tensor.sum().item() == 1.5 * 1024


@pytest.mark.parametrize("wrap", [lambda segment: segment, lambda segment: segment.fileno()])
def test_attached_segments_share_their_bytes(native, wrap):
    first = native.Segment.create(100)
    second = native.Segment.attach(wrap(first))
    assert second.fileno() != first.fileno()
    memoryview(first)[99] = 3
    del first
    assert bytes(second)[99] == 3


def test_a_segment_goes_to_another_process_and_back(native, start_peer):
    peer = start_peer(
        """
        segment = _C.Segment.receive(sock, timeout_s=60)
        memoryview(segment)[:5] = b"hello"
        own = _C.Segment.create(1 << 20)
        memoryview(own)[-5:] = b"world"
        own.send(sock)
        """
    )
    segment = native.Segment.create(10)
    segment.send(peer.sock)
    theirs = native.Segment.receive(peer.sock, timeout_s=60)
    peer.join()
    assert bytes(segment) == b"hello" + bytes(5)
    assert theirs.size_bytes == 1 << 20
    assert bytes(theirs)[-5:] == b"world"


def test_a_killed_process_leaves_nothing_behind(native, start_peer):
    peer = start_peer(
        """
        segment = _C.Segment.create(1 << 24)
        segment.send(sock)
        others = [_C.Segment.create(1 << 20) for _ in range(10)]
        while True:
            memoryview(segment)[0] = 1
        """
    )
    segment = native.Segment.receive(peer.sock, timeout_s=60)
    while bytes(segment)[0] == 0:
        pass
    # Only files without a name are in use, so there is nothing that anybody would have to remove.
    maps = Path(f"/proc/{peer.pid}/maps").read_text()
    assert maps.count("/memfd:megatron_ext (deleted)") == 11
    assert "/dev/shm" not in maps
    peer.kill()
    memoryview(segment)[-1] = 2
    assert (bytes(segment)[0], bytes(segment)[-1]) == (1, 2)


def test_no_descriptor_is_leaked(native):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = num_open_descriptors()
        for _ in range(20):
            segment = native.Segment.create(10)
            segment.send(ours)
            received = native.Segment.receive(theirs)
            copy = native.Segment.attach(received)
            native.Doorbell(copy)
            with pytest.raises(TransportError):
                native.Segment.attach(ours)
        assert num_open_descriptors() == before + 3
        del segment, received, copy
        assert num_open_descriptors() == before


def test_programs_started_later_do_not_inherit_it(native):
    segment = native.Segment.create(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        segment.send(ours)
        received = native.Segment.receive(theirs)
    for each in (segment, received, native.Segment.attach(segment)):
        assert not os.get_inheritable(each.fileno())


def test_the_size_is_sealed(native):
    segment = native.Segment.create(5000)
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), size_bytes)


@pytest.mark.parametrize(
    ("size_bytes", "got"), [(0, "got 0"), (-1, "got -1"), (2**63 - 1, "bytes")]
)
def test_sizes_that_are_none_are_refused(native, size_bytes, got):
    with pytest.raises(ValueError, match=got):
        native.Segment.create(size_bytes)


def test_too_little_memory_names_bytes_limit_and_remedy(native):
    with pytest.raises(
        TransportError, match=r"segment of 1125899906842624 bytes: .* leaves \d+ bytes"
    ) as caught:
        native.Segment.create(1 << 50)
    assert "ask for less or raise that limit" in str(caught.value)


def test_foreign_files_are_refused(native):
    unsealed = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 8192)
    with os.fdopen(unsealed), pytest.raises(TransportError, match="not a sealed memfd"):
        native.Segment.attach(unsealed)
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(TransportError, match="not a sealed memfd"),
    ):
        native.Segment.attach(file)
    with pytest.raises(TransportError, match="Bad file descriptor"):
        native.Segment.attach(10_000)
    with pytest.raises(TypeError):
        native.Segment.attach("segment")


def test_a_truncated_copy_is_refused(native):
    segment = native.Segment.create(5000)
    header = os.pread(segment.fileno(), 4096, 0)
    copy = os.memfd_create("truncated", os.MFD_ALLOW_SEALING)
    with os.fdopen(copy):
        os.pwrite(copy, header + bytes(4999), 0)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.fcntl(segment, fcntl.F_GET_SEALS))
        with pytest.raises(TransportError, match=r"says 5000 bytes .* the file has 4999 bytes"):
            native.Segment.attach(copy)


def test_receiving_fails_with_a_reason(native):
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(TransportError, match="did not answer within"):
            native.Segment.receive(ours, timeout_s=0.01)
        with pytest.raises(ValueError, match="nan"):
            native.Segment.receive(ours, timeout_s=float("nan"))
        theirs.sendall(b"x")
        with pytest.raises(TransportError, match="byte 120 with 0 descriptors"):
            native.Segment.receive(ours)
        socket.send_fds(theirs, [b"F"], [theirs.fileno()])
        with pytest.raises(TransportError, match="not a sealed memfd"):
            native.Segment.receive(ours)
        theirs.close()
        with pytest.raises(TransportError, match="the peer closed the connection"):
            native.Segment.receive(ours)
        with pytest.raises(TransportError, match="Broken pipe"):
            native.Segment.create(1).send(ours)


def test_ctrl_c_ends_a_receive(start_peer):
    peer = start_peer(
        """
        try:
            say(b"r")
            _C.Segment.receive(sock)
        except KeyboardInterrupt:
            say(b"i")
        """
    )
    assert peer.hear() == b"r"
    peer.wait_until_asleep()
    peer.process.send_signal(2)
    assert peer.hear() == b"i"
    peer.join()
