"""What carries tensors between the stages of a pipeline: the interface of all transports.

A message is named by what it is for (`megatron_ext/messages.py`), so a receiver may take messages
in any order, and a send never waits for the order in which its peer receives. Nothing here knows
schedules: the executor says at the start of each step what will arrive, and from whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_ext.messages import Message

__all__ = ["Expected", "Stats", "Transport"]


class Expected(NamedTuple):
    """A message that will arrive in this step."""

    source: int
    """Global rank of the sender."""
    message: Message
    shape: tuple[int, ...] | None
    """None: only the sender knows it."""
    dtype: torch.dtype
    after: int = 0
    """Calls of `isend` and `recv` that its receiver makes in this step before it is the turn of
    this message in the order that all ranks share (`schedules/search/queues.py`). Wires whose
    receives have to be started in one order with sends use this."""


@dataclass
class Stats:
    """What a transport did since it was opened."""

    messages: int = 0
    """Messages sent."""
    bytes: int = 0
    """Bytes of tensors sent."""
    waited_s: float = 0.0
    """Time spent waiting for messages."""
    wires: dict[int, str] = field(default_factory=dict)
    """By the global rank of each peer: what carries its messages, such as `tcp`."""


class Transport(Protocol):
    """Carries tensors between ranks. All calls of one instance come from one thread."""

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step, and say what will arrive in it.

        Args:
            expected: Everything, in the order in which each source sends it, and with `after` in
                ascending order. Wires that cannot take a message without knowing its size, or
                before room for it was posted, use this.
            slots: Messages of one kind that one rank may have sent to another and that were not
                received yet. With so many no send waits, whatever the timing (see
                `schedules/representation/memory.py`), so it is the room that a wire needs.

        Raises:
            TransportError: Messages of the step before were not received.
        """

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor to a global rank, without waiting for it to receive.

        The transport keeps the tensor's storage alive as long as it needs it; the caller must not
        write to it again, but may drop it or swap its `data`.
        """

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a tensor that was sent, when it is there.

        Raises:
            TransportError: It did not come in time, or the peer is gone; names message and peer.
        """

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived since the last call; sleep until there is one.

        Returns:
            Their names; empty after the time-out. They still have to be taken with `recv`.

        Raises:
            TransportError: The wire cannot tell before it is received, or a peer is gone.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left, so that its memory is free.

        Raises:
            TransportError: A peer does not take its messages in time.
        """

    def abort(self, reason: str) -> None:
        """Give the step up: free what it holds, and end the waits of peers where the wire can."""

    def close(self) -> None:
        """Give up everything that is held. May be called twice."""

    def stats(self) -> Stats:
        """Return what was done so far."""
