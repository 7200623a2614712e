from __future__ import annotations

import os
import signal
import threading
import time

import pytest

LONG_S = 60.0


@pytest.fixture
def segment(native):
    return native.Segment.create(64)


@pytest.fixture
def bell(native, segment):
    return native.Doorbell(segment)


def test_rings_are_counted_and_not_lost(bell):
    seen = bell.sequence
    assert seen == 0
    bell.ring()
    bell.ring()
    assert bell.sequence == 2
    assert bell.wait(seen)
    assert not bell.wait(2, timeout_s=0)


@pytest.mark.parametrize("timeout_s", [0, 0.01, 0.15, 0.3])
def test_a_time_out_is_never_early(bell, timeout_s):
    start = time.monotonic()
    assert not bell.wait(0, timeout_s)
    assert time.monotonic() - start >= timeout_s


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("-inf")])
def test_time_outs_that_are_no_time_are_refused(bell, timeout_s):
    with pytest.raises(ValueError, match="must be >= 0 seconds"):
        bell.wait(0, timeout_s)


def test_words_are_independent(native, segment):
    first, second = native.Doorbell(segment, 0), native.Doorbell(segment, offset_bytes=60)
    same = native.Doorbell(native.Segment.attach(segment), 60)
    second.ring()
    assert (first.sequence, second.sequence, same.sequence) == (0, 1, 1)


@pytest.mark.parametrize("offset_bytes", [-4, 2, 61, 64, 2**62])
def test_words_outside_of_the_segment_are_refused(native, segment, offset_bytes):
    with pytest.raises(ValueError, match=f"segment of 64 bytes, got {offset_bytes}"):
        native.Doorbell(segment, offset_bytes)


def test_a_segment_may_be_too_small_for_any_doorbell(native):
    with pytest.raises(ValueError, match="segment of 3 bytes"):
        native.Doorbell(native.Segment.create(3))


def test_a_doorbell_keeps_its_memory(native):
    bell = native.Doorbell(native.Segment.create(4))
    bell.ring()
    assert bell.sequence == 1


def test_a_waiting_thread_lets_others_run(bell):
    woken = []
    thread = threading.Thread(target=lambda: woken.append(bell.wait(0, LONG_S)))
    thread.start()
    bell.ring()
    thread.join()
    assert woken == [True]


def test_two_processes_ring_each_other(native, segment, start_peer):
    peer = start_peer(
        """
        segment = _C.Segment.receive(sock, timeout_s=60)
        ping, pong, data = _C.Doorbell(segment, 0), _C.Doorbell(segment, 4), memoryview(segment)
        for turn in range(500):
            assert ping.wait(turn, timeout_s=60)
            data[8 + turn % 50] ^= 1
            pong.ring()
        """
    )
    segment.send(peer.sock)
    ping, pong, data = native.Doorbell(segment, 0), native.Doorbell(segment, 4), memoryview(segment)
    for turn in range(500):
        before = data[8 + turn % 50]
        ping.ring()
        assert pong.wait(turn, timeout_s=LONG_S)
        assert data[8 + turn % 50] == before ^ 1
    peer.join()


def test_one_ring_wakes_all_processes(segment, bell, start_peer):
    code = """
        bell = _C.Doorbell(_C.Segment.receive(sock, timeout_s=60))
        say(b"r")
        assert bell.wait(0)
        """
    peers = [start_peer(code) for _ in range(3)]
    for peer in peers:
        segment.send(peer.sock)
    for peer in peers:
        assert peer.hear() == b"r"
        peer.wait_until_asleep()
    bell.ring()
    for peer in peers:
        peer.join()


def test_a_forked_child_shares_the_doorbell(start_peer):
    peer = start_peer(
        """
        bell = _C.Doorbell(_C.Segment.create(4))
        child = os.fork()
        if child == 0:
            bell.ring()
            os._exit(0)
        assert bell.wait(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    peer.join()


def test_killed_waiters_leave_the_doorbell_usable(segment, bell, start_peer):
    code = """
        bell = _C.Doorbell(_C.Segment.receive(sock, timeout_s=60))
        say(b"r")
        bell.wait(bell.sequence)
        say(b"w")
        """
    killed, other = start_peer(code), start_peer(code)
    for peer in (killed, other):
        segment.send(peer.sock)
        assert peer.hear() == b"r"
        peer.wait_until_asleep()
    killed.kill()
    bell.ring()
    assert other.hear() == b"w"
    assert not bell.wait(1, timeout_s=0.01)


def test_ctrl_c_ends_a_wait(start_peer):
    peer = start_peer(
        """
        bell = _C.Doorbell(_C.Segment.create(4))
        try:
            say(b"r")
            bell.wait(0)
        except KeyboardInterrupt:
            say(b"i")
        assert bell.sequence == 0
        """
    )
    assert peer.hear() == b"r"
    peer.wait_until_asleep()
    peer.process.send_signal(signal.SIGINT)
    assert peer.hear() == b"i"
    peer.join()


def test_other_signals_are_handled_during_the_wait(segment, bell, start_peer):
    peer = start_peer(
        """
        segment = _C.Segment.receive(sock, timeout_s=60)
        signal.signal(signal.SIGUSR1, lambda *_: say(b"h"))
        say(b"r")
        assert _C.Doorbell(segment).wait(0)
        say(b"w")
        """
    )
    segment.send(peer.sock)
    assert peer.hear() == b"r"
    for _ in range(3):
        peer.wait_until_asleep()
        os.kill(peer.pid, signal.SIGUSR1)
        assert peer.hear() == b"h"
    bell.ring()
    assert peer.hear() == b"w"
    peer.join()
