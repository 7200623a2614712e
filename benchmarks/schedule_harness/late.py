"""Emulates message latency: the sender stamps a message, and the receiver gets it only later.

The stamp is the time of the send on the machine's monotonic clock, in the first two elements of the
tensor, which an emulated stage ignores. This package's executor polls the transport, so a transport
wrapper hides messages until they are due; for the peers' runtimes the stage itself waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ext.message import Message
from megatron_ext.transport.base import Expected, Transport

_WRAP_S = 1 << 20
"""Whole seconds below this are exact in single precision."""


def stamp(tensor: torch.Tensor) -> None:
    """Write the time into a tensor, whoever else sees its storage."""
    whole, part = divmod(time.perf_counter(), 1.0)
    tensor.data.view(-1)[:2] = torch.tensor([whole % _WRAP_S, part])


def read(tensor: torch.Tensor) -> float:
    """Return when a tensor was stamped."""
    whole, part = tensor.detach().view(-1)[:2].tolist()
    now = time.perf_counter()
    return float(now // _WRAP_S * _WRAP_S + whole + part)


class LateTransport:
    """Another transport, with latency.

    Args:
        inner: Carries the messages.
        latency_s: Says how long a message is under way.
    """

    def __init__(self, inner: Transport, latency_s: Callable[[Message], float]) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._source: dict[Message, int] = {}
        self._held: dict[Message, tuple[float, torch.Tensor]] = {}
        """Messages that are here, and since when they may be seen."""
        self._told: set[Message] = set()

    def __getattr__(self, name: str) -> Any:
        """Return what is not late: to wake, flush, abort and close, and the statistics."""
        return getattr(self._inner, name)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        self._source = {item.message: item.source for item in expected}
        self._told.clear()
        self._inner.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, key: Message) -> None:
        if key.kind == "D":  # decisions are not late
            self._inner.isend(tensor, target, key)
            return
        tensor = tensor.detach().clone()
        stamp(tensor)
        self._inner.isend(tensor, target, key)

    def recv(self, source: int, key: Message, timeout_s: float) -> torch.Tensor:
        if key.kind == "D":
            return self._inner.recv(source, key, timeout_s)
        if key not in self._held:
            self._hold(key, timeout_s)
        seen_s, tensor = self._held.pop(key)
        time.sleep(max(0.0, seen_s - time.perf_counter()))
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        deadline_s = time.perf_counter() + timeout_s
        wait_s = 0.0
        while True:
            for key in self._inner.poll(wait_s):
                self._hold(key, timeout_s)
            now_s = time.perf_counter()
            waiting = {k: s for k, (s, _) in self._held.items() if k not in self._told}
            keys = [key for key, seen_s in waiting.items() if seen_s <= now_s]
            self._told.update(keys)
            if keys or now_s >= deadline_s:
                return keys
            wait_s = max(0.0, min([deadline_s, *waiting.values()]) - now_s)

    def _hold(self, key: Message, timeout_s: float) -> None:
        tensor = self._inner.recv(self._source[key], key, timeout_s)
        self._held[key] = read(tensor) + self._latency_s(key), tensor
