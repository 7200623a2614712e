"""How the parts of a job failed, and which failure explains the others."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_ext.upstream.cause import KINDS, Cause

CONNECTION_FAILED = 255
"""Exit code of ssh if it fails itself, or if a signal ended the remote command."""


@dataclass(frozen=True)
class Failure:
    """The failure of a job on one host."""

    host: str
    what: str
    """The failed part: `rank 3`, `torchrun`, `the command`, `the connection to the agent`."""
    code: int
    """Exit code, negative for a signal, as in Python."""
    at: float
    """Time of the failure, by the launcher's clock."""
    tail: Sequence[str] = ()
    note: str = ""
    cause: Cause | None = None
    """The reason that the rank has written down, or that its agent has observed."""
    log: str | None = None
    """The folder with the rank's output on its host."""

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code < 0:
            how = f"was ended by {_signal_name(-self.code)}"
        if self.cause is None:
            return f"{self.host}: {self.what} {how}{self.note}"
        reason = self.cause.reason
        # The reason of the watchdog starts with these words (`tracing/hang.py`).
        blamed = f"{self.what} holds the job up: "
        if self.cause.kind == "stopped":
            how = "stands still"
        elif self.cause.kind == "left":
            how = "left with exit code 0"
        elif reason.startswith(blamed):
            how, reason = "holds the job up", reason.removeprefix(blamed)
        when = ""
        if self.cause.iteration is not None:
            when = f" in iteration {self.cause.iteration}"
        because = f": {reason}" if reason else ""
        return f"{self.host}: {self.what} {how}{when}{self.note}{because}"

    @property
    def rank(self) -> int | None:
        """The global rank that failed; None if another part did."""
        return None if self.cause is None else self.cause.rank

    @property
    def precedence(self) -> tuple[int, int, float]:
        """The sort key: the failure that explains the others has the smallest."""
        if self.cause is not None:
            return (*self.cause.precedence[:2], self.at)
        # The death of an agent or of torchrun is not the effect of another host's failure.
        has_died = self.code < 0 or self.code == CONNECTION_FAILED
        return KINDS.index("killed" if has_died else "unknown"), 0, self.at


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    code: int = 0
    """Exit code of the command: the code of the first failure, 128 + n after signal n, 255 for a
    lost host."""
    failure: Failure | None = None
    stopped_by: str | None = None
    """The signal with which the user ended the job, possibly after the failure."""

    @property
    def failed_rank(self) -> int | None:
        """The global rank that failed first, if the failed part is a rank."""
        return None if self.failure is None else self.failure.rank


def first_failure(failures: Sequence[Failure], last_iteration: int = 0) -> Failure:
    """Return the failure that explains the others, with the last iteration that any host reports.

    Time alone does not show it: other ranks fail within milliseconds after the loss of a rank, and
    the clocks of hosts differ. The kind of failure comes first: a process that a signal ended, or
    an agent that died, did not fail because another rank was lost.
    """
    first = min(failures, key=lambda failure: failure.precedence)
    iterations = []
    for failure in failures:
        if failure.cause is not None and failure.cause.iteration is not None:
            iterations.append(failure.cause.iteration)
    if first.cause is None or first.cause.iteration is not None:
        return first
    if iterations:
        return replace(first, cause=replace(first.cause, iteration=max(iterations)))
    if last_iteration:
        return replace(first, note=f" after iteration {last_iteration}{first.note}")
    return first


def _signal_name(number: int) -> str:
    # Most real-time signals have no name.
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
