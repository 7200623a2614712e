"""A transport that reports its sends, receives and waits to an observer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from megatron_ext.message import Message
    from megatron_ext.transport.base import Expected, Transport

WaitsFor = Literal["input", "slot"]
"""input: the arrival of any message. slot: the completion of all sends."""


class TransportObserver:
    """Callbacks for one rank's messages; here, they do nothing. Each begin has a matching end."""

    def connected(self, wires: Mapping[int, str]) -> None:
        """A transport has been opened.

        `wires` maps the global rank of each peer to the wire that reaches it.
        """

    def begin_messages(self, expected: Sequence[Expected]) -> None:
        """A step begins; these messages will arrive in it."""

    def begin_send(self, message: Message, target: int) -> None:
        """The rank passes a message for global rank `target` to the wire."""

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """The wire has accepted the message, a tensor of `num_bytes`."""

    def begin_receive(self, message: Message, source: int) -> None:
        """The rank starts to receive a message from global rank `source`."""

    def end_receive(
        self,
        message: Message,
        source: int,
        num_bytes: int,
        waited_s: float,
    ) -> None:
        """The rank has received the message, a tensor of `num_bytes`.

        The transport waited for `waited_s` of the time since `begin_receive`.
        """

    def begin_wait(self, cause: WaitsFor) -> None:
        """The rank starts to wait."""

    def end_wait(self, cause: WaitsFor, arrived: Sequence[Message]) -> None:
        """The wait is over; these messages arrived during it."""

    def arrived(self, messages: Sequence[Message]) -> None:
        """A poll that did not wait has returned these messages."""


_MESSAGE_EVENTS = (
    "begin_messages",
    "begin_send",
    "end_send",
    "begin_receive",
    "end_receive",
    "begin_wait",
    "end_wait",
    "arrived",
)


def observed(transport: Transport, observers: Sequence[TransportObserver]) -> Transport:
    """Return a transport that reports to these observers.

    Observers that ignore messages do not delay them.
    """
    for observer in observers:
        observer.connected(transport.stats().wires)
        if _hears_messages(observer):
            transport = ObservedTransport(transport, observer)
    return transport


def _hears_messages(observer: TransportObserver) -> bool:
    for event in _MESSAGE_EVENTS:
        default = getattr(TransportObserver, event)
        if getattr(type(observer), event) is not default:
            return True
    return False


class ObservedTransport:
    """Delegates to another transport and reports to an observer in the caller's thread."""

    def __init__(self, transport: Transport, observer: TransportObserver) -> None:
        self._transport = transport
        self._observer = observer
        # Calls to these methods are not reported.
        self.wake = transport.wake
        self.abort = transport.abort
        self.close = transport.close
        self.stats = transport.stats

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step."""
        self._observer.begin_messages(expected)
        self._transport.begin(expected, slots)

    # Do not use `finally` here: a call that raises aborts the step and is reported
    # without an end.
    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Report and send a tensor."""
        self._observer.begin_send(message, target)
        self._transport.isend(tensor, target, message)
        self._observer.end_send(message, target, tensor.nbytes)

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Receive and report a tensor."""
        self._observer.begin_receive(message, source)
        # The difference in the transport's totals is the time that the call spent waiting.
        before_s = self.stats().waited_s
        tensor = self._transport.recv(source, message, timeout_s)
        waited_s = self.stats().waited_s - before_s
        self._observer.end_receive(message, source, tensor.nbytes, waited_s)
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the arrivals. A time-out of 0 is not reported as a wait."""
        if timeout_s == 0.0:
            arrived = self._transport.poll(0.0)
            self._observer.arrived(_tensors(arrived))
            return arrived
        self._observer.begin_wait("input")
        arrived = self._transport.poll(timeout_s)
        self._observer.end_wait("input", _tensors(arrived))
        return arrived

    def flush(self, timeout_s: float) -> None:
        """Wait until all sends have completed."""
        self._observer.begin_wait("slot")
        self._transport.flush(timeout_s)
        self._observer.end_wait("slot", ())


# Observers are told about tensors, but not about launch notices.
def _tensors(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.launched]
