"""Types and contracts of the native core (source: csrc/bind.cc).

Waits release the GIL, sleep in the kernel and check for Python signals every 100 ms, so Ctrl-C ends
them. Every `timeout_s` is in seconds; None waits forever; a negative value or NaN is a ValueError.
"""

# By convention, private native modules are called _C.
# ruff: noqa: N999

from typing import Protocol, final

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@final
class Message:
    """A message that has arrived: a writable buffer of its bytes.

    The bytes are in a slot of shared memory or in reused memory, which becomes free again when the
    last reference is dropped. `torch.frombuffer` holds a reference. Any thread may drop the last
    reference.
    """

    @property
    def dtype(self) -> int:
        """DLPack's type code times 256, plus the number of bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the sender passed."""

    def dlpack(self) -> object:
        """Return a DLPack capsule that owns the bytes. May be called only once."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PeerReport:
    """The state of a peer of an endpoint."""

    @property
    def rank(self) -> int:
        """Rank of the peer."""

    @property
    def state(self) -> str:
        """One of open, closed, died and aborted."""

    @property
    def wire(self) -> str:
        """One of shm, tcp and rdma."""

    @property
    def reason(self) -> str:
        """Why the peer aborted, or how its death was detected; may be empty."""

    @property
    def num_arrived(self) -> int:
        """Number of messages from the peer that have not been taken."""

    @property
    def num_held(self) -> int:
        """Number of slots, or of messages if a wire has no slots, that have not been released."""

    @property
    def num_queued(self) -> int:
        """Number of messages to the peer that are waiting for room."""

class Link:
    """The connection of an endpoint to one peer."""

@final
class ShmLink(Link):
    """A connection through shared memory. Create all of them before calling `accept` on any.

    Args:
        endpoint: The endpoint to which it will be added.
        peer: Rank of the peer.
        socket: A socket connected to the peer (AF_UNIX, SOCK_SEQPACKET), with nothing left to read;
            duplicated.

    Raises:
        ValueError: There is already a link to this peer.
        TransportError: There is no memory for the arena, or the peer is gone.
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, socket: int | _HasFileno
    ) -> None: ...
    @property
    def slots(self) -> tuple[int, int]:
        """Address and number of bytes of the memory that holds the peer's messages.

        Consists of whole pages, mapped as long as the link or one of its messages lives.
        """

    @property
    def peer_slots(self) -> tuple[int, int]:
        """Address and number of bytes of the peer's memory for messages to it; after `accept`."""

    def accept(self, timeout_s: float | None = None) -> None:
        """Wait until the peer has created its link.

        Raises:
            TransportError: The peer did not create its link in time, or sent something else.
        """

@final
class TcpLink(Link):
    """A connection over TCP.

    Args:
        endpoint: The endpoint to which it will be added.
        peer: Rank of the peer.
        socket: A socket connected to the peer; duplicated.
        silence_s: A peer is considered dead if its host does not answer for this long. 1 to 86400.

    Raises:
        ValueError: There is already a link to this peer, or `silence_s` is out of range.
        TransportError: The socket is of another kind.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: int,
        socket: int | _HasFileno,
        silence_s: float = 15.0,
    ) -> None: ...

@final
class EndpointCounts:
    """Counters of an endpoint."""

    @property
    def num_messages(self) -> int:
        """Number of messages sent."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the sent messages."""

    @property
    def waited_s(self) -> float:
        """Time spent sleeping or spinning in waits."""

    @property
    def last_wait_s(self) -> float:
        """Time spent sleeping or spinning in the last call that could wait."""

