"""A transport that tells an observer what it sends, receives and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from megatron_ext.messages import Message
    from megatron_ext.transport.base import Expected, Stats, Transport

__all__ = ["ObservedTransport", "TransportObserver", "WaitsFor"]

WaitsFor = Literal["input", "slot"]
"""input: that any message arrives. slot: that everything sent has left."""


class TransportObserver:
    """Listens to one rank's messages; override what matters. Begin and end come in pairs."""

    def begin_messages(self, expected: Sequence[Expected]) -> None:
        """Note what will arrive in the step that begins."""

    def begin_send(self, message: Message, target: int) -> None:
        """Note that a message is handed to the wire."""

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """Note that the wire has taken it."""

    def begin_receive(self, message: Message, source: int) -> None:
        """Note that a message is asked for."""

    def end_receive(self, message: Message, source: int, num_bytes: int, waited_s: float) -> None:
        """Note that it is here.

        Args:
            message: Which.
            source: Global rank of the sender.
            num_bytes: Of its tensor.
            waited_s: How much of the time since `begin_receive` the transport slept.
        """

    def begin_wait(self, what: WaitsFor) -> None:
        """Note that the rank has nothing to do until something happens."""

    def end_wait(self, what: WaitsFor, arrived: Sequence[Message]) -> None:
        """Note that the wait is over, and what arrived meanwhile."""

    def arrived(self, messages: Sequence[Message]) -> None:
        """Note messages that are here, without a wait for them."""


class ObservedTransport:
    """Does what another transport does, and tells an observer.

    An error ends the step, so what it interrupts is begun and never ended.

    Args:
        transport: Carries the messages; closed with this one.
        observer: Listens. All calls come from the thread that calls the transport.
    """

    def __init__(self, transport: Transport, observer: TransportObserver) -> None:
        self._transport = transport
        self._observer = observer

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step."""
        self._observer.begin_messages(expected)
        self._transport.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor."""
        self._observer.begin_send(message, target)
        self._transport.isend(tensor, target, message)
        self._observer.end_send(message, target, tensor.nbytes)

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Receive a tensor."""
        self._observer.begin_receive(message, source)
        before_s = self._transport.stats().waited_s
        tensor = self._transport.recv(source, message, timeout_s)
        waited_s = self._transport.stats().waited_s - before_s
        self._observer.end_receive(message, source, tensor.nbytes, waited_s)
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return what has arrived; a look that may not wait is no wait."""
        if timeout_s == 0.0:
            arrived = self._transport.poll(0.0)
            self._observer.arrived(arrived)
            return arrived
        self._observer.begin_wait("input")
        arrived = self._transport.poll(timeout_s)
        self._observer.end_wait("input", arrived)
        return arrived

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left."""
        self._observer.begin_wait("slot")
        self._transport.flush(timeout_s)
        self._observer.end_wait("slot", ())

    def abort(self, reason: str) -> None:
        """Give the step up."""
        self._transport.abort(reason)

    def close(self) -> None:
        """Give up everything that is held."""
        self._transport.close()

    def stats(self) -> Stats:
        """Return what was done so far."""
        return self._transport.stats()
