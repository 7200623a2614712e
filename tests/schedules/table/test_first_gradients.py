"""A stage's first forward and its first weight gradients are of one micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Action, Schedule, generate
from megatron_ext.schedules.table.validation import check_first_gradients
from tests.schedules.strategies import schedules


@given(schedules(slices=False))
def test_all_registered_tables_begin_with_one_micro_batch(table: Schedule) -> None:
    for rank in range(len(table.rows)):
        check_first_gradients(table, rank)


@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [("gpipe", "F", 1), ("gpipe", "B", 0), ("zb-h1", "I", 0), ("zb-h1", "W", 0)],
)
def test_another_order_is_refused(name: str, kind: str, first: int) -> None:
    """Two micro-batches change places in one kind of action."""
    table = generate(name, 2, 3)
    swapped = {
        Action(0, kind, 0): Action(0, kind, 1),
        Action(0, kind, 1): Action(0, kind, 0),
    }
    row = tuple(swapped.get(action, action) for action in table.rows[0])
    other = replace(table, rows=(row, table.rows[1]))
    with pytest.raises(ScheduleError) as raised:
        check_first_gradients(other, 0)
    assert (
        f"those of micro-batch {1 - first}, but its first forward pass is that of {first}"
        in str(raised.value)
    )
    assert "--no-gradient-accumulation-fusion" in str(raised.value)
    check_first_gradients(other, 1)
