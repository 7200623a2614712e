"""Splits every full backward of a table into I and W.

The input gradient then leaves before the weight gradient is computed. In the table's own order that
alone shortens a step; a dynamic policy (policies.py) also moves W to where the rank would wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.schedules.representation.actions import Action, Row, Schedule

__all__ = ["split_backwards"]


def split_backwards(schedule: Schedule) -> Schedule:
    """Return the table with each B as I and W, one after the other; memory stays the same."""
    return replace(schedule, rows=tuple(tuple(_split(row)) for row in schedule.rows))


def _split(row: Row) -> Iterator[Action]:
    for action in row:
        if action.kind == "B":
            yield action._replace(kind="I")
            yield action._replace(kind="W")
        else:
            yield action
