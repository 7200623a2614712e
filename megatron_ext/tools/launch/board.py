"""Connects the keepers of a multi-host job through a store on the first host.

A keeper sees only the ranks on its own host, so it reports lost ranks to the keeper on the first
host. That keeper counts the losses and decides whether to stop the job. It exits last, because the
ranks rendezvous through its stores.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_ext.tools.launch.losses import CleanExit, Loss, Losses, Restarts

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_ext.tools.launch.runs import Json

SILENCE_S = 20.0
"""A host counts as lost if its keeper has not sent a heartbeat for this long."""
_BEAT_S = 0.5
# A keeper may wait this long for the first host's store (`keeper._STORE_TIMEOUT_S`).
_START_S = 300.0
"""Time limit for a keeper's first heartbeat."""
# With torch's default of 300 s, the loss of the first host would go unnoticed for that long.
_STORE_TIMEOUT_S = 20.0
_KEYS = "megatron_ext keepers: "
"""Prefix of the keys, needed because the ranks use the same store."""
# No process saw how the ranks on a lost host ended, so record SIGKILL.
_KILLED = -9


class FirstHostLost(Exception):
    """The keeper on the first host no longer answers."""


class Board:
    """The keepers' notes, in the order they were written, and the keepers' heartbeats."""

    def __init__(self, store: Any) -> None:
        from torch._C._distributed_c10d import PrefixStore

        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        # torch's type hints lack `append`.
        self._store: Any = PrefixStore(_KEYS, store)
        self._num_read = 0

    def write(self, note: Json) -> None:
        """Add a note."""
        # `append` is atomic: a keeper that is killed leaves either a whole note or
        # none, and all keepers read the notes in the same order.
        line = json.dumps(note) + "\n"
        self._store.append("notes", line)

    def unread(self) -> list[Json]:
        """Return the notes that this keeper has not read yet."""
        # `get` would block until the first note is written.
        if not self._store.check(["notes"]):
            return []
        text = self._store.get("notes").decode()
        lines = text.splitlines()
        new_lines = lines[self._num_read :]
        notes = [json.loads(line) for line in new_lines]
        self._num_read = len(lines)
        return notes

    def beat(self, host: int) -> None:
        """Send a heartbeat for a host."""
        self._store.add(f"beats of {host}", 1)

    def num_beats(self, host: int) -> int:
        """Return the number of heartbeats from a host so far."""
        # Unlike `get`, `add` does not wait for a host that has not sent a heartbeat yet.
        return int(self._store.add(f"beats of {host}", 0))


class _Host:
    """Another host, as seen by the keeper on the first host."""

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks
        self.has_ended = False
        self._num_beats = 0
        self._silent_from_s = time.monotonic()

    def note_beats(self, num_beats: int) -> None:
        """Record the number of heartbeats that the host has sent."""
        # Measure the silence with this host's clock, because the hosts' clocks differ.
        if num_beats != self._num_beats:
            self._num_beats = num_beats
            self._silent_from_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether too much time has passed since the host's last heartbeat."""
        limit_s = SILENCE_S if self._num_beats else _START_S
        return time.monotonic() - self._silent_from_s > limit_s


class FirstBoard:
    """The board on the first host, which collects the losses from all hosts."""

    def __init__(
        self,
        board: Board,
        losses: Losses,
        counts: Sequence[int],
        ranks_met: Path,
    ) -> None:
        self._board = board
        self._losses = losses
        self._ranks_met = ranks_met
        self._restarts = Restarts()
        self._hosts: dict[int, _Host] = {}
        # The threads that read the ranks' output must not wait for the store, so they append notes
        # here for `take_turn` to write.
        self._notes: deque[Json] = deque()
        self._looks_at_s = 0.0
        self.is_end_reported = False
        """Whether the lost rank's host has reported the fatal loss to the launcher."""
        for host in range(1, len(counts)):
            first_rank = sum(counts[:host])
            end_rank = first_rank + counts[host]
            self._hosts[host] = _Host(range(first_rank, end_rank))

    @property
    def is_needed(self) -> bool:
        """Whether another host is still running ranks."""
        return not all(host.has_ended for host in self._hosts.values())

    @property
    def fatal(self) -> Loss | None:
        """The loss that stops the job, or None if the job continues."""
        return self._losses.fatal

    @property
    def survived(self) -> list[int]:
        """The lost ranks without which the others could continue."""
        return self._losses.survived

    @property
    def early_exits(self) -> list[int]:
        """The ranks that exited with code 0 since the last restart."""
        return self._losses.early_exits

    def add(self, loss: Loss) -> None:
        """Record a loss on this host."""
        self._losses.add(loss)

    def note_exit(self, rank: int, at: float) -> None:
        """Record that a rank on this host exited with code 0."""
        num_restarts = self._restarts.number_before(at)
        self._losses.note_exit(CleanExit(rank, at, num_restarts))

    def note_restart(self, number: int, num_lost: int) -> None:
        """Record that the ranks restart without the first `num_lost` lost ranks."""
        self._restarts.note(number)
        self._losses.note_restart(number, num_lost)
        self._notes.append({"kind": "restart", "number": number, "num_lost": num_lost})

    def note_step(self) -> None:
        """Record a step on one of this host's ranks."""
        self._losses.note_step()

    def take_turn(self) -> None:
        """Read the notes from other hosts and record the loss of hosts that have died."""
        # On a single host, nobody would read the notes.
        while self._hosts and self._notes:
            self._board.write(self._notes.popleft())
        # These include this host's own notes of restarts, which `Losses` knows already.
        for note in self._board.unread():
            kind = note.pop("kind")
            if kind == "loss":
                self._losses.add(Loss(**note))
            elif kind == "exit":
                self._losses.note_exit(CleanExit(**note))
            elif kind == "restart":
                self._restarts.note(note["number"])
                self._losses.note_restart(**note)
            elif kind == "step":
                self._losses.note_step()
            elif kind == "ended":
                self._hosts[note["host"]].has_ended = True
                self.is_end_reported |= note["is_reported"]
        now = time.monotonic()
        # Reading a host's heartbeats requires a call to the store, and every rank that
        # exits triggers a turn, so do not read them every turn.
        if now < self._looks_at_s:
            return
        self._looks_at_s = now + _BEAT_S
        for number, host in self._hosts.items():
            host.note_beats(self._board.num_beats(number))
            if host.is_silent and not host.has_ended:
                host.has_ended = True
                self._add_losses_of(host)

    def _add_losses_of(self, host: _Host) -> None:
        exited = {loss.rank for loss in self._losses.items}
        exited.update(self.early_exits)
        is_early = not self._ranks_met.exists()
        for rank in host.ranks:
            if rank not in exited:
                loss = Loss(
                    rank,
                    exit_code=_KILLED,
                    at=time.time(),
                    is_early=is_early,
                )
                self._losses.add(loss)

    def announce_end(self) -> None:
        """Tell the other hosts to stop their ranks because of the fatal loss."""
        assert self.fatal is not None
        note = {
            "kind": "end",
            "loss": asdict(self.fatal),
            "survived": self.survived,
            "early_exits": self.early_exits,
        }
        self._board.write(note)


