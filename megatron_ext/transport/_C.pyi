"""Types and contracts of the native core (source: csrc/bind.cc).

Waits release the GIL, sleep in the kernel and look for Python signals every 100 ms, so Ctrl-C ends
them. Every `timeout_s` is in seconds, None waits for ever; a negative or NaN one is a ValueError.
"""

# Native modules that are a package's own business are called _C by convention.
# ruff: noqa: N999

from typing import Protocol, final

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@final
class Message:
    """A message that arrived: a writable buffer of its bytes.

    They stand in a slot of shared memory, or in memory that other messages used before, and go back
    there with the last reference. `torch.frombuffer` keeps one. Any thread may drop it.
    """

    @property
    def dtype(self) -> int:
        """DLPack's type code, times 256, and number of bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the sender gave it."""

    def dlpack(self) -> object:
        """Return a DLPack capsule on the bytes, which keeps them; to be taken once."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PeerReport:
    """How a peer of an endpoint is."""

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
        """Reason that it gave when it aborted, or how its death was noticed; may be empty."""

    @property
    def num_arrived(self) -> int:
        """Messages from it that were not taken."""

    @property
    def num_held(self) -> int:
        """Slots, or messages where a wire has none, that were not let go."""

    @property
    def num_queued(self) -> int:
        """Messages to it that wait for room."""

class Link:
    """The connection of an endpoint with one peer."""

@final
class ShmLink(Link):
    """A connection through shared memory. Make those with all peers before accepting on any.

    Args:
        endpoint: To which it will be added.
        peer: Rank of the peer.
        socket: Connected to it (AF_UNIX, SOCK_SEQPACKET), with nothing left to read; duplicated.

    Raises:
        ValueError: There is a link to this peer already.
        TransportError: There is no memory for the arena, or the peer is gone.
    """

    def __init__(self, endpoint: Endpoint, peer: int, socket: int | _HasFileno) -> None: ...
    @property
    def slots(self) -> tuple[int, int]:
        """Address and number of bytes of the memory that the peer's messages stand in.

        Whole pages, mapped as long as the link or a message of it lives.
        """

    @property
    def peer_slots(self) -> tuple[int, int]:
        """The same of the peer's memory that messages to it stand in. After `accept`."""

    def accept(self, timeout_s: float | None = None) -> None:
        """Wait until the peer has made its own.

        Raises:
            TransportError: It does not in time, or does something else.
        """

