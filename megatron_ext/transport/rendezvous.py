"""Connects a job's processes: exchanges addresses through a store, then opens connections.

Each process listens on a unix socket and, if it may have peers on other hosts, on a TCP port, and
publishes both in the store, together with a secret.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import TransportError
from megatron_ext.transport.address import Address, Wire, choose_wire
from megatron_ext.transport.native import probe_rdma
from megatron_ext.transport.peer_user import NOBODY, user_of_peer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_RETRY_S = 0.05
_TURN_S = 1.0
# Number of attempts to connect to a peer that rejects the hello, which may have been damaged.
_MAX_CALLS = 3
# Time-out for notifying a peer that this rank gave up.
_RING_S = 1.0
# Prefix of a notice that replaces an address. The notice contains the reason and the
# secrets of the peers that should read it.
_GAVE_UP = b"gave up "
# Backlog of a listener, in addition to one connection per peer: this process accepts
# only after it has connected to its own peers.
_BACKLOG = 128
HELLO_BYTES = 1024
HELLO_S = 5.0
"""How long a connection has to send its hello message."""
# Any process on the network, such as a port scanner, can connect. Keep this many
# connections that have not sent a hello, in addition to one per peer.
_MAX_STRANGERS = 64


class Connection(NamedTuple):
    """A connected socket to an authenticated peer; the caller must close it."""

    wire: str
    """The wire that the connection is used for: shm (a unix socket), tcp or rdma (TCP sockets)."""
    host: str
    """The peer's host name."""
    socket: socket.socket


class _Visit(NamedTuple):
    """A connection that has not yet sent its complete hello message."""

    text: bytes
    """The bytes received so far."""
    deadline: float
    """When the hello must be complete (time.monotonic)."""