class OtherBoard:
    """The board on every other host, which reports that host's losses to the first host.

    The class has the methods of `Losses` that a keeper uses.
    """

    def __init__(self, board: Board, host: int) -> None:
        self._board = board
        self._host = host
        self._restarts = Restarts()
        # The threads that read the ranks' output must not wait for the store, so they append notes
        # here for `take_turn` to write.
        self._notes: deque[Json] = deque()
        self._beats_at_s = 0.0
        self._awaits_step = False
        """Whether ranks have restarted, here or elsewhere, but no step has been reported since."""
        self.fatal: Loss | None = None
        """The loss that stops the job, or None if the job continues."""
        self.survived: list[int] = []
        """The lost ranks without which the others could continue; known when the job stops."""
        self.early_exits: list[int] = []
        """The ranks that exited with code 0 since the last restart; known when the job stops."""
        self.is_needed = False
        """Whether other hosts need this keeper after its ranks have exited."""

    def add(self, loss: Loss) -> None:
        """Report a loss."""
        self._notes.append({"kind": "loss", **asdict(loss)})

    def note_exit(self, rank: int, at: float) -> None:
        """Report that a rank on this host exited with code 0."""
        num_restarts = self._restarts.number_before(at)
        clean_exit = CleanExit(rank, at, num_restarts)
        self._notes.append({"kind": "exit", **asdict(clean_exit)})

    def note_restart(self, number: int, num_lost: int) -> None:
        """Report that the ranks restart without the first `num_lost` lost ranks."""
        self._restarts.note(number)
        self._notes.append({"kind": "restart", "number": number, "num_lost": num_lost})
        self._awaits_step = True

    def note_step(self) -> None:
        """Report a step if it is the first one after a restart."""
        if self._awaits_step:
            self._awaits_step = False
            self._notes.append({"kind": "step"})

    def take_turn(self) -> None:
        """Exchange notes with the first host.

        Raises:
            FirstHostLost: The first host does not answer.
        """
        now = time.monotonic()
        is_time = now >= self._beats_at_s
        try:
            # Remove each note only after writing it, so that an error does not lose it.
            while self._notes:
                self._board.write(self._notes[0])
                self._notes.popleft()
            # Losses are written immediately, but reading requires a call to the first
            # host, so read only twice per second.
            if not is_time:
                return
            self._beats_at_s = now + _BEAT_S
            self._board.beat(self._host)
            for note in self._board.unread():
                kind = note.pop("kind")
                if kind == "end":
                    self.fatal = Loss(**note["loss"])
                    self.survived = note["survived"]
                    self.early_exits = note["early_exits"]
                elif kind == "restart":
                    self._restarts.note(note["number"])
                    self._awaits_step = True
        except RuntimeError as error:  # how torch reports store errors
            raise FirstHostLost(str(error)) from error

    def announce_end(self) -> None:
        """Do nothing, because the first host decides and announces when to stop."""

    def write_end_of_host(self, *, is_reported: bool) -> None:
        """Report to the first host that no more ranks are running on this host."""
        note = {
            "kind": "ended",
            "host": self._host,
            "is_reported": is_reported,
        }
        self._notes.append(note)
        self.take_turn()
