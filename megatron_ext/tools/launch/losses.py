"""Records and reports the ranks that a job loses while it keeps running."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.tools.launch.run_folder import RunFolder

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Json

_USER_ERROR = 2  # a rank's exit code if its flags or files are wrong

LOSSES = "losses.json"
"""File in a run's folder on a host, with the lost ranks and the cost of each loss."""


@dataclass
class Loss:
    """A rank that exited while the other ranks continued."""

    rank: int
    exit_code: int
    """The rank's exit code, which is negative if a signal killed the rank."""
    at: float
    """Time of the loss, in seconds since the epoch."""
    back_after_s: float | None = None
    """Time from the loss to the first step after a restart, or None if there has been no such step
    yet."""
    is_early: bool = False
    """Whether the rank was lost before all ranks had met, in which case no rank can replace it."""
    was_in_reserve: bool = False
    """Whether the rank was in reserve, so that no other rank was waiting for it."""


@dataclass(frozen=True)
class CleanExit:
    """A rank that exited with code 0."""

    rank: int
    at: float
    """Time of the exit, in seconds since the epoch."""
    num_restarts: int
    """Number of restarts before the exit, as far as the rank's host knew them."""


class Restarts:
    """The restarts that a host knows of. Its own clock orders them and its ranks' exits."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the last restart."""
        self._noted_at = -math.inf

    def note(self, number: int) -> None:
        """Record a restart. Several ranks may report the same one."""
        if number > self.number:
            self.number = number
            self._noted_at = time.time()

    def number_before(self, at: float) -> int:
        """Return the number of restarts before a time."""
        # A rank may exit seconds after it called `sys.exit`, and the others may have
        # restarted in the meantime.
        return self.number - 1 if at < self._noted_at else self.number


def loss_in_words(loss: Json) -> str:
    """Return a description of when and how a rank was lost and how much time the loss cost."""
    clock = time.strftime("%H:%M:%S", time.localtime(loss["at"]))
    cost = "no step since"
    if loss["back_after_s"] is not None:
        cost = f"the next step came after {loss['back_after_s']:.1f} s"
    return f"rank {loss['rank']} lost at {clock} ({_ending(loss['exit_code'])}; {cost})"


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-exit_code}"


@dataclass
class Losses:
    """A job's losses, recorded in a folder."""

    folder: Path
    reserve: int
    """Number of ranks in reserve when the job started."""
    say: Callable[[int, str], None]
    """Prints a line as part of a rank's output."""
    items: list[Loss] = field(default_factory=list)
    _num_replaced: int = 0
    """Number of lost ranks that the last restart excluded. These ranks come first in `items`."""
    _exits: list[CleanExit] = field(default_factory=list)
    """Ranks that exited with code 0, so they have finished unless the others restart."""
    _num_restarts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def fatal(self) -> Loss | None:
        """The loss that stops the job, or None if the job continues."""
        # After such a loss, a replacement would fail in the same way or find no other
        # ranks to meet.
        for loss in self.items:
            if loss.exit_code == _USER_ERROR or loss.is_early:
                return loss
        if len(self.items) <= self.reserve:
            return None
        for index, loss in enumerate(self.items):
            if not self._is_outlived(index, loss):
                return loss
        # The job could have continued after every loss, so the reserve ran out with the
        # last one.
        return self.items[-1]

    def _is_outlived(self, index: int, loss: Loss) -> bool:
        """Return whether the other ranks could continue after the loss with this index."""
        # A restart that excludes the lost rank had enough ranks left. An exit with code 0
        # counts as a loss only after such a restart.
        is_replaced = index < self._num_replaced or loss.exit_code == 0
        return is_replaced or loss.was_in_reserve

    @property
    def survived(self) -> list[int]:
        """The lost ranks without which the others could continue."""
        fatal = self.fatal
        ranks = []
        for index, loss in enumerate(self.items):
            if self._is_outlived(index, loss) and loss is not fatal:
                ranks.append(loss.rank)
        return ranks

    @property
    def early_exits(self) -> list[int]:
        """The ranks that exited with code 0 since the last restart, which may stop the job."""
        return [clean_exit.rank for clean_exit in self._exits]

    def add(self, loss: Loss) -> None:
        """Record a loss and report it."""
        with self._lock:
            self.items.append(loss)
            self._write()
        ending = _ending(loss.exit_code)
        outlook = self._outlook(loss)
        self.say(
            loss.rank, f"megatron_ext: rank {loss.rank} was lost ({ending}): {outlook}"
        )

    def _outlook(self, loss: Loss) -> str:
        if loss.exit_code == _USER_ERROR:
            return "its replacement would fail too, so the job stops"
        if loss.is_early:
            return "no rank can replace it before all ranks have met, so the job stops"
        num_left = self.reserve - len(self.items)
        if num_left < 0:
            return f"only {self.reserve} ranks were in reserve, so the job stops"
        return f"{num_left} of {self.reserve} ranks remain in reserve"

    def note_exit(self, clean_exit: CleanExit) -> None:
        """Record that a rank exited with code 0; it is lost if the others restart after that."""
        with self._lock:
            is_lost = clean_exit.num_restarts < self._num_restarts
            if not is_lost:
                self._exits.append(clean_exit)
        if is_lost:
            self._add_exit(clean_exit)

    def note_restart(self, number: int, num_lost: int) -> None:
        """Record that the ranks restart without the first `num_lost` lost ranks.

        Several hosts may report the same restart, which counts once.
        """
        with self._lock:
            if number <= self._num_restarts:
                return
            self._num_restarts = number
            self._num_replaced = num_lost
            early_exits = self._exits
            self._exits = []
        for clean_exit in early_exits:
            self._add_exit(clean_exit)

    def _add_exit(self, clean_exit: CleanExit) -> None:
        """Record the loss of a rank that exited with code 0 while the others restarted."""
        # Its host may have been lost too.
        if clean_exit.rank not in [loss.rank for loss in self.items]:
            self.add(Loss(clean_exit.rank, exit_code=0, at=clean_exit.at))

    def note_step(self) -> None:
        """Record a step. The first step after a restart ends the recovery from its losses."""
        # Count only losses of ranks that a restart has excluded. A step right after a
        # loss does not mean that the job has recovered: the ranks may be completing a
        # step already in progress, and losing a reserve rank does not interrupt any
        # step. Nor does the order of loss and restart: if a rank fails, the other ranks
        # may restart before its process exits.
        now = time.time()
        with self._lock:
            replaced = self.items[: self._num_replaced]
            unrecovered = [loss for loss in replaced if loss.back_after_s is None]
            if not unrecovered:
                return
            for loss in unrecovered:
                loss.back_after_s = round(now - loss.at, 2)
            self._write()

    def _write(self) -> None:
        # If the disk is full, the record is lost, but the job must continue.
        with suppress(OSError), RunFolder.open(self.folder) as folder:
            folder.write_json(LOSSES, [asdict(loss) for loss in self.items])
