"""Columns of a table for the terminal."""

from __future__ import annotations

import pytest

from megatron_ext.text_table import aligned


def test_the_first_column_is_aligned_left_and_the_others_right() -> None:
    rows = [("schedule", "step"), ("zb-v", "12.5"), ("1f1b", "7")]
    assert aligned(rows).splitlines() == [
        "schedule  step",
        "zb-v      12.5",
        "1f1b         7",
    ]


def test_rows_have_one_number_of_cells() -> None:
    with pytest.raises(ValueError, match="zip"):
        aligned([("schedule", "step"), ("zb-v",)])
