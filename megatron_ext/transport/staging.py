"""Tensors of a device over a transport of host tensors, through pinned memory.

A send copies the tensor to pinned host memory, in a stream of its own and after what the device
computes of it; a thread sleeps until that is done and sends what it finds there. What arrives is
copied from where it lies, usually a slot of shared memory, to memory of the device; the computation
waits for that on the device, and a thread sleeps until the slot can be given back. So the caller
never waits for the device, and nobody reads memory that a copy has yet to write.

The two kinds of copies have a thread each: one that waits for a long computation before a send must
not keep the slots that peers are waiting for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from megatron_ext.errors import TransportError, TransportTimeout
from megatron_ext.transport.dtypes import plain

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.backend import Copied, Copies
    from megatron_ext.messages import Message
    from megatron_ext.transport.base import Expected, Stats, Transport
    from megatron_ext.transport.native_transport import NativeTransport

__all__ = ["StagedTransport", "staged"]

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""How long `close` lets the device finish copies that were begun."""


def staged(transport: NativeTransport, copies: Copies | None, *, timeout_s: float) -> Transport:
    """Return a transport for the tensors of a device.

    Args:
        transport: Carries host tensors; closed with what is returned.
        copies: Of the device; None: the device is the host, nothing is to be done.
        timeout_s: How long a step waits for sends of the step before.
    """
    if copies is None:
        return transport
    return StagedTransport(transport, copies, timeout_s=timeout_s)


class StagedTransport:
    """Carries tensors of a device, and of the host as they are.

    Credits and decisions arrive on the host, which acts on them; all else arrives on the device.

    Args:
        host: Carries the copies. Its shared memory is pinned here, which is logged.
        copies: Of the device.
        timeout_s: How long `begin` waits for sends of the step before.
    """

    def __init__(self, host: NativeTransport, copies: Copies, *, timeout_s: float) -> None:
        self._host = host
        self._copies = copies
        self._timeout_s = timeout_s
        self._drained_s = 0.0
        self._sends = _Afterwards("sends", self._give_up)
        self._releases = _Afterwards("releases", self._give_up)
        self._pinned: list[int] = []
        for address, num_bytes in host.arenas:
            if not copies.pin(address, num_bytes):
                break  # it was told why, and the others will not do better
            self._pinned.append(address)
        if self._pinned:
            total = sum(num_bytes for _, num_bytes in host.arenas)
            _log.info("%d MiB of shared memory are pinned", total >> 20)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step, when everything of the step before was sent: its name is the step's."""
        self._drain(self._timeout_s)
        self._host.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        """Send a tensor: a host tensor now, one of the device when it was copied."""
        self._check()
        if tensor.is_cpu:
            self._host.isend(tensor, target, message)
            return
        # Shares the storage, not the tensor: the caller may swap the `data` of that.
        source = plain(tensor.detach())
        copy, copied = self._copies.to_host(source)
        self._sends.after(copied, partial(self._host.isend, copy, target, message), source)

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        """Return a tensor on the device; what the device does with it waits for the copy."""
        self._check()
        try:
            tensor = self._host.recv(source, message, timeout_s)
        except TransportError as error:
            self._raise(error)
        if message.for_host:
            return tensor
        copy, copied = self._copies.to_device(tensor)
        self._releases.after(copied, _nothing, tensor)
        return copy

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Return what arrived on this host."""
        self._check()
        try:
            return self._host.poll(timeout_s)
        except TransportError as error:
            self._raise(error)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent was copied, and is where its receiver can take it."""
        begin_s = time.perf_counter()
        self._drain(timeout_s)
        try:
            self._host.flush(max(0.0, begin_s + timeout_s - time.perf_counter()))
        except TransportError as error:
            self._raise(error)

    def abort(self, reason: str) -> None:
        """Give up for good; copies that were not sent yet never are."""
        self._host.abort(reason)

    def close(self) -> None:
        """Let copies that were begun end, and give up all memory."""
        for thread in (self._sends, self._releases):
            if not thread.stop(_CLOSE_S):
                _log.warning("the device did not finish its copies within %g s", _CLOSE_S)
        for address in self._pinned:
            self._copies.unpin(address)
        self._pinned.clear()
        self._host.close()

    def stats(self) -> Stats:
        """Return what was done so far."""
        stats = self._host.stats()
        return replace(stats, waited_s=stats.waited_s + self._drained_s)

    def _drain(self, timeout_s: float) -> None:
        begin_s = time.perf_counter()
        left = self._sends.drain(timeout_s)
        waited_s = time.perf_counter() - begin_s
        self._drained_s += waited_s
        self._check()
        if left:
            raise TransportTimeout(
                f"{left} tensors to be sent were not copied from the device: waited {waited_s:.1f} "
                f"s of {timeout_s:g} s; what computes them may be waiting for another rank"
            )

    def _give_up(self, error: BaseException) -> None:
        """Tell the peers; their farewells end what this rank may be waiting for."""
        self._host.abort(f"a tensor could not be copied or sent: {error}")

    def _check(self) -> None:
        for thread in (self._sends, self._releases):
            if thread.error is not None:
                raise _described(thread.error) from thread.error

    def _raise(self, error: TransportError) -> NoReturn:
        """Raise an error, or what another thread failed of before."""
        self._check()
        raise error


class _Afterwards:
    """A thread that does things in order, each when a copy has ended.

    After an error it does nothing any more but let go.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self.error: BaseException | None = None
        self._failed = failed
        self._jobs: queue.SimpleQueue[tuple[Copied, Callable[[], None], object] | None] = (
            queue.SimpleQueue()
        )
        self._num_left = 0
        self._changed = threading.Condition()
        # A daemon: the interpreter would join others before it calls what closes the transport.
        self._thread = threading.Thread(target=self._run, name=f"megatron-ext {name}", daemon=True)
        self._thread.start()

    def after(self, copied: Copied, then: Callable[[], None], kept: object) -> None:
        """Do something when a copy has ended, and keep something until then."""
        with self._changed:
            self._num_left += 1
        self._jobs.put((copied, then, kept))

    def drain(self, timeout_s: float) -> int:
        """Wait until everything is done, or failed; return how much is left after the time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_left == 0 or self.error is not None, timeout_s)
            return self._num_left

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what it was given; False if that took too long."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copied, then, kept = job
            del job
            if self.error is None:
                self._do(copied, then)
            del copied, then, kept  # before anybody hears that it is done
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()

    def _do(self, copied: Copied, then: Callable[[], None]) -> None:
        try:
            copied.wait()
            then()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self.error = error
            self._failed(error)


def _described(error: BaseException) -> TransportError:
    """An error of a thread, as its caller gets it: of the same kind if it is one of ours."""
    if isinstance(error, TransportError):
        return type(error)(str(error))
    return TransportError(f"a tensor could not be copied between device and host: {error}")


def _nothing() -> None:
    """What is to be done when a slot is free: let go of it, which happens anyway."""
