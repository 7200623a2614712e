"""Checks whether a table ends with a limited number of receive slots.

Our transports give every edge the slots of `memory.slots_needed`, so no send waits. With fewer, a
send waits until the receiver has used an earlier message of the same edge and kind, and an acyclic
table can deadlock. This is the symbolic run of `topological.py` with these waits added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.marking import marked_row
from megatron_ext.schedules.table.memory import Edge, slots_needed

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Schedule

__all__ = ["check_slots"]


def check_slots(schedule: Schedule, slots: int) -> None:
    """Check that a table ends if each edge holds at most `slots` unused messages.

    Raises:
        ScheduleError: It deadlocks; the message shows each rank's position and the number of slots
            that suffices.
    """
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} needs a slot for each micro-batch, because forwards never wait for "
            "backwards; leave the number of slots out"
        )
    run = _BoundedRun(schedule, slots)
    while sum(map(run.advance, range(len(schedule.rows)))):
        pass
    stuck = [r for r, row in enumerate(schedule.rows) if run.position[r] < len(row)]
    if not stuck:
        return
    enough = max(slots_needed(schedule).values())
    lines = [f"{schedule.label} gets stuck with {slots} receive slots on each edge:"]
    lines += [f"  {marked_row(schedule, rank, run.position[rank])}" for rank in stuck[:4]]
    lines.append(f"with {enough} slots no send ever waits")
    raise ScheduleError("\n".join(lines))


class _BoundedRun:
    """Positions of all ranks, and the messages sent but not used yet."""

    def __init__(self, schedule: Schedule, slots: int) -> None:
        self.schedule = schedule
        self.slots = slots
        self.position = [0] * len(schedule.rows)
        self.unused: dict[Edge, int] = {}
        self.arrived: set[tuple[int, str, int]] = set()

    def advance(self, rank: int) -> bool:
        """Run a rank as far as possible; return whether it made progress."""
        row, begin = self.schedule.rows[rank], self.position[rank]
        while self.position[rank] < len(row) and self._run(row[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > begin

    def _run(self, action: Action) -> bool:
        stage, kind, microbatch = action
        if kind == "W":
            return True
        step = 1 if kind == "F" else -1
        source = self._edge(stage - step, stage, kind)
        target = self._edge(stage, stage + step, kind)
        is_first = not 0 <= stage - step < self.schedule.num_stages
        if not is_first and (stage, source_kind(kind), microbatch) not in self.arrived:
            return False
        if target is not None and self.unused.get(target, 0) >= self.slots:
            return False
        if source is not None:
            self.unused[source] -= 1
        if target is not None:
            self.unused[target] = self.unused.get(target, 0) + 1
        self.arrived.add((stage + step, source_kind(kind), microbatch))
        return True

    def _edge(self, stage: int, following: int, kind: str) -> Edge | None:
        """The edge between two stages, or None if no message crosses ranks there."""
        placement = self.schedule.placement
        if not (0 <= stage < placement.num_stages and 0 <= following < placement.num_stages):
            return None
        if placement.hops[min(stage, following)] == "local":
            return None
        return placement.rank_of[stage], placement.rank_of[following], source_kind(kind)


def source_kind(kind: str) -> str:
    """Return the kind of message that feeds an action: F, or B for full and split backwards."""
    return "F" if kind == "F" else "B"
