"""Starts one run of a comparison through `launch`, in a separate process, and waits for it."""

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
from megatron_ext.tracing.digest_files import OPERATORS, ROUNDING
from megatron_ext.tracing.digest_files import VARIABLE as DIGESTS

_RECORDING = (DIGESTS, ROUNDING, OPERATORS)
_POLL_S = 0.5
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Ended:
    """How a run finished."""

    code: int
    """Exit code of `launch`: 0 after success, 2 if the flags were rejected, otherwise the code of
    the first failure."""
    reason: str
    """The log line that gives the reason, or empty after success."""


class Stop:
    """The signal that stops the comparison; also forwarded to the current run."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal received, or None if there has been none yet."""
        self.process: subprocess.Popen[bytes] | None = None
        """The current run."""

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number
        if self.process is not None:
            # The launcher then stops its ranks on all hosts, and kills
            # them on a second signal.
            self.process.send_signal(number)

    @contextmanager
    def installed(self) -> Iterator[Stop]:
        """While this context is active, handle the signals that stop a command."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Under nohup, SIGHUP is ignored to keep the command
        # running, so do not handle it.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        handlers = {}
        for number in numbers:
            handlers[number] = signal.signal(number, self._take)
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def flags_cleared() -> Iterator[None]:
    """Ignore the flags in the environment, as every run does: the recipe already includes them."""
    flags = os.environ.pop(FLAGS, None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ[FLAGS] = flags


def launch(
    words: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    stop: Stop,
    progress: Callable[[], None],
) -> Ended:
    """Run `megatron-ext launch` with these words and return how the run finished.

    Args:
        words: Options for `launch`, `--`, and the command.
        log_path: File that receives all output.
        environment: Environment variables for the launcher and its ranks, on top of this process's
            own.
        stop: Forwards signals to the run.
        progress: Called twice a second.
    """
    # The words already include the flags from the environment, so clear them
    # in the run's environment.
    variables = {**os.environ, **environment, FLAGS: ""}
    for name in _RECORDING:
        # Two runs must not record into the same folder, and only the calibration run
        # may round differently, so ignore the user's own settings.
        if name not in environment:
            variables.pop(name, None)
    command = [sys.executable, "-m", "megatron_ext", "launch", *words]
    with log_path.open("wb") as log:
        # A new session ensures that the run receives Ctrl-C only once, through `stop`.
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
            # The signal may have arrived while the process was starting.
            if stop.number is not None:
                process.send_signal(stop.number)
            while process.poll() is None:
                progress()
                time.sleep(_POLL_S)
        finally:
            stop.process = None
            if process.poll() is None:
                # After an error here, let `launch` stop its ranks before it exits.
                process.terminate()
                process.wait()
    reason = ""
    if process.returncode:
        reason = _reason(log_path)
    return Ended(process.returncode, reason)


def _reason(log_path: Path) -> str:
    """Return the log line with the reason why `launch` failed."""
    with log_path.open("rb") as log:
        num_bytes = log_path.stat().st_size
        log.seek(max(0, num_bytes - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    lines = text.splitlines()
    # `launch` prints the first of these if a job failed, and the
    # second if no job started.
    for mark in ("megatron-ext: failed first: ", "megatron-ext: error: "):
        for line in reversed(lines):
            if line.startswith(mark):
                return line.removeprefix(mark)
    spoken = [line for line in lines if line.strip()]
    return spoken[-1] if spoken else "it printed nothing"