class _Reception:
    """Accepts connections and reads the first line of each, in a `with` block.

    All connections are read concurrently, so a client that sends nothing, or one byte at a time,
    does not delay other clients. At most `max_visits` connections that have not sent a hello are
    kept; a new one replaces the oldest.
    """

    def __init__(
        self, rank: int, listeners: Sequence[socket.socket], max_visits: int
    ) -> None:
        self._rank = rank
        self._listeners = listeners
        self._max_visits = max_visits
        # Sorted by deadline, because all connections get the same amount of time.
        self._visits: dict[socket.socket, _Visit] = {}
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for link in self._visits:
            link.close()

    def hellos(self, deadline: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Yield connections, each with its first line, until a deadline (time.monotonic)."""
        while (now := time.monotonic()) < deadline:
            self._refuse_late(now)
            deadlines = [visit.deadline for visit in self._visits.values()]
            next_deadline = min([deadline, *deadlines])
            # Sleep for a limited time: NVRx raises an exception in this thread, which takes effect
            # only after the sleep.
            sleep_s = min(next_deadline - now, _TURN_S)
            for key, _ in self._selector.select(sleep_s):
                link: socket.socket = key.fileobj  # type: ignore[assignment]
                if link in self._listeners:
                    self._accept(link)
                elif link in self._visits:  # otherwise it was rejected after the select
                    hello = self._read(link)
                    if hello is not None:
                        yield link, hello

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the client has closed the connection
            visitor, _ = listener.accept()
            if len(self._visits) >= self._max_visits:
                oldest = next(iter(self._visits))
                self._refuse(oldest, "too many connections have not sent a hello")
            visitor.setblocking(False)
            deadline = time.monotonic() + HELLO_S
            self._visits[visitor] = _Visit(b"", deadline)
            self._selector.register(visitor, selectors.EVENT_READ)

    def _read(self, link: socket.socket) -> bytes | None:
        """Read once. If the line is complete, stop watching the connection and return the line."""
        text, deadline = self._visits[link]
        try:
            part = link.recv(HELLO_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(link, str(error))
            return None
        text += part
        self._visits[link] = _Visit(text, deadline)
        if not part or len(text) > HELLO_BYTES:
            self._refuse(link, "it sent no valid hello")
        elif text.endswith(b"\n"):
            self._forget(link)
            return text
        return None

    def _refuse_late(self, now: float) -> None:
        late = [link for link, visit in self._visits.items() if visit.deadline <= now]
        for link in late:
            self._refuse(link, f"it sent no hello within {HELLO_S:g} s")

    def _refuse(self, link: socket.socket, reason: str) -> None:
        _log.warning("rank %d refused a connection: %s", self._rank, reason)
        self._forget(link)
        link.close()

    def _forget(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        del self._visits[link]


class _Rendezvous:
    """Connects one process to its peers."""

    def __init__(
        self,
        store: Store,
        rank: int,
        run_id: str,
        timeout_s: float,
        my_address: Address,
    ) -> None:
        self._store = store
        self._rank = rank
        self._prefix = f"mext/{run_id}/addr/"
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._my_address = my_address
        # Global rank of a peer -> its latest published address.
        self._peer_addresses: dict[int, Address] = {}

    def run(self, peers: Iterable[int], ip: str | None) -> dict[int, Connection]:
        """Connect to all peers. Of two ranks, the lower one is the client."""
        higher = sorted(peer for peer in peers if peer > self._rank)
        lower = {peer for peer in peers if peer < self._rank}
        with ExitStack() as open_until_done:
            listeners = self._listen(open_until_done, len(lower), ip)
            published = json.dumps(asdict(self._my_address))
            self._store.set(f"{self._prefix}{self._rank}", published)
            connections: dict[int, Connection] = {}
            try:
                # If two ranks have no common wire, the client raises an error; raise it on the
                # server too.
                for peer in sorted(lower):
                    address = self._address(peer)
                    choose_wire(self._rank, self._my_address, peer, address)
                # Read the answers last, so that no rank waits for higher ranks before it has
                # answered lower ranks.
                for peer in higher:
                    connections[peer] = self._call_until_heard(peer)
                self._answer_all(listeners, lower, connections)
                for peer in higher:
                    connections[peer] = self._answered(peer, connections[peer])
            except BaseException as error:
                for connection in connections.values():
                    connection.socket.close()
                if isinstance(error, TransportError) and self._peer_addresses:
                    # Publish the reason before the listeners are closed, so that peers can report
                    # it.
                    self._give_up(str(error), connections)
                raise
            return connections

    def _give_up(self, reason: str, connections: Mapping[int, Connection]) -> None:
        """Publish the reason to all known peers, and wake those that this rank has connected to."""
        secrets_of_peers = [address.secret for address in self._peer_addresses.values()]
        note = json.dumps({"reason": reason, "to": secrets_of_peers})
        self._store.set(f"{self._prefix}{self._rank}", _GAVE_UP.decode() + note)
        for peer in connections.keys() - range(self._rank):
            wire = connections[peer].wire
            address = self._peer_addresses[peer]
            with suppress(OSError, TransportError):  # the peer has exited too
                ring = f"{self._rank} gave up\n"
                link = self._connected(wire, peer, address, _RING_S, ring)
                link.close()

    def _listen(
        self, stack: ExitStack, num_lower: int, ip: str | None
    ) -> list[socket.socket]:
        # Use the abstract namespace, which leaves no file behind, and a random name.
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        unix.bind(f"\0{self._my_address.name}")
        unix.listen(num_lower + _BACKLOG)
        unix.setblocking(False)
        listeners = [unix]
        if self._my_address.wire != "shm":
            ip = ip or "127.0.0.1"
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            tcp = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                # Listen on this address only, on a port chosen by the kernel.
                tcp.bind((ip, 0))
            except OSError as error:
                raise TransportError(
                    f"rank {self._rank} cannot listen on {ip} of host {self._my_address.host}: "
                    f"{error}; "
                    f"set the hosts' addresses with --node-ips"
                ) from error
            tcp.listen(num_lower + _BACKLOG)
            tcp.setblocking(False)
            port = tcp.getsockname()[1]
            self._my_address = replace(self._my_address, ip=ip, port=port)
            listeners.append(tcp)
        return listeners

    def _address(self, peer: int) -> Address:
        key = f"{self._prefix}{peer}"
        try:
            while (text := self._store.get(key)).startswith(_GAVE_UP):
                note = json.loads(text.removeprefix(_GAVE_UP))
                if self._my_address.secret in note["to"]:
                    raise TransportError(
                        f"rank {peer} gave up connecting: {note['reason']}"
                    )
                # The notice is from an earlier run, so wait for this run's address.
                self._left_s(f"rank {peer} to listen")
                time.sleep(_RETRY_S)
        except RuntimeError as error:  # an error from the store, such as a time-out
            raise TransportError(
                f"rank {peer} did not publish an address for rank {self._rank}: {error}"
            ) from error
        try:
            address = Address(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise TransportError(
                f"the address of rank {peer} cannot be read ({error}); install the same "
                f"megatron_ext on all ranks"
            ) from error
        self._peer_addresses[peer] = address
        return address

    def _call_until_heard(self, peer: int) -> Connection:
        """Connect to a peer, retrying until it listens.

        Each attempt reads the address again, because the previous address may be from an earlier
        run.
        """
        while True:
            # BlockingIOError: the peer's backlog is full.
            with suppress(ConnectionError, BlockingIOError):
                return self._call(peer)
            time.sleep(_RETRY_S)

    def _call(self, peer: int) -> Connection:
        """Connect and send the hello.

        Raises:
            ConnectionError, BlockingIOError: The peer is not listening, or its backlog is full.
        """
        address = self._address(peer)
        wire, reason = choose_wire(self._rank, self._my_address, peer, address)
        left_s = self._left_s(f"rank {peer} to listen")
        hello = self._hello(address)
        try:
            link = self._connected(wire, peer, address, left_s, hello)
        except (ConnectionError, BlockingIOError):
            raise
        except OSError as error:  # for example a time-out or a missing route
            raise TransportError(
                f"rank {self._rank} on host {self._my_address.host} cannot connect to rank {peer} "
                f"on host {address.host} ({wire}, {address.ip or 'unix socket'}): {error}"
            ) from error
        # INFO only if a better wire exists; the reason says why it is not used.
        is_second_best = self._my_address.wire == "auto" and wire == "tcp"
        level = logging.INFO if is_second_best else logging.DEBUG
        _log.log(level, "rank %d and rank %d: %s (%s)", self._rank, peer, wire, reason)
        return Connection(wire, address.host, link)

    # Include the published secrets of both processes, so that processes in different jobs, or in a
    # job and an earlier run with the same run id, never connect to each other.
    def _hello(self, address: Address) -> str:
        return f"{self._rank} {address.secret} {self._my_address.secret}\n"

    def _connected(
        self,
        wire: str,
        peer: int,
        address: Address,
        left_s: float,
        hello: str,
    ) -> socket.socket:
        if wire == "shm":
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            link = socket.create_connection(
                (address.ip, address.port),
                left_s,
                source_address=(self._my_address.ip, 0),
            )
        try:
            link.settimeout(left_s)
            if wire == "shm":
                link.connect(f"\0{address.name}")
                process = f"the process that listens as rank {peer}"
                self._require_same_user(link, process)
            link.sendall(hello.encode())
        except BaseException:
            link.close()
            raise
        return link

    def _answer_all(
        self,
        listeners: Sequence[socket.socket],
        lower: set[int],
        connections: dict[int, Connection],
    ) -> None:
        """Wait for calls from all lower ranks and add their connections."""
        max_visits = len(lower) + _MAX_STRANGERS
        with _Reception(self._rank, listeners, max_visits) as reception:
            hellos = reception.hellos(self._deadline)
            while lower:
                link, hello = next(hellos, (None, b""))
                if link is None:
                    raise self._timed_out(f"rank {min(lower)} to connect")
                self._answer(link, hello, lower, connections)

    def _answer(
        self,
        link: socket.socket,
        hello: bytes,
        lower: set[int],
        connections: dict[int, Connection],
    ) -> None:
        """Authenticate a connection; reject it unless it comes from a peer."""
        try:
            self._require_same_user(link, "a process")
            rank, _, peer_secrets = hello.rstrip(b"\n").partition(b" ")
            peer = int(rank) if rank.isdigit() else -1
            if peer not in lower:
                raise TransportError("it did not present the secrets of this run")
            address = self._address(peer)
            # Do not trust the input before this comparison, because any process can
            # connect.
            published_secrets = f"{self._my_address.secret} {address.secret}".encode()
            if not secrets.compare_digest(peer_secrets, published_secrets):
                raise TransportError("it did not present the secrets of this run")
            wire, _ = choose_wire(self._rank, self._my_address, peer, address)
            is_unix = link.family == socket.AF_UNIX
            if is_unix != (wire == "shm"):
                raise TransportError(f"rank {peer} did not connect over {wire}")
            left_s = self._left_s(f"rank {peer} to read the answer")
            link.settimeout(left_s)
            link.sendall(self._my_address.secret.encode())
        except (TransportError, OSError, ValueError) as error:
            _log.warning("rank %d refused a connection: %s", self._rank, error)
            link.close()
            # The call may come from a peer that gave up. In that case, `_address` raises an error
            # with the peer's reason.
            for peer in sorted(lower):
                self._address(peer)
            return
        lower.remove(peer)
        connections[peer] = Connection(wire, address.host, link)

    def _answered(self, peer: int, call: Connection) -> Connection:
        """Wait for the peer's secret on a connection, reconnecting if necessary.

        Return the connection.
        """
        # A peer that receives a damaged hello closes the connection; in that case, connect again.
        for attempt in range(1, _MAX_CALLS + 1):
            if self._read_answer(peer, call.socket):
                return call
            self._address(peer)  # raises an error if the peer has published a reason
            if attempt < _MAX_CALLS:
                try:
                    call = self._call(peer)
                except OSError:
                    self._address(peer)
                    break
        raise TransportError(
            f"rank {peer} refused the connection from rank {self._rank}, or exited; see its log"
        )

    def _read_answer(self, peer: int, link: socket.socket) -> bool:
        """Read a peer's answer. If the peer has hung up, close the socket and return False."""
        waiting_for = f"rank {peer} to answer"
        expected = self._address(peer).secret.encode()
        answer = b""
        with ExitStack() as unless_answered:
            unless_answered.callback(link.close)
            try:
                # Do not read past the secret: the next bytes belong to the wire.
                while len(answer) < len(expected):
                    link.settimeout(self._left_s(waiting_for))
                    part = link.recv(len(expected) - len(answer))
                    if not part:
                        return False
                    answer += part
            except TimeoutError as error:
                raise self._timed_out(waiting_for) from error
            except ConnectionError:
                return False
            if not secrets.compare_digest(answer, expected):
                raise TransportError(
                    f"rank {peer}'s answer to rank {self._rank} is damaged; check the "
                    f"network between the hosts"
                )
            # Over TCP, this cannot be checked earlier: until the peer accepts the connection, no
            # process has the other end open.
            self._require_same_user(link, f"the process that listens as rank {peer}")
            unless_answered.pop_all()
        return True

    def _require_same_user(self, link: socket.socket, process: str) -> None:
        """Reject a connection to another user's process. `process` describes it in the error.

        Raises:
            TransportError: The process has exited or belongs to another user.
        """
        user = user_of_peer(link)
        if user == NOBODY:
            raise TransportError(f"{process} has exited")
        if user is not None and user != os.getuid():
            raise TransportError(
                f"{process} belongs to user {user}, but rank {self._rank} belongs to user "
                f"{os.getuid()}; start all ranks as the same user"
            )

    def _left_s(self, waiting_for: str) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._timed_out(waiting_for)
        return left_s

    def _timed_out(self, waiting_for: str) -> TransportError:
        return TransportError(
            f"rank {self._rank} on host {self._my_address.host} waited {self._timeout_s:g} s for "
            f"{waiting_for}"
        )


def connect_peers(
    store: Store,
    rank: int,
    peers: Iterable[int],
    *,
    run_id: str,
    timeout_s: float,
    wire: Wire = "auto",
    ip: str | None = None,
) -> dict[int, Connection]:
    """Connect this process to its peers in the job; return a socket for each peer.

    For the arguments, see `NativeTransport`. `timeout_s` limits how long connecting may take. A
    rank that never publishes its address is detected by the store's own time-out.

    Raises:
        TransportError: A peer did not appear, or the wire is unavailable; the error names the peer
            and the reason.
    """
    address = Address.new(wire)
    if wire in ("auto", "rdma"):
        address = replace(address, no_rdma=probe_rdma(ip).why_not)
    rendezvous = _Rendezvous(store, rank, run_id, timeout_s, address)
    return rendezvous.run(frozenset(peers) - {rank}, ip)
