"""What a rank is doing at the moment, for whoever wants to know why nothing goes on.

One object for each process, written by the thread that trains and read by the watchdog. Writing is
a few assignments; each is atomic, and a reader that sees half of a change looks again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.messages import Message

__all__ = ["OUTSIDE", "Activity", "made_by"]

OUTSIDE = "is between training steps"


@dataclass
class Activity:
    """Of this process."""

    count: int = 0
    """Raised with every change: no change is no progress."""
    what: str = OUTSIDE
    """After `rank 3 `: `runs 5F3`, `waits`, `is in the optimizer step`."""
    waits_for: tuple[tuple[int, str], ...] = ()
    """(global rank, what of it) that would end the wait, any of them."""
    collective: str = ""
    """The collective that the rank is in, if it is in one."""
    since_s: float = field(default_factory=time.monotonic)

    def now(
        self, what: str, waits_for: Sequence[tuple[int, str]] = (), collective: str = ""
    ) -> None:
        """Note what the rank does from now on."""
        self.what, self.waits_for, self.collective = what, tuple(waits_for), collective
        self.since_s = time.monotonic()
        self.count += 1

    @property
    def is_watched(self) -> bool:
        """Whether the rank is inside of a step."""
        return self.what != OUTSIDE


def made_by(message: Message) -> str:
    """Return the action that makes a message, for example `5B3`, or what else it is."""
    kind, stage, microbatch, _ = message
    if kind in ("F", "B"):
        return f"{stage + (1 if kind == 'B' else -1)}{kind}{microbatch}"
    return str(message)
