"""Carries device tensors over a transport for host tensors, staged through pinned memory.

A send copies the tensor to pinned host memory on a separate stream that waits for the computation.
A thread sleeps until the copy is complete, then sends it or publishes the slot that contains it. A
received tensor is copied to the device directly from where it arrived in host memory. The caller
therefore never waits for the device, and memory is read only after its copy is complete.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from megatron_ext.errors import TransportError
from megatron_ext.transport.afterwards import Afterwards
from megatron_ext.transport.dtypes import plain, tensor_on

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.copies import Copies
    from megatron_ext.message import Message
    from megatron_ext.transport.base import Expected, Stats
    from megatron_ext.transport.native_transport import NativeTransport

_log = logging.getLogger(__name__)

# How long `close` waits for the device to finish its copies.
_CLOSE_S = 10.0


class StagedTransport:
    """Carries device tensors through host memory, and host tensors unchanged.

    Credits and decisions arrive in host memory; all other messages arrive on the device.

    Args:
        host: Carries the copies. The constructor pins its message memory.
        copies: The copier between host and device.
        timeout_s: How long `begin` waits for the previous step's sends.
    """

    def __init__(
        self, host: NativeTransport, copies: Copies, *, timeout_s: float
    ) -> None:
        self._host = host
        self._copies = copies
        self._timeout_s = timeout_s
        self._drained_s = 0.0
        # Use two threads, because a send may wait for a long computation, which must not delay
        # releases: releases free the peers' slots.
        self._sends = Afterwards("sends", self.abort)
        self._releases = Afterwards("releases", self.abort)
        self._pinned: list[int] = []
        memory = host.fixed_memory()
        for address, num_bytes in memory:
            if not copies.pin(address, num_bytes):
                break  # pin() logs the reason, and the remaining blocks would fail too
            self._pinned.append(address)
        is_all_pinned = len(self._pinned) == len(memory)
        self._writes_slots = bool(memory) and is_all_pinned
        if self._writes_slots:
            total = sum(num_bytes for _, num_bytes in memory)
            _log.info("pinned %d MiB of memory for messages", total >> 20)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Wait for the previous step's sends, then start a step."""
        # These messages' tags contain the previous step's number.
        self._drain(self._timeout_s)
        self._host.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a host tensor immediately, or a device tensor once its copy is complete."""
        self._check()
        if tensor.is_cpu:
            self._host.isend(tensor, target, message)
            return
        # Keep an alias of the storage: the caller may replace its tensor's `data`.
        source = plain(tensor.detach())
        # Over shared memory and RDMA, the device copies into a slot, so that the host does not copy
        # the bytes again.
        slot = None
        if self._writes_slots:
            try:
                slot = self._host.reserve(target, message, source.shape, source.dtype)
            except TransportError as error:
                self._raise(error)
        if slot is None:
            copy, copied = self._copies.to_host(source)
            send = partial(self._host.isend, copy, target, message)
        else:
            copy, copied = self._copies.to_host(source, tensor_on(slot))
            send = partial(self._host.publish, target, message, slot)
        self._sends.after(copied, send, (source, copy))

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a message's tensor on the device; later work on the device waits for the copy."""
        self._check()
        try:
            tensor = self._host.recv(source, message, timeout_s)
        except TransportError as error:
            self._raise(error)
        if message.for_host:
            return tensor
        # The copy reads from a slot or a registered buffer, and the device's stream waits for the
        # copy.
        copy, copied = self._copies.to_device(tensor)
        # Keep the tensor until the copy is complete. Dropping the reference then frees its slot.
        self._releases.after(copied, lambda: None, tensor)
        return copy

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that arrived in host memory."""
        self._check()
        try:
            return self._host.poll(timeout_s)
        except TransportError as error:
            self._raise(error)

    def wake(self) -> None:
        """Make the current or next `poll` return early."""
        self._host.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all sends are copied to the host and the receivers can take them."""
        deadline_s = time.perf_counter() + timeout_s
        self._drain(timeout_s)
        remaining_s = max(0.0, deadline_s - time.perf_counter())
        try:
            self._host.flush(remaining_s)
        except TransportError as error:
            self._raise(error)

    def abort(self, reason: str) -> None:
        """Abort. Copies that have not been sent are dropped once the device has finished them."""
        self._host.abort(reason)

    def close(self) -> None:
        """Wait for the running copies and release all resources."""
        atexit.unregister(self.close)  # atexit would keep the transport alive
        # A device copy cannot be cancelled, so memory that it may still use stays
        # registered until the process exits, and no slot is reused before its copy is
        # complete.
        have_ended = [thread.stop(_CLOSE_S) for thread in (self._sends, self._releases)]
        if all(have_ended):
            for address in self._pinned:
                self._copies.unpin(address)
        else:
            _log.warning("the device did not finish its copies within %g s", _CLOSE_S)
        self._pinned.clear()
        self._host.close()

    def stats(self) -> Stats:
        """Return the host transport's totals, including the waits for copies."""
        stats = self._host.stats()
        waited_s = stats.waited_s + self._drained_s
        return replace(stats, waited_s=waited_s)

    def _drain(self, timeout_s: float) -> None:
        begin_s = time.perf_counter()
        try:
            self._sends.finish(timeout_s)
        finally:
            self._drained_s += time.perf_counter() - begin_s
        self._check()

    def _check(self) -> None:
        self._sends.check()
        self._releases.check()

    def _raise(self, error: TransportError) -> NoReturn:
        """Raise the copy thread's error if there is one, otherwise `error`."""
        self._check()
        raise error
