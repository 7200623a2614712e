"""Starts one run of a comparison as `launch` does, in a process of its own, and waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_ext.config.flags import FLAGS

_POLL_S = 0.5
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit code of `launch`: 0, 2 if it was refused, else that of the first failure."""
    reason: str
    """The line that says why; empty after a success."""


class Stop:
    """A signal that stops the comparison, which the run under way gets too."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal that came; None: none has."""
        self.process: subprocess.Popen[bytes] | None = None
        """The run under way."""

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number
        if self.process is not None:
            # The launcher ends its ranks, on all hosts; a second signal kills them.
            self.process.send_signal(number)

    @contextmanager
    def installed(self) -> Iterator[Stop]:
        """Take the signals that stop a command, until the block ends."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it goes on
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def launch(
    words: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    stop: Stop,
    progress: Callable[[], None],
) -> Ended:
    """Run `megatron-ext launch` with some words, and return how it ended.

    Args:
        words: Its options, `--`, and the command.
        log_path: Gets all that it prints.
        environment: Variables for it and its ranks, besides this process's own.
        stop: Passes signals on to it.
        progress: Called twice a second.
    """
    # The flags of the environment are among the words already.
    variables = {**os.environ, **environment, FLAGS: ""}
    command = [sys.executable, "-m", "megatron_ext", "launch", *words]
    with log_path.open("wb") as log:
        # In a session of its own, Ctrl-C reaches it once: through `stop`.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        stop.process = process
        try:
            if stop.number is not None:  # it came while the process was made
                process.send_signal(stop.number)
            while process.poll() is None:
                progress()
                time.sleep(_POLL_S)
        finally:
            stop.process = None
            if process.poll() is None:
                process.terminate()
                process.wait()
    reason = ""
    if process.returncode:
        reason = _reason(log_path)
    return Ended(process.returncode, reason)


def _reason(log_path: Path) -> str:
    """Return the line of a log in which `launch` says why it failed."""
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    for mark in ("megatron-ext: failed first: ", "megatron-ext: error: "):
        for line in reversed(lines):
            if line.startswith(mark):
                return line.removeprefix(mark)
    spoken = [line for line in lines if line.strip()]
    return spoken[-1] if spoken else "it printed nothing"
