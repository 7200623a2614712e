"""Copies between host and device that overlap with computation, on devices with streams.

The code uses the interface that `torch.cuda` defines and torch_musa mirrors. Devices differ only in
how they register existing host memory with their driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_log = logging.getLogger(__name__)

_Register = Callable[[int, int, int], Any]
_Unregister = Callable[[int], Any]


class Copied(NamedTuple):
    """A handle for waiting on asynchronous copies."""

    runtime: Any
    device: torch.device
    marks: tuple[Any, ...]
    """Events recorded after the copies, or the streams that run them."""

    def wait(self) -> None:
        """Sleep until the copies are done; callable from any thread.

        Raises:
            RuntimeError: The device failed, in these copies or in earlier work.
        """
        # In a new thread, the first device is current.
        with self.runtime.device(self.device):
            for mark in self.marks:
                mark.synchronize()


class Copies:
    """Asynchronous copies, with a separate stream for each direction.

    Until a copy is complete, its source must not change, and the host must not read the result.

    Args:
        runtime: `torch.cuda`, or a module with the same interface.
        device: The device, with its index.
        pinning: The driver's functions that register host memory (address, bytes, flags) and
            unregister it (address); the first returns an error code, 0 for success. None if the
            driver has no such functions.
    """

    def __init__(
        self,
        runtime: Any,
        device: torch.device,
        pinning: tuple[_Register, _Unregister] | None,
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._pinning = pinning
        # One stream for each direction: devices can copy both ways at once, but a stream runs its
        # work in order.
        self._down = runtime.Stream(device)
        self._up = runtime.Stream(device)

    def to_host(
        self, tensor: torch.Tensor, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Copied]:
        """Start copying a contiguous tensor to the host, after all work on the current stream.

        `target` has the same shape and dtype and is in memory that `pin` has registered. If it is
        not given, the tensor is copied to newly pinned memory.
        """
        host = target
        if host is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # The kernels that write the tensor may still be queued on the current stream.
        self._down.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._down):
            host.copy_(tensor.detach(), non_blocking=True)
        copied = self._mark(self._down)
        return host, Copied(self._runtime, self._device, (copied,))

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        """Start copying a tensor to the device. This call blocks if the tensor is not pinned.

        Work queued later on the current stream waits for the copy.
        """
        # Allocate on the copy stream, so that the copy does not have to wait for
        # computation; `record_stream` below tells the allocator that the current stream
        # uses the memory too.
        with self._runtime.stream(self._up):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            # If the memory is not pinned, the driver reads all bytes before this call returns.
            copy.copy_(tensor, non_blocking=True)
        copied = self._mark(self._up)
        current = self._runtime.current_stream(self._device)
        current.wait_event(copied)
        copy.record_stream(current)
        return copy, Copied(self._runtime, self._device, (copied,))

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register host memory (whole pages) with the device; return whether it succeeded.

        On failure this logs a warning, and copies from that memory will block.
        """
        if self._pinning is None:
            problem = f"the {self._device.type} runtime cannot register host memory"
        else:
            register, _ = self._pinning
            # Flags of 0 mean cudaHostRegisterDefault.
            code = int(register(address, num_bytes, 0))
            if code == 0:
                return True
            try:
                # The driver keeps its last error. Launch a kernel here that reports and clears the
                # error; otherwise the next training kernel would fail.
                torch.zeros(1, device=self._device)
            except RuntimeError as error:
                _log.debug("cleared a driver error: %s", error)
            problem = (
                f"{num_bytes} bytes of host memory cannot be registered with {self._device} "
                f"(error {code} of its driver)"
            )
        _log.warning(
            "%s: the rank waits while messages are copied to the device", problem
        )
        return False

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is freed."""
        assert self._pinning is not None, "nothing was pinned"
        _, unregister = self._pinning
        unregister(address)

    def _mark(self, stream: Any) -> Any:
        # blocking: a thread that waits for the event sleeps instead of spinning.
        event = self._runtime.Event(blocking=True)
        return stream.record_event(event)
