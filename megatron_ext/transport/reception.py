"""Accepts incoming connections and reads their hellos concurrently.

A client that sends nothing, or one byte at a time, delays nobody but itself.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["HELLO_BYTES", "HELLO_S", "Hello", "Reception"]

_log = logging.getLogger(__name__)

HELLO_BYTES = 1024
HELLO_S = 5.0
"""How long a connection may take to send its hello."""
_MAX_STRANGERS = 64
"""Connections without a hello that are kept, besides one for each peer. Beyond that a new one
replaces the oldest."""


class Hello(NamedTuple):
    """A connection and its first line. The caller checks whether it is a peer's."""

    link: socket.socket
    text: bytes
    """The line, with its line feed."""


class _Visit:
    def __init__(self) -> None:
        self.text = b""
        self.deadline = time.monotonic() + HELLO_S


class Reception:
    """Accepts connections and reads the first line of each.

    As a context manager it closes the remaining connections on exit.

    Args:
        rank: Global rank of this process, for the log.
        listeners: Non-blocking listening sockets.
        num_peers: Number of peers that will connect.
    """

    def __init__(self, rank: int, listeners: Sequence[socket.socket], num_peers: int) -> None:
        self._rank = rank
        self._listeners = listeners
        self._max_visits = num_peers + _MAX_STRANGERS
        self._selector = selectors.DefaultSelector()
        self._visits: dict[socket.socket, _Visit] = {}
        """Connections without a complete hello, in the order of their deadlines."""
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections that have not sent a hello."""
        for link in list(self._visits):
            self._leave(link).close()
        self._selector.close()

    def next(self, deadline: float) -> Hello | None:
        """Return the next complete hello; None at the deadline (seconds of time.monotonic)."""
        while True:
            self._refuse_late_ones()
            first = min([deadline, *(visit.deadline for visit in self._visits.values())])
            for key, _ in self._selector.select(max(0.0, first - time.monotonic())):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif (hello := self._read(key.fileobj)) is not None:
                    return hello
            if time.monotonic() >= deadline:
                return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            return  # the client has closed the connection
        if len(self._visits) >= self._max_visits:
            self._refuse(next(iter(self._visits)), "too many others wait to send a hello")
        link.setblocking(False)
        self._visits[link] = _Visit()
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: socket.socket) -> Hello | None:
        visit = self._visits.get(link)
        if visit is None:
            return None  # rejected since the select
        try:
            part = link.recv(HELLO_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(link, str(error))
            return None
        visit.text += part
        if not part or len(visit.text) > HELLO_BYTES:
            self._refuse(link, "it sent no valid hello")
        elif visit.text.endswith(b"\n"):
            return Hello(self._leave(link), visit.text)
        return None

    def _refuse_late_ones(self) -> None:
        now = time.monotonic()
        for link in [link for link, visit in self._visits.items() if visit.deadline <= now]:
            self._refuse(link, f"it sent no hello within {HELLO_S:g} s")

    def _refuse(self, link: socket.socket, why: str) -> None:
        _log.warning("rank %d refused a connection: %s", self._rank, why)
        self._leave(link).close()

    def _leave(self, link: socket.socket) -> socket.socket:
        self._selector.unregister(link)
        del self._visits[link]
        return link
