"""The interface for all transports, which carry tensors between pipeline stages.

Messages are identified by their purpose (`megatron_ext/message.py`), not by their position in a
sequence. A receiver may therefore receive messages in any order, and a send does not depend on the
order in which its peer receives. Transports are independent of schedules: at the start of each
step, the executor announces the incoming messages and their senders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_ext.message import Message


class Expected(NamedTuple):
    """A message that will arrive in this step."""

    source: int
    """The sender's global rank."""
    message: Message
    shape: tuple[int, ...] | None
    """The tensor's shape; None if the receiver does not know it."""
    dtype: torch.dtype
    after: int = 0
    """Number of `isend` and `recv` calls that the receiver makes in this step before this message
    is due, in the order that all ranks share (`schedules/search/queues.py`). Used by wires that
    must start receives and sends in the same order."""


@dataclass
class Stats:
    """Totals since the transport was opened."""

    messages: int = 0
    """Number of messages sent."""
    bytes: int = 0
    """Number of bytes in the tensors sent."""
    waited_s: float = 0.0
    """Time spent waiting for messages."""
    wires: dict[int, str] = field(default_factory=dict)
    """Global rank of a peer -> the wire to it, such as `tcp`."""


class Transport(Protocol):
    """Carries tensors between ranks. All calls except `wake` must come from one thread."""

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step and announce the messages that will arrive in it.

        Args:
            expected: All messages in the step, in the order in which each source sends them, with
                ascending `after`. Some wires need a message's size, or a buffer for it, in advance.
            slots: Maximum number of messages of one kind in flight from one rank to another. If
                there are this many slots, no send ever blocks, regardless of timing (see
                `schedules/table/memory.py`).

        Raises:
            TransportError: A message from the previous step was not received.
        """

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor of any shape to a global rank without waiting for it to be received.

        The transport keeps the tensor's storage alive as long as necessary. The caller must not
        write to the storage again, but may drop the tensor or replace its `data`.

        Raises:
            TransportError: The wire cannot carry the message or its dtype, or the peer is gone.
        """

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Wait for a message and return its tensor, with the sender's shape and dtype.

        Raises:
            TransportError: The message did not arrive in time, or the peer is gone; the error names
                the message and the peer.
        """

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived since the last call; sleep until one arrives.

        Returns:
            The messages, without their tensors, which `recv` returns; empty after a time-out or
            `wake`. Some wires first deliver a notice that the sender has launched the computation;
            from then on, `recv` can return the tensor, and the device waits for its contents.

        Raises:
            TransportError: The wire cannot report arrivals before the receive, or a peer is gone.
        """

    def wake(self) -> None:
        """Make the current or next `poll` return early. Any thread may call this."""

    def flush(self, timeout_s: float) -> None:
        """Wait until all sends have completed, so that their memory is free.

        Raises:
            TransportError: A peer did not accept its messages in time.
        """

    def abort(self, reason: str) -> None:
        """Abort the step: release its resources and, if possible, unblock waiting peers."""

    def close(self) -> None:
        """Release all resources. May be called more than once."""

    def stats(self) -> Stats:
        """Return the totals since the transport was opened."""


def find_lost_peer(transport: Transport, timeout_s: float) -> None:
    """Poll for `timeout_s` to report a lost peer instead of an error caused by the loss.

    Raises:
        TransportError: A peer is gone; the subclass of the error says how.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        transport.poll(left_s)  # returns early for messages from other peers
