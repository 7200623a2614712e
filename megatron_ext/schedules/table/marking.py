"""Marks the place of an error in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["marked_row"]


def marked_row(schedule: Schedule, rank: int, index: int, context: int = 5) -> str:
    """Return the actions around one action of a rank, with that action in `>> <<`.

    An index past the last action marks the end of the row.
    """
    row = [str(action) for action in schedule.rows[rank]]
    row.append("end")
    row[index] = f">>{row[index]}<<"
    first, end = max(0, index - context), min(len(row), index + context + 1)
    before = ["..."] if first else []
    after = ["..."] if end < len(row) else []
    cells = row[first : min(end, len(row) - (index < len(row) - 1))]
    return f"rank {rank}, action {index}: {' '.join(before + cells + after)}"
