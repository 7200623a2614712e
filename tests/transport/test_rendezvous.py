"""How processes of one job find each other; here they are threads of one process."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.rendezvous import connect_local

_PREFIX = "mext/run/addr/"


class MemoryStore:
    """A store that waits a short while for keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.timeout_s = 30.0

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, self.timeout_s):
                raise RuntimeError(f"wait timeout for {key}")
            return self.values[key]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def connect(store, rank, peers, timeout_s=30.0, run_id="run"):
    return connect_local(store, rank, peers, run_id=run_id, timeout_s=timeout_s)


def connect_all(store, num_ranks, run_id="run"):
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [
            pool.submit(connect, store, rank, range(num_ranks), run_id=run_id)
            for rank in range(num_ranks)
        ]
        return [future.result() for future in futures]


def close_all(links) -> None:
    for sockets in links:
        for link in sockets.values():
            link.close()


def test_every_pair_is_connected(store) -> None:
    links = connect_all(store, 5)
    for rank, sockets in enumerate(links):
        for peer, link in sockets.items():
            link.send(f"from {rank} to {peer}".encode())
    for rank, sockets in enumerate(links):
        assert sorted(sockets) == [peer for peer in range(5) if peer != rank]
        for peer, link in sockets.items():
            assert link.recv(100).decode() == f"from {peer} to {rank}"
    close_all(links)


def test_a_store_with_addresses_of_a_former_run_does_no_harm(store) -> None:
    close_all(connect_all(store, 3))
    links = connect_all(store, 3)
    assert [len(sockets) for sockets in links] == [2, 2, 2]
    close_all(links)


def test_two_jobs_on_one_store_do_not_meet(store) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda run_id: connect_all(store, 2, run_id), ["a", "b"])
    first[0][1].send(b"a")
    second[0][1].send(b"b")
    assert (first[1][0].recv(1), second[1][0].recv(1)) == (b"a", b"b")
    close_all(first + second)


def test_ranks_that_do_not_come_are_named(store) -> None:
    store.timeout_s = 0.1
    with pytest.raises(TransportError, match="rank 4 did not publish an address for rank 1: wait"):
        connect(store, 1, [4])
    with pytest.raises(TransportError, match=r"rank 4 waited 0\.1 s for rank 1 to connect on host"):
        connect(store, 4, [1], timeout_s=0.1)
    # Now there is an address, but nobody listens any more.
    with pytest.raises(TransportError, match=r"rank 1 waited 0\.2 s for rank 4 to listen"):
        connect(store, 1, [4], timeout_s=0.2)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("host", "elsewhere", "shares no memory with rank 1: it runs on host elsewhere"),
        ("boot_id", "other", "it runs on host"),
        ("network", 1, "another network namespace"),
        ("version", "0.0", "it runs megatron_ext 0.0"),
        ("secrets", "x", "cannot be read .* install the same megatron_ext"),
    ],
)
def test_processes_that_share_no_memory_are_refused(store, field, value, reason) -> None:
    with pytest.raises(TransportError):
        connect(store, 1, [0], timeout_s=0.05)
    address = json.loads(store.values[f"{_PREFIX}1"])
    store.set(f"{_PREFIX}1", json.dumps({**address, field: value}))
    with pytest.raises(TransportError, match=reason):
        connect(store, 0, [1], timeout_s=5)


def test_whoever_does_not_know_the_secret_is_turned_away(store, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(connect, store, 1, [0])
        address = json.loads(store.get(f"{_PREFIX}1"))
        for hello in ({"rank": 0, "mine": "?", "yours": "?"}, {"rank": 0}, [], "x"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(f"\0{address['name']}")
                store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
                stranger.send(json.dumps(hello).encode())
                assert stranger.recv(100) == b""
        calling = pool.submit(connect, store, 0, [1])
        links = [calling.result(), listening.result()]
    assert sorted(map(list, links)) == [[0], [1]]
    assert caplog.text.count("turned a connection away") == 4
    close_all(links)
