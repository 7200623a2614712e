"""Splits every full backward of a table into I and W.

Each rank then sends the input gradient before it computes the weight gradient. That alone shortens
a step in the table's own order; a dynamic policy (policies.py) also moves W into idle time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.schedules.table.actions import Action, Row, Schedule

__all__ = ["split_backwards"]


def split_backwards(schedule: Schedule) -> Schedule:
    """Return the table with each B replaced by I, W; memory stays the same."""
    return replace(schedule, rows=tuple(tuple(_split(row)) for row in schedule.rows))


def _split(row: Row) -> Iterator[Action]:
    for action in row:
        if action.kind == "B":
            yield action._replace(kind="I")
            yield action._replace(kind="W")
        else:
            yield action