@final
class TcpLink(Link):
    """A connection over TCP.

    Args:
        endpoint: To which it will be added.
        peer: Rank of the peer.
        socket: Connected to it; duplicated.
        silence_s: A peer whose host answers nothing for so long is taken for dead. 1 to 86400.

    Raises:
        ValueError: There is a link to this peer already, or `silence_s` is out of range.
        TransportError: The socket is of another kind.
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, socket: int | _HasFileno, silence_s: float = 15.0
    ) -> None: ...

@final
class EndpointCounts:
    """Counters of an endpoint."""

    @property
    def num_messages(self) -> int:
        """Messages sent."""

    @property
    def num_bytes(self) -> int:
        """Bytes in them."""

    @property
    def waited_s(self) -> float:
        """Time asleep, or spinning, in waits."""

    @property
    def last_wait_s(self) -> float:
        """The same of the last call that may wait."""

@final
class Endpoint:
    """One process of a job, and its links to others.

    Calls come from one thread; `send`, `publish` and `abort` may come from another. What has to go
    on while the process computes, such as messages that found no room, is done by a thread of the
    core. In a forked child every call is a TransportError.

    Args:
        rank: Name of this process among its peers.
        slots: Room for what each peer has sent and this process not let go, 1 to 1024.
        slot_bytes: Size of each; longer messages go through in pieces, at the cost of a copy.
        checksums: Whether the bytes that are sent carry a checksum, which the receiver looks at.

    Raises:
        ValueError: Sizes that no arena has.
    """

    def __init__(self, rank: int, slots: int, slot_bytes: int, checksums: bool = False) -> None: ...
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
        """Send what stands at `address`, to a peer or to this process; never waits.

        It is as long as its shape and its dtype say. `owner` is kept until it is copied, which may
        be before this returns.

        Raises:
            ValueError: There is no such peer, or the shape has more than 8 dimensions, or one below
                0.
            TransportError: The peer is gone.
        """

    def reserve(self, peer: int, tag: int, dtype: int, shape: tuple[int, ...]) -> Message | None:
        """Return a message whose bytes are to be filled, by a device for example; never waits.

        They stand where the peer reads them, or where its device fetches them. They stay there as
        long as the message, also after the peer's death and after `close`. What is never published
        is never used for another message.

        Returns:
            None on TCP, for messages without bytes or longer than a slot, while others wait for
            room, and if so many are handed out that none would be left: `send` it then.

        Raises:
            ValueError: As `send`.
            TransportError: The peer is gone.
        """

    def publish(self, peer: int, message: Message) -> None:
        """Send a message of `reserve`, whose bytes must not change any more; never waits.

        Raises:
            ValueError: It was published before, or reserved for another peer.
            TransportError: The peer is gone.
        """

    def add_buffers(self, num_slots: int) -> tuple[int, int]:
        """Allocate memory for messages that do not stay where they arrived, `slot_bytes` for each.

        To be called once. Longer messages, and those beyond that number, stand elsewhere.

        Returns:
            Address and number of bytes; whole pages, mapped as long as the endpoint or a message.

        Raises:
            TransportError: Memory is short.
        """

    def take(
        self, source: int, tag: int, timeout_s: float | None = None, capsule_dtype: int = 0
    ) -> Message | object | None:
        """Wait for a message.

        Returns:
            A message; if it has bytes, and they are of `capsule_dtype`, a DLPack capsule on them in
            its place, which spares the way through an object of its own. None if it did not come
            in time, or will not: see `peers`. A peer that died or aborted ends every wait, one that
            closed only waits for its own messages.
        """

    def arrivals(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Wait for messages that were not named before.

        Returns:
            (source, tag) of each that was not taken; empty when `take` would return None, or when
            all peers closed.
        """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every message sent is on its way and its memory free.

        Returns:
            False if it does not come to that in time, or a receiver is gone.
        """

    def abort(self, reason: str) -> None:
        """Tell all peers that this process gives up, and drop what is queued."""

    def close(self) -> None:
        """Say farewell to all peers and let go of them. Messages that were taken stay valid."""

    def set_spin(self, seconds: float) -> None:
        """Let a wait spin for so long before it sleeps, if messages may come from another CPU.

        At first it sleeps at once. For hosts with a CPU for each of their processes.

        Raises:
            ValueError: Not between 0 and 1.
        """

    def counts(self) -> EndpointCounts:
        """Return what was done so far; also after `close`."""

    def peers(self) -> list[PeerReport]:
        """Return how the peers are, as far as was noticed."""

@final
class RdmaLink(Link):
    """A connection over RDMA, with one over TCP beside it that carries farewells.

    Args:
        endpoint: To which it will be added, after `connect`.
        peer: Rank of the peer.
        socket: A TCP connection to it; duplicated.
        address: IP address of this host by which the port is chosen; empty for the best port.
        rail: Deals out ports of equal worth, usually the local rank.
        silence_s: A peer whose host answers nothing for so long is taken for dead. 1 to 86400.
        sysfs: Where the kernel's files about devices are; another place than /sys in tests.

    Raises:
        ValueError: There is a link to this peer already, or an argument or one of the variables
            MEGATRON_EXT_IB_* is malformed.
        TransportError: This host has no usable RDMA port, or too little memory that can be locked.
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
        """Connect with the peer, which does the same; with several, in ascending order of ranks.

        Raises:
            TransportError: It does not come in time, gives up, or cannot be reached; names both
                ends.
        """

    @property
    def slots(self) -> tuple[int, int]:
        """Address and number of bytes of the memory that the peer's messages stand in."""

    @property
    def peer_slots(self) -> tuple[int, int]:
        """The same of the memory from which the device fetches messages to the peer."""

    @property
    def text(self) -> str:
        """Device, port and GID of both ends."""

@final
class GidEntry:
    """An address of an RDMA port."""

    @property
    def index(self) -> int:
        """Place in the port's table."""

    @property
    def gid(self) -> str:
        """Written as an IPv6 address; ::ffff:a.b.c.d for an IPv4 address."""

    @property
    def type(self) -> str:
        """As the kernel writes it: RoCE v2, or IB/RoCE v1."""

    @property
    def net_device(self) -> str:
        """The network interface it belongs to, empty where there is none."""

@final
class RdmaPort:
    """A port of an RDMA device."""

    @property
    def number(self) -> int:
        """Counts from 1."""

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
        """Most that one write can carry."""

    @property
    def gids(self) -> list[GidEntry]:
        """Addresses, without the empty entries of the table."""

@final
class RdmaDevice:
    """An RDMA device of this host."""

    @property
    def name(self) -> str:
        """As libibverbs names it."""

    @property
    def error(self) -> str:
        """Why it cannot be used, empty if it can."""

    @property
    def remedy(self) -> str:
        """Remedy."""

    @property
    def ports(self) -> list[RdmaPort]:
        """Empty for a device with an error."""

@final
class RdmaFinding:
    """Result of one step of the probe."""

    @property
    def step(self) -> str:
        """One of library, devices, port, memory and queue pair."""

    @property
    def is_good(self) -> bool:
        """True if it works; the last finding is the first that does not, if any."""

    @property
    def text(self) -> str:
        """Finding in words."""

    @property
    def remedy(self) -> str:
        """Remedy, if it does not work."""

def rdma_devices(sysfs: str = "/sys") -> list[RdmaDevice]:
    """Return all RDMA devices of this host; opens each of them for a moment.

    Args:
        sysfs: Where the kernel's files about devices are; another place than /sys in tests.

    Raises:
        TransportError: libibverbs is not there.
    """

def probe_rdma(address: str = "", sysfs: str = "/sys") -> list[RdmaFinding]:
    """Try what a link over RDMA needs, step by step, up to a queue pair connected to itself.

    Args:
        address: The IP address that the port has to have; empty for any.
        sysfs: As above.

    Raises:
        ValueError: The address, or a variable MEGATRON_EXT_IB_*, is malformed.
    """
