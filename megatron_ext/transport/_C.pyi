"""Types and contracts of the native core (source: csrc/bind.cc).

Waits release the GIL, sleep in the kernel and check for Python signals every 100 ms, so Ctrl-C
interrupts them. Every `timeout_s` is in seconds; None waits forever; a negative value or NaN raises
ValueError.
"""

# By convention, private native modules are called _C.
# ruff: noqa: N999

from typing import Protocol, final

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@final
class Message:
    """A message that has arrived: a writable buffer of its bytes.

    The bytes are in a slot in shared memory or in reused memory, which is free again once the last
    reference is dropped. `torch.frombuffer` holds a reference. Any thread may drop the last
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
    """The state of one of an endpoint's peers."""

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
        """Number of slots (or messages, if the wire has no slots) that have not been released."""

    @property
    def num_queued(self) -> int:
        """Number of messages to the peer that are waiting for room."""

class Link:
    """An endpoint's connection to one peer."""

@final
class ShmLink(Link):
    """A connection through shared memory. Create all links before calling `accept` on any of them.

    Args:
        endpoint: The endpoint that the link will be added to.
        peer: Rank of the peer.
        socket: A socket connected to the peer (AF_UNIX, SOCK_SEQPACKET), with nothing left to read;
            duplicated.

    Raises:
        ValueError: There is already a link to this peer.
        TransportError: There is not enough memory for the arena, or the peer is gone.
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, socket: int | _HasFileno
    ) -> None: ...
    @property
    def slots(self) -> tuple[int, int]:
        """Address and size in bytes of the memory that holds the peer's messages.

        Consists of whole pages, mapped as long as the link or one of its messages lives.
        """

    @property
    def peer_slots(self) -> tuple[int, int]:
        """Address and size in bytes of the peer's memory for messages to it; after `accept`."""

    def accept(self, timeout_s: float | None = None) -> None:
        """Wait until the peer has created its link.

        Raises:
            TransportError: The peer did not create its link in time, or sent something else.
        """

@final
class TcpLink(Link):
    """A connection over TCP.

    Args:
        endpoint: The endpoint that the link will be added to.
        peer: Rank of the peer.
        socket: A socket connected to the peer; duplicated.
        silence_s: A peer is considered dead if its host does not answer for this long. 1 to 86400.

    Raises:
        ValueError: There is already a link to this peer, or `silence_s` is out of range.
        TransportError: The socket is of the wrong kind.
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
    """An endpoint's counters."""

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
    """A process in a job, with its links to other processes.

    Call it from one thread; another thread may also call `send`, `publish` and `abort`. A thread in
    the core does the work that must continue while the process computes, such as sending messages
    that there was no room for earlier. In a forked child, every call raises TransportError.

    Args:
        rank: Rank of this process among its peers.
        slots: Number of messages from each peer that may be unreleased here, 1 to 1024.
        slot_bytes: Size of a slot; longer messages are sent in pieces, at the cost of a copy.
        checksums: Whether the bytes are sent with a checksum, which the receiver verifies.

    Raises:
        ValueError: An arena cannot have these sizes.
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
        """Return a message whose bytes the caller, or a device, will fill; never waits.

        The bytes are where the peer reads them or its device fetches them, and stay there as long
        as the message lives, even after the peer has died and after `close`. If a message is never
        published, its memory is never reused.

        Returns:
            None over TCP, for messages that are empty or longer than a slot, while other messages
                are waiting for room, and if so many are reserved that no slot is left. In these
                cases, use `send`.

        Raises:
            ValueError: As in `send`.
            TransportError: The peer is gone.
        """

    def publish(self, peer: int, message: Message) -> None:
        """Send a message from `reserve`, whose bytes must no longer change; never waits.

        Raises:
            ValueError: The message was published before, or was reserved for another peer.
            TransportError: The peer is gone.
        """

    def add_buffers(self, num_slots: int) -> tuple[int, int]:
        """Allocate memory for messages that do not stay where they arrived, `slot_bytes` each.

        Call it at most once. Longer messages, and messages beyond that number, are stored
        elsewhere.

        Returns:
            Address and size in bytes; whole pages, mapped as long as the endpoint or a message
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
            them, which saves creating the message object; or None if it did not arrive in time or
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
        """Notify all peers that this process is aborting and drop queued messages."""

    def close(self) -> None:
        """Send all peers a close notice and release the links.

        Messages that were taken stay valid.
        """

    def set_spin(self, seconds: float) -> None:
        """Make a wait spin for this long before it sleeps, if messages may come from another CPU.

        By default, a wait sleeps immediately. Meant for hosts with one CPU per process.

        Raises:
            ValueError: The value is not between 0 and 1.
        """

    def counts(self) -> EndpointCounts:
        """Return the totals so far; may also be called after `close`."""

    def peers(self) -> list[PeerReport]:
        """Return the peers' states, as far as they have been detected."""

@final
class RdmaLink(Link):
    """A connection over RDMA, with an additional TCP connection that carries close notices.

    Args:
        endpoint: The endpoint that the link will be added to, after `connect`.
        peer: Rank of the peer.
        socket: A TCP connection to the peer; duplicated.
        address: IP address of this host, which selects the port; empty for the best port.
        rail: Selects one of several equally good ports, usually the local rank.
        silence_s: A peer is considered dead if its host does not answer for this long. 1 to 86400.
        sysfs: Mount point of sysfs; tests pass a directory other than /sys.

    Raises:
        ValueError: There is already a link to this peer, or an argument or a MEGATRON_EXT_IB_*
            variable is malformed.
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
        """Address and size in bytes of the memory that holds the peer's messages."""

    @property
    def peer_slots(self) -> tuple[int, int]:
        """Address and size in bytes of the memory that the device sends to the peer from."""

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
        """The network interface that it belongs to; empty if there is none."""

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
        """Addresses, without the table's empty entries."""

@final
class RdmaDevice:
    """An RDMA device on this host."""

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
    """The result of one probe step."""

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
    """Return the fingerprint of a row-major float32 matrix.

    The fingerprint is defined in `megatron_ext/tracing/fingerprint.py`. Releases the GIL.

    Args:
        values: Address of the matrix.
        shape: Rows and columns.
        rows: Addresses of the row factors (int64) and the row weights (float32).
        columns: The same for the columns.

    Returns:
        The bits, as a signed 64-bit number; then the norm and the projections.

    Raises:
        ValueError: The number of columns is not a multiple of 8.
    """

def rdma_devices(sysfs: str = "/sys") -> list[RdmaDevice]:
    """Return all RDMA devices on this host. Opens each of them briefly.

    Args:
        sysfs: Mount point of sysfs; tests pass a directory other than /sys.

    Raises:
        TransportError: libibverbs is not installed.
    """

def probe_rdma(address: str = "", sysfs: str = "/sys") -> list[RdmaFinding]:
    """Try everything that an RDMA link needs, step by step, up to a queue pair connected to itself.

    Args:
        address: IP address that the port must have; empty for any.
        sysfs: As in `rdma_devices`.

    Raises:
        ValueError: The address or a MEGATRON_EXT_IB_* variable is malformed.
    """
