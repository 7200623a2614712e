"""The sockets of this process, also those that a C++ library opened.

Gloo and torch's stores wait for a lost peer without a call that ends the wait. Shutting their
sockets down ends it: the waiting thread gets an error at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")


class TcpEnds(NamedTuple):
    """The ports of a TCP connection."""

    own_port: int
    peer_port: int


class OpenSocket(NamedTuple):
    """A socket of this process, which its owner may close at any moment."""

    descriptor: int
    inode: int
    """Identifies the socket: once it is closed, another one may get its descriptor."""

    def listening_port(self) -> int | None:
        """Return the TCP port that it listens at; None: it does not."""
        with self._duplicate() as duplicate:
            if duplicate is None or not duplicate.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return None
            return int(duplicate.getsockname()[1])

    def tcp_ends(self) -> TcpEnds | None:
        """Return the ports of its connection; None: it is no TCP connection, or has ended."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return None
            try:
                return TcpEnds(duplicate.getsockname()[1], duplicate.getpeername()[1])
            except OSError:  # it listens, or its peer has closed it
                return None

    def shut_down(self) -> bool:
        """Shut the connection down in both directions; return whether it was still open."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return False
            with suppress(OSError):  # the peer was first
                duplicate.shutdown(socket.SHUT_RDWR)
            return True

    @contextmanager
    def _duplicate(self) -> Iterator[socket.socket | None]:
        """Yield a duplicate, closed afterwards; None if it is closed or not a socket of TCP."""
        # The inode of the duplicate is compared, not that of the original, whose owner may close it
        # after the comparison.
        try:
            duplicate = socket.socket(fileno=os.dup(self.descriptor))
        except OSError:
            yield None
            return
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            is_tcp = is_tcp and duplicate.type == socket.SOCK_STREAM
            is_same = os.fstat(duplicate.fileno()).st_ino == self.inode
            yield duplicate if is_tcp and is_same else None


def open_sockets() -> set[OpenSocket]:
    """Return all sockets of this process."""
    sockets = set()
    for entry in list(_DESCRIPTORS.iterdir()):
        with suppress(OSError):  # the descriptor of this listing, and those closed since
            kind, _, inode = str(entry.readlink()).partition(":")
            if kind == "socket":
                sockets.add(OpenSocket(int(entry.name), int(inode.strip("[]"))))
    return sockets
