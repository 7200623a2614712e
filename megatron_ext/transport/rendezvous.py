"""How processes of one job find each other: addresses over a store, then sockets for each pair.

Each process listens under a random abstract unix name, so there is no file to be left behind, and
publishes it in the store together with a secret. Who connects has to know the secret of the other
side and its own as the store has it. So processes of two jobs never meet, and neither do those of a
job and of its former self under the same run id.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_ext.errors import TransportError
from megatron_ext.version import __version__

__all__ = ["Store", "connect_local"]

_log = logging.getLogger(__name__)
_RETRY_S = 0.05
_MAX_PACKET_BYTES = 1024


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> object:
        """Publish a value, or replace it."""

    def get(self, key: str, /) -> bytes:
        """Return a value; waits until it is there, or raises RuntimeError after a while."""


@dataclass(frozen=True)
class _Address:
    """What a process publishes. Names in /proc/net/unix are public, secrets are not."""

    version: str
    host: str
    boot_id: str
    network: int
    """Inode of the network namespace, within which abstract names are known."""
    name: str
    secret: str

    @classmethod
    def new(cls) -> _Address:
        return cls(
            version=__version__,
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            network=Path("/proc/self/ns/net").stat().st_ino,
            name=f"megatron_ext-{secrets.token_hex(8)}",
            secret=secrets.token_hex(16),
        )

    def reason_against(self, other: _Address) -> str | None:
        """Why no memory can be shared with a process, if it cannot."""
        if other.version != self.version:
            return f"it runs megatron_ext {other.version}, this one {self.version}"
        if (other.host, other.boot_id) != (self.host, self.boot_id):
            return f"it runs on host {other.host}, this one on {self.host}"
        if other.network != self.network:
            return "it is in another network namespace; give both containers the host's network"
        return None


class _Rendezvous:
    """One process's part in connecting to its peers."""

    def __init__(self, store: Store, rank: int, run_id: str, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._prefix = f"mext/{run_id}/addr/"
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._mine = _Address.new()

    def run(self, peers: Iterable[int]) -> dict[int, socket.socket]:
        """Connect to all; the lower rank of each pair is the one that calls."""
        higher = sorted(peer for peer in peers if peer > self._rank)
        lower = {peer for peer in peers if peer < self._rank}
        sockets: dict[int, socket.socket] = {}
        with _socket() as listener:
            listener.bind(f"\0{self._mine.name}")
            listener.listen(max(len(lower), 1) + 8)
            self._store.set(f"{self._prefix}{self._rank}", json.dumps(asdict(self._mine)))
            try:
                for peer in higher:
                    sockets[peer] = self._call(peer)
                while lower:
                    self._answer_one(listener, lower, sockets)
                for peer in higher:
                    self._read_answer(peer, sockets[peer])
            except BaseException:
                for link in sockets.values():
                    link.close()
                raise
        return sockets

    def _address(self, peer: int) -> _Address:
        try:
            text = self._store.get(f"{self._prefix}{peer}")
        except RuntimeError as error:  # the store's own errors, time-outs among them
            raise TransportError(
                f"rank {peer} did not publish an address for rank {self._rank}: {error}"
            ) from error
        try:
            address = _Address(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise TransportError(
                f"the address of rank {peer} cannot be read ({error}); install the same "
                f"megatron_ext for all ranks"
            ) from error
        reason = self._mine.reason_against(address)
        if reason is not None:
            raise TransportError(f"rank {self._rank} shares no memory with rank {peer}: {reason}")
        return address

    def _call(self, peer: int) -> socket.socket:
        """Connect and introduce ourselves. An address may be one of an earlier run: ask again."""
        while True:
            address = self._address(peer)
            link = _socket()
            try:
                link.settimeout(self._left_s(f"rank {peer} to listen"))
                link.connect(f"\0{address.name}")
                self._require_same_user(link, f"the process that listens as rank {peer}")
                hello = {"rank": self._rank, "mine": self._mine.secret, "yours": address.secret}
                link.sendall(json.dumps(hello).encode())
            except ConnectionError:
                link.close()
                time.sleep(_RETRY_S)
            except BaseException:
                link.close()
                raise
            else:
                return link

    def _answer_one(
        self, listener: socket.socket, lower: set[int], sockets: dict[int, socket.socket]
    ) -> None:
        """Accept one connection; whoever is no peer is turned away."""
        waiting_for = f"rank {min(lower)} to connect"
        listener.settimeout(self._left_s(waiting_for))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            raise self._timed_out(waiting_for) from error
        try:
            link.settimeout(self._left_s(waiting_for))
            self._require_same_user(link, "a process")
            hello = json.loads(link.recv(_MAX_PACKET_BYTES))
            peer = hello["rank"]
            known = peer in lower and secrets.compare_digest(
                f"{hello['yours']} {hello['mine']}",
                f"{self._mine.secret} {self._address(peer).secret}",
            )
            if not known:
                raise TransportError("it does not know the secrets of this run")
            link.sendall(self._mine.secret.encode())
        except (TransportError, OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("rank %d turned a connection away: %s", self._rank, error)
            link.close()
            return
        lower.remove(peer)
        sockets[peer] = link

    def _read_answer(self, peer: int, link: socket.socket) -> None:
        waiting_for = f"rank {peer} to answer"
        link.settimeout(self._left_s(waiting_for))
        try:
            answer = link.recv(_MAX_PACKET_BYTES)
        except TimeoutError as error:
            raise self._timed_out(waiting_for) from error
        except ConnectionError:
            answer = b""
        if answer != self._address(peer).secret.encode():
            raise TransportError(
                f"rank {peer} turned rank {self._rank} away, or ended; see what it logged"
            )

    def _require_same_user(self, link: socket.socket, who: str) -> None:
        size = struct.calcsize("3i")
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            raise TransportError(f"{who} belongs to user {uid}, rank {self._rank} to {os.getuid()}")

    def _left_s(self, waiting_for: str) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._timed_out(waiting_for)
        return left_s

    def _timed_out(self, waiting_for: str) -> TransportError:
        return TransportError(
            f"rank {self._rank} waited {self._timeout_s:g} s for {waiting_for} on host "
            f"{self._mine.host}"
        )


def connect_local(
    store: Store, rank: int, peers: Iterable[int], *, run_id: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Connect this process to peers on the same host.

    Args:
        store: Where all of them publish their addresses. A rank that never comes is noticed by the
            store's own time-out.
        rank: Global rank of this process.
        peers: Global ranks to connect to; each of them must name this one.
        run_id: Sets jobs apart that use one store. The same on all ranks.
        timeout_s: How long peers that have published their address may take.

    Returns:
        For each peer a connected unix socket (SOCK_SEQPACKET), to be closed by the caller.

    Raises:
        TransportError: A peer does not come, or is not on this host; names it.
    """
    return _Rendezvous(store, rank, run_id, timeout_s).run(frozenset(peers) - {rank})


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
