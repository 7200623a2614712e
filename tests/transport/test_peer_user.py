"""Whose process is at the other end of a connection."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport import peer_user, rendezvous
from megatron_ext.transport.peer_user import NOBODY, user_of_peer
from tests.transport.test_rendezvous import MemoryStore, connect, connect_all

_OTHER_USER = 65534


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def sockets(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's and a client's end of one connection, the client of IPv6 for the last."""
    address = request.param
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind(
            (
                address.rpartition(":ffff:")[2]
                if family == socket.AF_INET
                else address,
                0,
            )
        )
    except OSError:
        pytest.skip(f"this machine has no {address}")
    listener.listen()
    client = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    client.connect((address, listener.getsockname()[1]))
    server, _ = listener.accept()
    with closing(listener), closing(server), closing(client):
        yield server, client


def test_both_ends_of_a_connection_are_found(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    server, client = sockets
    assert user_of_peer(server) == os.getuid()
    if ":ffff:" not in client.getpeername()[0]:
        assert user_of_peer(client) == os.getuid()
    client.shutdown(socket.SHUT_WR)
    assert user_of_peer(server) == os.getuid(), "half closed, it can still receive"
    client.close()
    assert user_of_peer(server) == NOBODY


def test_a_peer_of_another_network_is_not_known(
    sockets: tuple[socket.socket, socket.socket],
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_user, "_NET", tmp_path)  # without tables
    assert user_of_peer(sockets[0]) is None


def _visit(port: int, hello: bytes, answer) -> None:
    os.setuid(_OTHER_USER)
    with socket.socket() as link:
        link.connect(("127.0.0.1", port))
        link.sendall(hello)
        answer.send_bytes(link.recv(100))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_host_who_knows_all_secrets_becomes_no_rank(
    caplog,
) -> None:
    store = MemoryStore()
    # Rank 1 listens; a stranger publishes an address for rank 0 and connects in its name.
    answers, answer = multiprocessing.Pipe(duplex=False)
    errors: list[TransportError] = []

    def listen() -> None:
        try:
            connect(store, 1, [0], timeout_s=3.0, wire="tcp")
        except TransportError as error:
            errors.append(error)

    rank = threading.Thread(target=listen)
    rank.start()
    address = json.loads(store.get("mext/run/addr/1"))
    secret = "0" * 32
    store.set("mext/run/addr/0", json.dumps({**address, "secret": secret, "port": 1}))
    hello = f"0 {address['secret']} {secret}\n".encode()
    visitor = multiprocessing.get_context("fork").Process(
        target=_visit, args=(address["port"], hello, answer)
    )
    visitor.start()
    visitor.join(20)
    rank.join(20)
    assert answers.poll(5)
    assert answers.recv_bytes() == b""
    assert f"belongs to user {_OTHER_USER}, but rank 1 belongs to user 0" in caplog.text
    [error] = errors
    assert "waited 3 s for rank 0 to connect" in str(error)


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_a_listener_of_another_user_is_refused(
    wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_listener = threading.local()
    answer = rendezvous._Rendezvous._answer

    def answer_as_listener(*arguments) -> None:
        is_listener.now = True
        answer(*arguments)
        is_listener.now = False

    def user(_: socket.socket) -> int:
        return os.getuid() + (not getattr(is_listener, "now", False))

    monkeypatch.setattr(rendezvous._Rendezvous, "_answer", answer_as_listener)
    monkeypatch.setattr(rendezvous, "user_of_peer", user)
    message = "the process that listens as rank 1 belongs to user"
    with pytest.raises(
        TransportError, match=f"{message}.*start all ranks as the same user"
    ):
        connect_all(MemoryStore(), 2, wire=wire)
