"""The forecasts of `benchmarks/planner.py` against what others measured."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import planner


@pytest.fixture(scope="module")
def simumax() -> list[tuple[float, float]]:
    rows = [each for each in planner.measured() if each[0]["source"] == "SimuMax"]
    assert len(rows) == 43
    return [(abs(error), abs(memory or 0.0)) for _, _, error, memory in rows]


def test_memory_is_within_one_percent_of_measured(simumax: list[tuple[float, float]]) -> None:
    errors = [memory for _, memory in simumax]
    assert statistics.mean(errors) <= 0.01
    assert max(errors) <= 0.015


def test_time_is_close_to_measured(simumax: list[tuple[float, float]]) -> None:
    errors = [time for time, _ in simumax]
    assert statistics.mean(errors) <= 0.065
    assert max(errors) <= 0.175


def test_the_tables_of_the_documentation_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    planner.main()
    text = (planner.ROWS.parents[1] / "docs/planning.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert line in text
