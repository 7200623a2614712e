"""Calls a function in forked processes, each with its own caches.

The caller chooses the process for every call, which the standard library's pools do not support.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

from megatron_ext.errors import MegatronExtError
from megatron_ext.upstream import parent


class Caller:
    """Calls a function in this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def begin(self, *args: Any) -> None:
        """Start the call. The function may still be running until `result` returns."""
        self._returned = self._function(*args)

    def result(self) -> Any:
        """Return the function's result, or raise its error."""
        return self._returned


class _ForkedCaller(Caller):
    """Calls a function in a forked process."""

    def __init__(self, function: Callable[..., Any], pipes: list[Any]) -> None:
        # Fork, because a newly spawned interpreter would start with empty caches.
        fork = multiprocessing.get_context("fork")
        self.pipe, child_end = fork.Pipe()
        pipes.append(self.pipe)
        self._process = fork.Process(
            target=_serve,
            args=(os.getpid(), function, child_end, pipes),
            daemon=True,
        )
        self._process.start()
        # If this end stayed open here, `recv` would block forever if the child dies.
        child_end.close()

    def begin(self, *args: Any) -> None:
        with self._explained():
            _send(self.pipe, args)

    def result(self) -> Any:
        with self._explained():
            returned, error = self.pipe.recv()
        if error is not None:
            raise error
        return returned

    def end(self) -> None:
        # Kill the process, because a call may take a long time and needs no clean-up.
        # The process may have inherited a SIGTERM handler.
        self._process.kill()
        self._process.join()
        self.pipe.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            # The pipe may break before the exit code is known.
            self._process.join()
            raise MegatronExtError(
                f"a search process died (exit code {self._process.exitcode}); if memory ran out, "
                "narrow the search, for example with --fix pp=8"
            ) from None


@contextmanager
def callers(function: Callable[..., Any], count: int) -> Iterator[list[Caller]]:
    """Yield callers of a function, each with a forked process unless there is only one caller."""
    pipes: list[Any] = []
    forked: list[_ForkedCaller] = []
    try:
        # A single caller needs no separate process.
        num_processes = count if count > 1 else 0
        for _ in range(num_processes):
            # Each child closes the parent's ends of earlier pipes.
            forked.append(_ForkedCaller(function, pipes))
        if forked:
            yield [*forked]
        else:
            yield [Caller(function)]
    finally:
        for caller in forked:
            caller.end()


def ended(busy: Collection[Caller]) -> list[Caller]:
    """Wait for the first result, then return all callers that have a result.

    There is no timeout, because calls may take arbitrarily long. Ctrl-C or the death of a process
    ends the wait.
    """
    forked: dict[Any, Caller] = {}
    for caller in busy:
        if isinstance(caller, _ForkedCaller):
            forked[caller.pipe] = caller
    if not forked:
        return [*busy]
    ready_pipes = connection.wait(forked)
    return [forked[pipe] for pipe in ready_pipes]


def _serve(
    caller_pid: int,
    function: Callable[..., Any],
    pipe: Any,
    inherited: list[Any],
) -> None:
    # Ctrl-C reaches all processes. Ignore it here, because the parent terminates this
    # process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        parent.die_with_caller(caller_pid)  # a call may take minutes
    # This process inherited the parent's ends of all pipes. If they stayed open, it
    # would wait forever if the parent is killed.
    for parent_end in inherited:
        parent_end.close()
    # Both errors mean that the parent has exited.
    with suppress(EOFError, OSError):
        while True:
            args = pipe.recv()
            returned = None
            failed = None
            try:
                returned = function(*args)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                failed = error
            _send(pipe, (returned, failed))


def _send(pipe: Any, message: object) -> None:
    # Do not use `pipe.send()`, which exports a BytesIO's buffer. If the other end is
    # gone, Python 3.12.1 crashes when it collects the traceback.
    pipe.send_bytes(pickle.dumps(message))
