"""Sockets of this process, found and shut down whoever opened them."""

from __future__ import annotations

import socket

from megatron_ext.sockets import open_sockets


def test_a_connection_is_found_by_its_ports_and_shut_down() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        opened = open_sockets() - before
        assert [item.listening_port() for item in opened if item.listening_port()] == [
            port
        ]
        ends = {item.tcp_ends(): item for item in opened if item.tcp_ends()}
        assert ends.keys() == {
            (port, client.getsockname()[1]),
            (client.getsockname()[1], port),
        }
        assert ends[client.getsockname()[1], port].shut_down()
        assert peer.recv(1) == b""
    client.close()
    peer.close()


def test_a_descriptor_that_another_socket_has_taken_is_left_alone() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    before = open_sockets()
    first = socket.create_connection(server.getsockname())
    (opened,) = open_sockets() - before
    first.close()
    second = socket.create_connection(server.getsockname())
    try:
        assert second.fileno() == opened.descriptor  # the lowest that is free
        assert not opened.shut_down()
        assert opened.tcp_ends() is None
        second.sendall(b"whole")
    finally:
        second.close()
        server.close()


def test_sockets_of_the_file_system_have_no_ports() -> None:
    before = open_sockets()
    left, right = socket.socketpair()
    with left, right:
        opened = open_sockets() - before
        assert len(opened) == 2
        assert {item.tcp_ends() for item in opened} == {None}
        assert {item.listening_port() for item in opened} == {None}
        assert not any(item.shut_down() for item in opened)
        left.sendall(b"whole")
