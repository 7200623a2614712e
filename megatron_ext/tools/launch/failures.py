"""How the parts of a job failed, and which failure explains the others."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_ext.upstream.cause import KINDS, Cause

CONNECTION_FAILED = 255
"""Exit code of ssh if ssh itself fails, or if a signal killed the remote command."""


@dataclass(frozen=True)
class Failure:
    """A job's failure on one host."""

    host: str
    part: str
    """The failed part: `rank 3`, `torchrun`, `the keeper of the ranks`, `the command`, or
    `the connection to the agent`."""
    code: int
    """Exit code, negative for a signal, as in Python."""
    at: float
    """Time of the failure, on the launcher's clock."""
    tail: Sequence[str] = ()
    note: str = ""
    cause: Cause | None = None
    """The cause as recorded by the rank or observed by its agent."""
    log: str | None = None
    """The folder with the rank's output on its host."""

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code < 0:
            how = f"was killed by {_signal_name(-self.code)}"
        if self.cause is None:
            return f"{self.host}: {self.part} {how}{self.note}"
        reason = self.cause.reason
        # The watchdog's reason starts with these words (`tracing/hang.py`).
        blamed = f"{self.part} holds the job up: "
        if self.cause.kind == "stopped":
            how = "makes no progress"
        elif self.cause.kind == "left":
            how = "exited early with exit code 0"
        elif reason.startswith(blamed):
            how = "holds the job up"
            reason = reason.removeprefix(blamed)
        when = ""
        if self.cause.iteration is not None:
            when = f" in iteration {self.cause.iteration}"
        because = f": {reason}" if reason else ""
        return f"{self.host}: {self.part} {how}{when}{self.note}{because}"

    @property
    def rank(self) -> int | None:
        """The global rank that failed; None if another part of the job failed."""
        return None if self.cause is None else self.cause.rank

    @property
    def precedence(self) -> tuple[int, int, float]:
        """The sort key; the failure that explains the others has the smallest key."""
        if self.cause is not None:
            # The cause's time is on the host's clock, so use the time on the launcher's clock.
            return (*self.cause.precedence[:2], self.at)
        # If an agent or torchrun dies, its death is not the effect of a failure on another host.
        has_died = self.code < 0 or self.code == CONNECTION_FAILED
        kind = "killed" if has_died else "unknown"
        return KINDS.index(kind), 0, self.at


@dataclass(frozen=True)
class Outcome:
    """A job's outcome."""

    code: int = 0
    """Exit code of the command: the code of the first failure, 128 + n after signal n, 255 for a
    lost host."""
    failure: Failure | None = None
    stopped_by: str | None = None
    """The signal with which the user stopped the job, possibly after the failure."""
    iteration: int = 0
    """The last iteration that a failed job is known to have reached; 0 if it is not known."""

    @property
    def failed_rank(self) -> int | None:
        """The global rank that failed first, if the failed part is a rank."""
        return None if self.failure is None else self.failure.rank


def first_failure(failures: Sequence[Failure], last_iteration: int = 0) -> Failure:
    """Return the failure that explains the others, with the last iteration reported by any host.

    Comparing times is not enough, because the loss of a rank makes others fail within milliseconds,
    and the hosts' clocks differ. The kind of failure therefore takes precedence: if a signal killed
    a process or an agent died, the loss of another rank cannot be the reason.
    """
    first = min(failures, key=lambda failure: failure.precedence)
    # A rank that was killed reports no iteration, but the other ranks were in the same step.
    iterations = []
    for failure in failures:
        if failure.cause is not None and failure.cause.iteration is not None:
            iterations.append(failure.cause.iteration)
    if first.cause is None or first.cause.iteration is not None:
        return first
    if iterations:
        cause = replace(first.cause, iteration=max(iterations))
        return replace(first, cause=cause)
    if last_iteration:
        note = f" after iteration {last_iteration}{first.note}"
        return replace(first, note=note)
    return first


def _signal_name(number: int) -> str:
    # Most real-time signals have no name.
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
