"""Bounds how far the host runs ahead of the device."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import torch

from megatron_ext.errors import MegatronExtError, TransportTimeout
from megatron_ext.schedules.table.costs import AHEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.devices.backend import Device, TimingEvent

__all__ = ["AHEAD", "RunAhead", "device_of", "run_ahead_of"]


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Return the device of a rank's model; a layout may leave its chunks without parameters."""
    parameter = next(chain.from_iterable(chunk.parameters() for chunk in chunks), None)
    if parameter is not None:
        return parameter.device
    return torch.empty(0, device=torch.cuda.current_device()).device


# A host that launches a whole step at once holds the memory of every message of that step: a tensor
# that a copy stream uses becomes free only when the device has reached the copy. So each action
# ends with an event, and the host launches the next one only while few are unfinished.
class RunAhead:
    """Counts and times the actions that the device has finished. One thread makes all calls.

    Args:
        backend: Makes the events.
        device: This rank's device, with its index.
        timeout_s: How long a wait may take.
    """

    def __init__(self, backend: Device, device: torch.device, *, timeout_s: float) -> None:
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._unfinished: deque[object] = deque()
        """Names of the actions that have not ended, oldest first."""
        self._error: BaseException | None = None
        self._began: TimingEvent | None = None
        """Start of the action that is being launched."""
        self._wake: Callable[[], None] | None = None
        self._ended_s: list[float] = []
        """Seconds that the device spent on actions which ended, while somebody listens."""
        self._changed = threading.Condition()
        self._events: queue.SimpleQueue[tuple[TimingEvent | None, TimingEvent] | None] = (
            queue.SimpleQueue()
        )
        # It sleeps on the events, because a device's own waits have no time-out. A daemon: a device
        # that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._watch, name="megatron-ext ends", daemon=True)
        self._thread.start()

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Keep durations for `ended_s`, and call a function when there is one; None: no more.

        Args:
            wake: The second thread calls it after the end of each action, and once if the device
                has failed.
        """
        with self._changed:
            self._wake = wake
            self._ended_s.clear()

    def ended_s(self) -> list[float]:
        """Return the seconds of each action that ended since the last call, oldest first.

        Raises:
            MegatronExtError: The device failed.
        """
        with self._changed:
            self._check()
            found, self._ended_s = self._ended_s, []
        return found

    def begin(self) -> None:
        """Mark the start of an action."""
        # Behind the wait of the current stream for its inputs, which is no time of the action.
        self._began = self._event()
        self._began.record()

    def record(self, action: object) -> TimingEvent:
        """Mark the end of an action behind all work of the current stream; return the event."""
        event = self._event()
        event.record()
        with self._changed:
            self._unfinished.append(action)
        self._events.put((self._began, event))
        self._began = None
        return event

    def wait_until(self, unfinished: int) -> None:
        """Sleep until at most that many recorded actions are unfinished.

        Raises:
            TransportTimeout: An action did not end in time; the device may wait for a peer.
            MegatronExtError: The device failed.
        """
        # This cannot deadlock: it waits for the end of this rank's own earlier work, and all that
        # follows in the table runs later anyway (`schedules/search/queues.py` proves the order).
        begin_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._unfinished) <= unfinished or self._error is not None,
                self._timeout_s,
            )
            self._check()
            left = list(self._unfinished)
        if len(left) > unfinished:
            raise TransportTimeout(
                f"{left[0]} did not end on {self._device}: waited "
                f"{time.perf_counter() - begin_s:.1f} s of {self._timeout_s:g} s; it may wait for "
                f"a message of another rank"
            )

    def close(self) -> None:
        """Forget all actions and end the thread once the device has reached their events."""
        self._events.put(None)

    def _check(self) -> None:
        if self._error is not None:
            name = self._unfinished[0] if self._unfinished else "an action"
            raise MegatronExtError(
                f"{name} failed on {self._device}: {self._error}"
            ) from self._error

    def _event(self) -> TimingEvent:
        event = self._backend.timing_event()
        assert event is not None, "the device is the host"
        return event

    def _watch(self) -> None:
        try:
            self._backend.bind(self._device.index)  # a new thread is on the first device
            while (events := self._events.get()) is not None:
                self._ended(*events)
        except BaseException as error:  # noqa: BLE001 - the next call of the other thread raises it
            with self._changed:
                self._error, wake = error, self._wake
                self._changed.notify_all()
            with suppress(BaseException):  # the error to raise is the first one
                if wake is not None:
                    wake()

    def _ended(self, begin: TimingEvent | None, end: TimingEvent) -> None:
        end.synchronize()
        took_s = 0.0 if begin is None else 1e-3 * begin.elapsed_time(end)
        with self._changed:
            self._unfinished.popleft()
            wake = self._wake
            if wake is not None:
                self._ended_s.append(took_s)
            self._changed.notify_all()
        # Outside of the lock: it rings the transport, whose thread may be about to ask `ended_s`.
        if wake is not None:
            wake()


def run_ahead_of(backend: Device, device: torch.device, timeout_s: float) -> RunAhead | None:
    """Return the bound of a rank; None if the device is the host."""
    if backend.timing_event() is None:
        return None
    return RunAhead(backend, device, timeout_s=timeout_s)
