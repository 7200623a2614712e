"""Runs callbacks after device copies in a thread, so that callers do not wait for the copies."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ext.errors import TransportError, TransportTimeout

if TYPE_CHECKING:
    from megatron_ext.devices.copies import Copied

    # The copy, what runs after it, and what stays alive until then.
    _Job = tuple[Copied, Callable[[], None], object]


class Afterwards:
    """A thread that runs callbacks in order, each after its copy, until the first error.

    After an error, the thread calls the transport's `abort`, which unblocks this rank and its
    peers.
    """

    def __init__(self, name: str, abort: Callable[[str], None]) -> None:
        self.error: BaseException | None = None
        self._abort = abort
        # None ends the thread.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_left = 0
        self._changed = threading.Condition()
        # Use a daemon thread: the interpreter joins all other threads before it runs the exit hook
        # that closes the transport.
        self._thread = threading.Thread(
            target=self._run,
            name=f"megatron-ext {name}",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error from an earlier job, if any.

        Raises:
            TransportError: A copy or its callback failed. The exception has the same class as the
                original error.
        """
        if isinstance(self.error, TransportError):
            error_class = type(self.error)
            raise error_class(str(self.error)) from self.error
        if self.error is not None:
            raise TransportError(
                f"a tensor could not be copied between device and host: {self.error}"
            ) from self.error

    def after(self, copied: Copied, then: Callable[[], None], storage: object) -> None:
        """Run `then` once a copy is complete; keep a reference to `storage` until then."""
        with self._changed:
            self._num_left += 1
        self._jobs.put((copied, then, storage))

    def finish(self, timeout_s: float) -> None:
        """Wait until all jobs are done.

        Raises:
            TransportError: A job failed, or the jobs took too long.
        """
        begin_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_left == 0 or self.error is not None, timeout_s
            )
            num_left = self._num_left
        self.check()
        if num_left:
            waited_s = time.perf_counter() - begin_s
            raise TransportTimeout(
                f"the device did not copy {num_left} tensors to be sent: waited {waited_s:.1f} s "
                f"of {timeout_s:g} s; their kernels may be waiting for another rank"
            )

    # This may run at exit, when a hanging device must not keep the process alive.
    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after its last job; return False if the time-out expires first."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copied, then, storage = job
            del job
            try:
                # Wait after an error too: the device continues its copies, so `storage` must keep
                # their memory alive.
                copied.wait()
                if self.error is None:
                    then()
            except BaseException as error:  # noqa: BLE001 - the next call raises the error
                if self.error is None:
                    self.error = error
                    self._abort(f"a tensor could not be copied or sent: {error}")
            # Free the memory before `finish` returns.
            del copied, then, storage
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
