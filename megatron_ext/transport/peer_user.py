"""Finds the user who owns the process at the other end of a connection.

A secret only proves that a process can read the job's store, and any process that can reach the
store's port can do so. Within one host, the kernel reports which user owns a process, and no
process can forge that.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

NOBODY = -1
"""Returned for a connection whose other end is no longer open in any process."""

_NET = Path("/proc/net")


def user_of_peer(link: socket.socket) -> int | None:
    """Return the user of the process at the other end of a unix socket or TCP connection.

    Returns None if the process is on another host, or in another network namespace, such as a
    container's. A server may check its client immediately. A client may check its server only after
    the first answer: until the server accepts the connection, no process has the server's end open.
    """
    if link.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, user, _ = struct.unpack("3i", credentials)
        return int(user)
    ip, port = link.getsockname()[:2]
    try:
        peer_ip, peer_port = link.getpeername()[:2]
    except OSError:  # the peer closed the connection before it read all data
        return NOBODY
    # If the peer is in this network namespace, the kernel's table contains the peer's end of the
    # connection. Accept a connection in any state, because a peer that has half closed it can still
    # receive.
    for table, spelled in _SPELLINGS.items():
        peer_end = f"{spelled(peer_ip)}:{peer_port:04X}"
        own_end = f"{spelled(ip)}:{port:04X}"
        ends = f" {peer_end} {own_end} "
        with suppress(OSError):  # a kernel without IPv6 has no tcp6
            connections = (_NET / table).read_text(encoding="ascii")
            for line in connections.splitlines():
                if ends in line:
                    # The columns of proc(5), /proc/net/tcp. A line with fewer raises ValueError.
                    _, _, _, _, _, _, _, user, _, inode, *_ = line.split()
                    # Without an inode, no process has the peer's end open.
                    if int(inode) == 0:
                        return NOBODY
                    return int(user)
    return None


def _in_ipv4(address: str) -> str:
    """Return an IPv4 address as it appears in the kernel's table: `0100007F` for 127.0.0.1."""
    ip = ip_address(address.partition("%")[0])
    return _words(ip) if isinstance(ip, IPv4Address) else "not of IPv4"


def _in_ipv6(address: str) -> str:
    """Return an address as it appears in the kernel's IPv6 table.

    The peer may have opened an IPv6 socket for an IPv4 connection.
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return _words(IPv6Address(f"::ffff:{ip}"))
    return _words(ip)


def _words(ip: IPv4Address | IPv6Address) -> str:
    """Return the 32-bit words of an address in hex, each in this machine's byte order."""
    words = struct.iter_unpack("=I", ip.packed)
    return "".join(f"{word:08X}" for (word,) in words)


_SPELLINGS = {"tcp": _in_ipv4, "tcp6": _in_ipv6}
