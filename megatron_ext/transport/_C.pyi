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
class Segment:
    """Anonymous shared memory between processes: a sealed memfd and one mapping of it.

    It has no name, so nothing can be left behind: the kernel frees it when the last process that
    has it mapped or holds its descriptor is gone. It is a writable buffer of bytes, zero at first:
    `memoryview(segment)` and `torch.frombuffer(segment, ...)` share its memory and keep it mapped.
    Mapping and descriptor go with the last reference to the object; there is no close(), which
    would leave such views dangling. Processes that write to it synchronise by a Doorbell.
    """

    @staticmethod
    def create(size_bytes: int) -> Segment:
        """Allocate a segment, all of its memory at once.

        Raises:
            ValueError: `size_bytes` is not positive.
            TransportError: There is not that much memory; names the bytes asked for and the limit.
        """

    @staticmethod
    def attach(file: int | _HasFileno) -> Segment:
        """Map the segment behind a descriptor, which the caller keeps.

        Raises:
            TransportError: Not a descriptor of a segment, or one that another version made.
        """

    @staticmethod
    def receive(socket: int | _HasFileno, timeout_s: float | None = None) -> Segment:
        """Take the segment that the other end of a connected unix socket sends by `send`.

        Raises:
            TransportError: The peer closed the connection, sent something else or nothing in time.
        """

    def send(self, socket: int | _HasFileno, timeout_s: float | None = None) -> None:
        """Give the process at the other end of a connected unix socket access to this segment.

        Raises:
            TransportError: The peer is gone or takes nothing in time.
        """

    def fileno(self) -> int:
        """Return the descriptor, which stays the segment's own."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes, as given to `create`."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Doorbell:
    """Wakes threads of every process that shares one 32-bit word of a segment; nobody ever spins.

    The word counts rings. Nothing is lost if a waiter reads `sequence`, then looks whether there is
    something to do, and only then calls `wait` with what it read; and if the other side first does
    its work and then rings. Any number of doorbells may stand on one word of a segment.

    Args:
        segment: The segment that holds the word; kept alive.
        offset_bytes: Where in it, a multiple of 4. Nothing else may be written there.

    Raises:
        ValueError: The word is not aligned or not inside of the segment.
    """

    def __init__(self, segment: Segment, offset_bytes: int = 0) -> None: ...
    def ring(self) -> None:
        """Count one ring and wake all waiters."""

    @property
    def sequence(self) -> int:
        """Number of rings so far, modulo 2**32."""

    def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """Sleep until the sequence differs from `seen`.

        Returns:
            True if it differs, at once if it already did; False if the time was over first.
        """
