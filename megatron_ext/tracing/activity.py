"""The present activity of a rank, for the diagnosis of hangs.

One object for each process; the training thread writes it and the watchdog reads it. A write is a
few atomic assignments; a reader that sees a partial change reads again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.message import Message

__all__ = ["OUTSIDE", "Activity", "made_by"]

OUTSIDE = "is between training steps"


@dataclass
class Activity:
    """Of this process."""

    count: int = 0
    """Incremented with every change; a constant value means no progress."""
    what: str = OUTSIDE
    """After `rank 3 `: `runs 5F3`, `waits`, `is in the optimizer step`."""
    waits_for: tuple[tuple[int, str], ...] = ()
    """(global rank, event) pairs, any of which would end the wait."""
    collective: str = ""
    """The collective that the rank is in, if it is in one."""
    since_s: float = field(default_factory=time.monotonic)

    def now(
        self, what: str, waits_for: Sequence[tuple[int, str]] = (), collective: str = ""
    ) -> None:
        """Set the rank's activity."""
        self.what, self.waits_for, self.collective = what, tuple(waits_for), collective
        self.since_s = time.monotonic()
        self.count += 1

    @property
    def is_watched(self) -> bool:
        """Whether the rank is inside a step."""
        return self.what != OUTSIDE


def made_by(message: Message) -> str:
    """Return the action that produces a message, for example `5B3`, or the message's name."""
    kind, stage, microbatch = message[:3]
    if kind in ("F", "B"):
        return f"{stage + (1 if kind == 'B' else -1)}{kind}{microbatch}"
    return str(message)
