"""How processes of one job find each other; here they are threads of one process."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport import rendezvous
from megatron_ext.transport.rendezvous import _Rendezvous, connect_peers

if TYPE_CHECKING:
    from megatron_ext.transport.address import Address

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


def connect(store, rank, peers, timeout_s=30.0, run_id="run", wire="shm", **options):
    made = connect_peers(
        store, rank, peers, run_id=run_id, timeout_s=timeout_s, wire=wire, **options
    )
    assert {connection.wire for connection in made.values()} <= {wire}
    return {peer: connection.socket for peer, connection in made.items()}


def connect_all(store, num_ranks, run_id="run", wire="shm"):
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [
            pool.submit(
                connect, store, rank, range(num_ranks), run_id=run_id, wire=wire
            )
            for rank in range(num_ranks)
        ]
        return [future.result() for future in futures]


def close_all(links) -> None:
    for sockets in links:
        for link in sockets.values():
            link.close()


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_any_two_ranks_are_connected(store, wire) -> None:
    links = connect_all(store, 5, wire=wire)
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


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_two_jobs_on_one_store_do_not_meet(store, wire) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda run_id: connect_all(store, 2, run_id, wire), ["a", "b"]
        )
    first[0][1].send(b"a")
    second[0][1].send(b"b")
    assert (first[1][0].recv(1), second[1][0].recv(1)) == (b"a", b"b")
    close_all(first + second)


def test_ranks_that_do_not_come_are_named(store) -> None:
    store.timeout_s = 0.1
    with pytest.raises(
        TransportError, match="rank 4 did not publish an address for rank 1: wait"
    ):
        connect(store, 1, [4])
    told = r"rank 4 on host \S+ waited 0\.1 s for rank 1 to connect"
    with pytest.raises(TransportError, match=told):
        connect(store, 4, [1], timeout_s=0.1)
    # Now there is an address, but nobody listens any more.
    told = r"rank 1 on host \S+ waited 0\.2 s for rank 4 to listen"
    with pytest.raises(TransportError, match=told):
        connect(store, 1, [4], timeout_s=0.2)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (
            "host",
            "elsewhere",
            "shares no memory with rank 1: it runs on host elsewhere",
        ),
        ("boot_id", "other", "it runs on host"),
        ("network", 1, "another network namespace"),
        ("version", "0.0", "rank 1 runs megatron_ext 0.0"),
        ("wire", "tcp", "uses transport tcp, but rank 0 uses shm; use the same"),
        ("secrets", "x", "cannot be read .* install the same megatron_ext"),
    ],
)
def test_processes_that_share_no_memory_are_refused(
    store, field, value, reason
) -> None:
    store.timeout_s = 0.05
    with pytest.raises(TransportError):
        connect(store, 1, [0])
    address = json.loads(store.values[f"{_PREFIX}1"])
    store.set(f"{_PREFIX}1", json.dumps({**address, field: value}))
    with pytest.raises(TransportError, match=reason):
        connect(store, 0, [1], timeout_s=5)


def test_an_address_of_another_host_is_refused(store) -> None:
    with pytest.raises(
        TransportError, match=r"cannot listen on 192\.0\.2\.1 .* --node-ips"
    ):
        connect(store, 0, [1], wire="tcp", ip="192.0.2.1")


def test_tcp_listens_on_the_chosen_address_only(store) -> None:
    store.timeout_s = 0.05
    with pytest.raises(TransportError, match="rank 0 did not publish"):
        connect(store, 1, [0], wire="tcp", ip="127.0.0.2")
    address = json.loads(store.values[f"{_PREFIX}1"])
    assert (address["ip"], address["port"] > 0) == ("127.0.0.2", True)


def test_strangers_at_the_port_are_refused(store, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(connect, store, 1, [0], wire="tcp")
        address = json.loads(store.get(f"{_PREFIX}1"))
        store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
        where = (address["ip"], address["port"])
        for said in (
            b"0 ? 0\n",
            b"GET /\n",
            b"9" * 1000 + b"\n",
            b"[" * 1000 + b"\n",
            b"x" * 2000,
            b"",
        ):
            with socket.create_connection(where) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # it did not even read all
                    assert stranger.recv(100) == b""
        calling = pool.submit(connect, store, 0, [1], wire="tcp")
        links = [calling.result(), listening.result()]
    assert sorted(map(list, links)) == [[0], [1]]
    assert caplog.text.count("refused a connection") == 6
    close_all(links)


@pytest.mark.parametrize("num_strangers", [14, 300])
def test_silent_strangers_keep_nobody_waiting(
    store, monkeypatch, num_strangers
) -> None:
    monkeypatch.setattr(
        rendezvous, "HELLO_S", 1e6
    )  # none of them is ever refused for it
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        listening = pool.submit(connect, store, 1, [0], wire="tcp")
        address = json.loads(store.get(f"{_PREFIX}1"))
        store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
        for said in range(num_strangers):
            stranger = socket.create_connection((address["ip"], address["port"]))
            strangers.enter_context(stranger)
            stranger.sendall(b"0" * (said % 3))  # silent, or on the way to a hello
        links = [
            pool.submit(connect, store, 0, [1], wire="tcp").result(),
            listening.result(),
        ]
    assert sorted(map(list, links)) == [[0], [1]]
    close_all(links)


def test_a_stranger_that_dawdles_is_refused(store, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3)
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(connect, store, 1, [0], wire="tcp")
        address = json.loads(store.get(f"{_PREFIX}1"))
        store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
        with socket.create_connection((address["ip"], address["port"])) as stranger:
            stranger.settimeout(0.1)
            with suppress(ConnectionError):
                while True:  # each byte comes well before the time is over
                    stranger.sendall(b"0")
                    with suppress(TimeoutError):
                        if not stranger.recv(1):
                            break
        monkeypatch.undo()  # a peer may be slow, on a machine that is
        links = [
            pool.submit(connect, store, 0, [1], wire="tcp").result(),
            listening.result(),
        ]
    assert sorted(map(list, links)) == [[0], [1]]
    close_all(links)


def test_a_queue_that_strangers_have_filled_is_tried_again(store) -> None:
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        listener = strangers.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        listener.bind("\0megatron_ext-test-full")
        listener.listen(0)
        stranger = strangers.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        stranger.connect("\0megatron_ext-test-full")
        calling = pool.submit(connect, store, 0, [1])
        address = json.loads(store.get(f"{_PREFIX}0"))
        full = {**address, "name": "megatron_ext-test-full", "secret": "1"}
        store.set(f"{_PREFIX}1", json.dumps(full))
        with pytest.raises(FutureTimeout):
            calling.result(timeout=0.3)
        links = [pool.submit(connect, store, 1, [0]).result(), calling.result()]
    assert sorted(map(list, links)) == [[0], [1]]
    close_all(links)


def test_whoever_does_not_know_the_secret_is_refused(store, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(connect, store, 1, [0])
        address = json.loads(store.get(f"{_PREFIX}1"))
        for hello in (b"0 ? ?\n", b"0\n", b"\n", b"1 \xff\n"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(f"\0{address['name']}")
                store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
                stranger.send(hello)
                assert stranger.recv(100) == b""
        calling = pool.submit(connect, store, 0, [1])
        links = [calling.result(), listening.result()]
    assert sorted(map(list, links)) == [[0], [1]]
    assert caplog.text.count("refused a connection") == 4
    close_all(links)


@pytest.mark.parametrize("wire", ["shm", "tcp"])
@pytest.mark.parametrize("num_damaged", [1, 1000], ids=["once", "always"])
def test_a_damaged_hello_is_said_again_and_no_rank_waits_for_it(
    store, monkeypatch, wire, num_damaged
) -> None:
    said = []
    hello_of = _Rendezvous._hello

    def damaged(self: _Rendezvous, address: Address) -> str:
        said.append(hello_of(self, address))
        return said[-1].replace(" ", " ?", 1) if len(said) <= num_damaged else said[-1]

    monkeypatch.setattr(_Rendezvous, "_hello", damaged)
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(connect, store, rank, [1 - rank], wire=wire, timeout_s=100)
            for rank in range(2)
        ]
        errors = [rank.exception(timeout=50) for rank in ranks]
    if num_damaged == 1000:
        assert "rank 1 refused the connection from rank 0" in str(errors[0])
        assert (
            "rank 0 gave up connecting: rank 1 refused the connection from rank 0"
            in str(errors[1])
        )
    else:
        assert errors == [None, None]
        close_all([rank.result() for rank in ranks])


def test_what_a_former_run_gave_up_for_is_nothing_to_this_one(store) -> None:
    """Rank 1 gives up for want of rank 0, and both are started again under the same name."""
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(connect, store, 1, [0], timeout_s=0.1)
        address = json.loads(store.get(f"{_PREFIX}1"))
        store.set(f"{_PREFIX}0", json.dumps({**address, "secret": "0"}))
        assert "waited 0.1 s for rank 0" in str(waiting.exception(timeout=100))
        assert store.values[f"{_PREFIX}1"].startswith(b"gave up ")
        calling = pool.submit(connect, store, 0, [1])
        with pytest.raises(FutureTimeout):
            calling.result(timeout=0.3)
        links = [pool.submit(connect, store, 1, [0]).result(), calling.result()]
    assert sorted(map(list, links)) == [[0], [1]]
    close_all(links)
