"""Finds and shuts down this process's sockets, including sockets opened by C++ libraries.

Gloo and torch's stores cannot cancel a wait for a lost peer. If their sockets are shut down, the
waiting thread gets an error immediately.
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
    """A socket of this process, which its owner may close at any time."""

    descriptor: int
    inode: int
    """Identifies the socket: once it is closed, another socket may reuse its descriptor."""

    def listening_port(self) -> int | None:
        """Return the TCP port that the socket listens on, or None if it is not listening."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return None
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens:
                return None
            return int(duplicate.getsockname()[1])

    def tcp_ends(self) -> TcpEnds | None:
        """Return the connection's ports, or None if the socket is closed or not connected."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return None
            try:
                own_address = duplicate.getsockname()
                peer_address = duplicate.getpeername()
                return TcpEnds(own_address[1], peer_address[1])
            except OSError:  # it is listening, or its peer has closed it
                return None

    def shut_down(self) -> bool:
        """Shut the connection down in both directions; return whether it was still open."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return False
            with suppress(OSError):  # the peer has already closed it
                duplicate.shutdown(socket.SHUT_RDWR)
            return True

    @contextmanager
    def _duplicate(self) -> Iterator[socket.socket | None]:
        """Yield a duplicate for the body; None if the socket is closed or not a TCP socket."""
        # Duplicate first, then compare the duplicate's inode. Otherwise, the owner
        # could close the original in between, and another socket would be duplicated.
        try:
            duplicate = socket.socket(fileno=os.dup(self.descriptor))
        except OSError:
            yield None
            return
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            is_tcp = is_tcp and duplicate.type == socket.SOCK_STREAM
            is_same = os.fstat(duplicate.fileno()).st_ino == self.inode
            if is_tcp and is_same:
                yield duplicate
            else:
                yield None


def open_sockets() -> set[OpenSocket]:
    """Return all of this process's sockets."""
    sockets = set()
    for entry in list(_DESCRIPTORS.iterdir()):
        # An entry may already be closed, as is the descriptor that listed the folder.
        with suppress(OSError):
            # The link of a socket reads `socket:[INODE]`.
            kind, _, inode_text = str(entry.readlink()).partition(":")
            if kind == "socket":
                descriptor = int(entry.name)
                inode = int(inode_text.strip("[]"))
                sockets.add(OpenSocket(descriptor, inode))
    return sockets
