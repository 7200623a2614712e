"""JSON keeps what CSV cannot: name, options and twins."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Schedule, generate, simulate
from megatron_ext.schedules.table import table_files
from tests.schedules.strategies import schedules


@given(schedules())
def test_there_and_back(schedule: Schedule) -> None:
    loaded = table_files.from_json(table_files.json_text(schedule))
    assert loaded == schedule
    assert loaded.digest == schedule.digest


def test_times_are_added() -> None:
    schedule = generate("1f1b", 2, 2)
    timeline = simulate(schedule)
    content = json.loads(
        table_files.json_text(schedule, starts=timeline.starts, ends=timeline.ends)
    )
    assert content["rows"][1] == ["1F0", "1B0", "1F1", "1B1"]
    assert content["starts"][1] == [1, 2, 4, 5]
    assert content["ends"][1] == [2, 4, 5, 7]
    assert table_files.from_json(json.dumps(content)) == schedule


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"placement": {"name": "v"}}', '"1f1b"']
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not a schedule"):
        table_files.from_json(text)
