"""Two transports in one: device to device for some peers, another one for the rest.

The rest goes over torch.distributed if the order is that of a table, and through the host, beside
the notes of the direct transport, if messages arrive in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ext.transport.base import Expected, Stats
from megatron_ext.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    import torch

    from megatron_ext.message import Message
    from megatron_ext.transport.base import Transport
    from megatron_ext.transport.direct import DirectTransport


class PairedTransport:
    """Carries the tensors of each pair of ranks over the transport of that pair.

    Args:
        direct: For the peers whose devices this rank's device reaches.
        rest: For the other peers; the one over the direct transport's host transport, or a
            `TorchTransport`. Both are closed with this one.
    """

    def __init__(self, direct: DirectTransport, rest: Transport) -> None:
        self._direct = direct
        self._rest = rest
        self._peers = frozenset(direct.stats().wires)
        # The rest, if it counts also the calls that it does not carry.
        self._in_order = rest if isinstance(rest, TorchTransport) else None

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step on both."""
        # `flush` has ended the one before. The rest first: a host transport of both starts its step
        # there.
        self._rest.begin([item for item in expected if item.source not in self._peers], slots)
        self._direct.begin([item for item in expected if item.source in self._peers], slots)

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor."""
        if target not in self._peers:
            self._rest.isend(tensor, target, message)
            return
        self._direct.isend(tensor, target, message)
        if self._in_order is not None:
            self._in_order.count_call()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Wait for a message and return its tensor."""
        if source not in self._peers:
            return self._rest.recv(source, message, timeout_s)
        tensor = self._direct.recv(source, message, timeout_s)
        if self._in_order is not None:
            self._in_order.count_call()
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return what arrived, whoever sent it."""
        # Only dynamic orders ask, and then the rest goes over the host transport of both.
        return self._rest.poll(timeout_s)

    def wake(self) -> None:
        """End a `poll`."""
        self._rest.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all sends of both have completed."""
        self._rest.flush(timeout_s)
        self._direct.flush(timeout_s)

    def abort(self, reason: str) -> None:
        """Abort both."""
        self._direct.abort(reason)
        self._rest.abort(reason)

    def close(self) -> None:
        """Close both."""
        self._direct.close()
        self._rest.close()

    def stats(self) -> Stats:
        """Return the totals of both."""
        direct, rest = self._direct.stats(), self._rest.stats()
        wires = {**rest.wires, **direct.wires}
        if self._in_order is None:  # the host transport counts the notes and waits of both
            return Stats(rest.messages, direct.bytes + rest.bytes, rest.waited_s, wires)
        return Stats(
            direct.messages + rest.messages,
            direct.bytes + rest.bytes,
            direct.waited_s + rest.waited_s,
            wires,
        )
