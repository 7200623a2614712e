"""Copies between host and device beside the computation, for devices with streams and events.

Written once against the interface that `torch.cuda` defines and torch_musa mirrors. What devices
differ in is how host memory that somebody else allocated is registered with their driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HostRegister", "StreamCopies"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostRegister:
    """The two calls of a driver's runtime that pin host memory, and give it up again."""

    register: Callable[[int, int, int], Any]
    """Takes address, bytes and flags; returns the error code, 0 for success."""
    unregister: Callable[[int], Any]


@dataclass(frozen=True)
class _Copied:
    """The end of a copy."""

    event: Any
    runtime: Any
    device: torch.device

    def wait(self) -> None:
        """Sleep until the copy is done."""
        with self.runtime.device(self.device):  # a new thread is on the first device
            self.event.synchronize()


class StreamCopies:
    """Copies that each direction does in a stream of its own.

    Args:
        runtime: `torch.cuda`, or a module with the same interface.
        device: Where device tensors are, with its index.
        host_register: How memory is pinned; None where the runtime has no such call.
    """

    def __init__(
        self, runtime: Any, device: torch.device, host_register: HostRegister | None
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._host_register = host_register
        self._down = runtime.Stream(device)
        self._up = runtime.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Copied]:
        """Begin a copy to pinned memory, ordered after all that the current stream was given.

        The memory comes from torch's allocator of pinned memory, which uses it again.

        Args:
            tensor: Contiguous. To be kept, unwritten, until the copy is done.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._down.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._down):
            host.copy_(tensor.detach(), non_blocking=True)
        return host, self._mark(self._down)

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Copied]:
        """Begin a copy to the device; the current stream goes on when it is done.

        The copy waits for nothing that the device computes: the memory belongs to the stream of
        the copy, and the current stream is made known to the allocator as its user.

        Args:
            tensor: To be kept, unwritten, until the copy is done. Read at once if it is not pinned.
        """
        with self._runtime.stream(self._up):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            copy.copy_(tensor, non_blocking=tensor.is_pinned())
        copied = self._mark(self._up)
        current = self._runtime.current_stream(self._device)
        current.wait_event(copied.event)
        copy.record_stream(current)
        return copy, copied

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register host memory, so that copies from it run beside everything else."""
        if self._host_register is None:
            _log.warning(
                "the runtime of %s cannot register host memory: what arrives is copied to the "
                "device while its rank waits",
                self._device.type,
            )
            return False
        code = int(self._host_register.register(address, num_bytes, 0))
        if code != 0:
            self._forget_error()
            _log.warning(
                "%d bytes of shared memory cannot be registered with %s (error %d of its driver): "
                "what arrives is copied to the device while its rank waits",
                num_bytes, self._device, code,
            )  # fmt: skip
        return code == 0

    def unpin(self, address: int) -> None:
        """Take back what `pin` did."""
        assert self._host_register is not None, "nothing was pinned"
        self._host_register.unregister(address)

    def _mark(self, stream: Any) -> _Copied:
        # blocking: who waits for the event sleeps, where by default it would spin.
        event = stream.record_event(self._runtime.Event(blocking=True))
        return _Copied(event, self._runtime, self._device)

    def _forget_error(self) -> None:
        """Run a kernel, whose launch reports what the driver remembers of the last call."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            _log.debug("of the driver: %s", error)