@final
class Endpoint:
    """A process of a job, and its links to other processes.

    Calls come from one thread; `send`, `publish` and `abort` may come from another. A thread of the
    core does the work that must continue while the process computes, such as sending messages for
    which there was no room before. In a forked child, every call raises TransportError.

    Args:
        rank: Rank of this process among its peers.
        slots: Number of messages from each peer that may be unreleased here, 1 to 1024.
        slot_bytes: Size of a slot; longer messages are sent in pieces, at the cost of a copy.
        checksums: Whether the bytes are sent with a checksum, which the receiver verifies.

    Raises:
        ValueError: The sizes are impossible for an arena.
    """

    def __init__(
        self, rank: int, slots: int, slot_bytes: int, checksums: bool = False
    ) -> None: ...
    def add(self, peer: int, link: Link) -> None:
        """Use a connected link from now on."""

    def send(
        self,
        peer: int,
        tag: int,
        dtype: int,
        shape: tuple[int, ...],
        address: int,
        owner: object,
    ) -> None:
        """Send the bytes at `address`, to a peer or to this process; never waits.

        Shape and dtype determine the number of bytes. A reference to `owner` is kept until the
        bytes have been copied, possibly before this call returns.

        Raises:
            ValueError: There is no such peer, or the shape has more than 8 dimensions or a negative
                dimension.
            TransportError: The peer is gone.
        """

    def reserve(
        self, peer: int, tag: int, dtype: int, shape: tuple[int, ...]
    ) -> Message | None:
        """Return a message whose bytes are to be filled, for example by a device; never waits.

        The bytes are where the peer reads them, or where its device fetches them. They stay there
        as long as the message lives, even after the peer's death and after `close`. The memory of a
        message that is never published is never reused.

        Returns:
            None on TCP, for messages without bytes or longer than a slot, while other messages are
                waiting for room, and if so many are reserved that no slot is left. In these cases,
                use `send`.

        Raises:
            ValueError: As in `send`.
            TransportError: The peer is gone.
        """

    def publish(self, peer: int, message: Message) -> None:
        """Send a message from `reserve`, whose bytes must not change any more; never waits.

        Raises:
            ValueError: The message was published before, or was reserved for another peer.
            TransportError: The peer is gone.
        """

    def add_buffers(self, num_slots: int) -> tuple[int, int]:
        """Allocate memory for messages that do not stay where they arrived, `slot_bytes` for each.

        Call it at most once. Longer messages, and messages beyond that number, are stored
        elsewhere.

        Returns:
            Address and number of bytes; whole pages, mapped as long as the endpoint or a message
            lives.

        Raises:
            TransportError: There is not enough memory.
        """

    def take(
        self,
        source: int,
        tag: int,
        timeout_s: float | None = None,
        capsule_dtype: int = 0,
    ) -> Message | object | None:
        """Wait for a message.

        Returns:
            A message; or, if it has bytes of the dtype `capsule_dtype`, a DLPack capsule that owns
            them, which saves creating the message object. None if it did not arrive in time, or
            cannot arrive: see `peers`. A peer that died or aborted ends every wait; a peer that
            closed ends only waits for its own messages.
        """

    def arrivals(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Wait for messages that no earlier call returned.

        Returns:
            (source, tag) of each message that has not been taken; empty when `take` would return
            None, or when all peers have closed.
        """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every message has left and its memory is free.

        Returns:
            False if that does not happen in time, or a receiver is gone.
        """

    def abort(self, reason: str) -> None:
        """Notify all peers that this process aborts, and drop queued messages."""

    def close(self) -> None:
        """Send all peers a close notice and release the links.

        Messages that were taken stay valid.
        """

    def set_spin(self, seconds: float) -> None:
        """Make a wait spin for this long before it sleeps, if messages may come from another CPU.

        By default, a wait sleeps at once. Meant for hosts with a CPU for each of their processes.

        Raises:
            ValueError: It is not between 0 and 1.
        """

    def counts(self) -> EndpointCounts:
        """Return the totals so far; also after `close`."""

    def peers(self) -> list[PeerReport]:
        """Return the states of the peers, as far as they have been detected."""

@final
class RdmaLink(Link):
    """A connection over RDMA, with an additional TCP connection that carries close notices.

    Args:
        endpoint: The endpoint to which it will be added, after `connect`.
        peer: Rank of the peer.
        socket: A TCP connection to the peer; duplicated.
        address: IP address of this host, which selects the port; empty for the best port.
        rail: Selects one of several equally good ports, usually the local rank.
        silence_s: A peer counts as dead if its host does not answer for this long. 1 to 86400.
        sysfs: Mount point of sysfs; tests pass another directory than /sys.

    Raises:
        ValueError: There is already a link to this peer, or an argument or one of the variables
            MEGATRON_EXT_IB_* is malformed.
        TransportError: This host has no usable RDMA port, or not enough lockable memory.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: int,
        socket: int | _HasFileno,
        address: str = "",
        rail: int = 0,
        silence_s: float = 15.0,
        sysfs: str = "/sys",
    ) -> None: ...
    def connect(self, timeout_s: float | None = None) -> None:
        """Connect to the peer, which must call this too.

        If there are several peers, connect to them in ascending order of rank.

        Raises:
            TransportError: The peer does not connect in time, gives up, or cannot be reached; the
                error names both ends.
        """

    @property
    def slots(self) -> tuple[int, int]:
        """Address and number of bytes of the memory that holds the peer's messages."""

    @property
    def peer_slots(self) -> tuple[int, int]:
        """Address and number of bytes of the memory from which the device sends to the peer."""

    @property
    def text(self) -> str:
        """Device, port and GID of both ends."""

@final
class GidEntry:
    """An address of an RDMA port."""

    @property
    def index(self) -> int:
        """Index in the port's table."""

    @property
    def gid(self) -> str:
        """Written as an IPv6 address; ::ffff:a.b.c.d for an IPv4 address."""

    @property
    def type(self) -> str:
        """The type as the kernel writes it: RoCE v2, or IB/RoCE v1."""

    @property
    def net_device(self) -> str:
        """The network interface to which it belongs; empty if there is none."""

@final
class RdmaPort:
    """A port of an RDMA device."""

    @property
    def number(self) -> int:
        """Port number, counted from 1."""

    @property
    def state(self) -> str:
        """One of active, armed, initialising and down."""

    @property
    def link_layer(self) -> str:
        """Either Ethernet or InfiniBand."""

    @property
    def lid(self) -> int:
        """Address in an InfiniBand subnet, 0 on Ethernet."""

    @property
    def mtu_bytes(self) -> int:
        """Payload of one packet."""

    @property
    def max_message_bytes(self) -> int:
        """Maximum number of bytes in one write."""

    @property
    def gids(self) -> list[GidEntry]:
        """Addresses, without the empty entries of the table."""

@final
class RdmaDevice:
    """An RDMA device of this host."""

    @property
    def name(self) -> str:
        """The device's name in libibverbs."""

    @property
    def error(self) -> str:
        """Why the device cannot be used; empty if it can be used."""

    @property
    def remedy(self) -> str:
        """How to fix the error."""

    @property
    def ports(self) -> list[RdmaPort]:
        """The ports; empty for a device with an error."""

@final
class RdmaFinding:
    """Result of one step of the probe."""

    @property
    def step(self) -> str:
        """One of library, devices, port, memory and queue pair."""

    @property
    def is_good(self) -> bool:
        """True if the step succeeded. A failed step is always the last finding."""

    @property
    def text(self) -> str:
        """The finding as text."""

    @property
    def remedy(self) -> str:
        """How to fix a failure."""

def fingerprint(
    values: int,
    shape: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> tuple[int, list[float]]:
    """Return the fingerprint of a matrix of float32 that is stored row by row.

    `megatron_ext/tracing/fingerprint.py` defines it. Releases the GIL.

    Args:
        values: Address of the matrix.
        shape: Rows and columns.
        rows: Addresses of the factors (int64) and of the weights (float32) of the rows.
        columns: The same for the columns.

    Returns:
        The bits, as a signed 64-bit number; then the norm and the projections.

    Raises:
        ValueError: The number of columns is not a multiple of 8.
    """

def rdma_devices(sysfs: str = "/sys") -> list[RdmaDevice]:
    """Return all RDMA devices of this host. Opens each of them briefly.

    Args:
        sysfs: Mount point of sysfs; tests pass another directory than /sys.

    Raises:
        TransportError: libibverbs is not installed.
    """

def probe_rdma(address: str = "", sysfs: str = "/sys") -> list[RdmaFinding]:
    """Try everything that an RDMA link needs, step by step, up to a queue pair connected to itself.

    Args:
        address: IP address that the port must have; empty for any.
        sysfs: As in `rdma_devices`.

    Raises:
        ValueError: The address, or a variable MEGATRON_EXT_IB_*, is malformed.
    """
