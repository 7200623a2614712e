"""The literal rows of all ranks, for display.

A schedule with twins is stored as the table of one of two mirrored pipelines on pp/2 ranks. From
outside it is a bidirectional pipeline on pp ranks: ranks r and pp-1-r hold the same stages and run
the same list with directions exchanged. Here the micro-batches of the second direction are numbered
after those of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Row, Schedule

__all__ = ["chunk_on_screen", "literal_rows", "table_rank"]


def table_rank(schedule: Schedule, rank: int) -> int:
    """Return the row of the table that a rank of the world runs."""
    last = schedule.pp - 1
    return min(rank, last - rank) if schedule.placement.twins == 2 else rank


def literal_rows(schedule: Schedule) -> tuple[Row, ...]:
    """Return the actions of every rank of the world."""
    if schedule.placement.twins == 1:
        return schedule.rows
    return tuple(_literal_row(schedule, rank) for rank in range(schedule.pp))


def _literal_row(schedule: Schedule, rank: int) -> Row:
    """With twin routing, a micro-batch changes sides at each inner fold."""
    mirrored = rank >= schedule.placement.num_ranks
    crossed = list(map(schedule.placement.is_crossed, range(schedule.num_stages)))
    return tuple(
        action._replace(microbatch=action.microbatch + schedule.num_microbatches)
        if crossed[action.stage] != mirrored
        else action
        for action in schedule.rows[table_rank(schedule, rank)]
    )


def chunk_on_screen(schedule: Schedule, stage: int) -> int:
    """Return the chunk number of a stage within its direction on its rank."""
    placement = schedule.placement
    return stage // (schedule.pp if placement.twin_hops else placement.num_ranks)
