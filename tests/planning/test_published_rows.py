"""The forecasts of `benchmarks/planner.py` against what others measured."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import planner

Errors = list[tuple[float, float]]


@pytest.fixture(scope="module")
def rows() -> list[planner.Measured]:
    return planner.measured()


@pytest.fixture(scope="module")
def simumax(rows: list[planner.Measured]) -> Errors:
    own = [each for each in rows if each[0]["source"] == "SimuMax"]
    assert len(own) == 43
    return [(abs(error), abs(memory or 0.0)) for _, _, error, memory in own]


def test_memory_is_within_one_percent_of_measured(simumax: Errors) -> None:
    errors = [memory for _, memory in simumax]
    assert statistics.mean(errors) <= 0.01
    assert max(errors) <= 0.015


def test_time_is_close_to_measured(simumax: Errors) -> None:
    errors = [time for time, _ in simumax]
    assert statistics.mean(errors) <= 0.05
    assert max(errors) <= 0.10


def test_rows_that_nothing_was_fitted_to_are_as_close_as_the_documentation_says(
    rows: list[planner.Measured],
) -> None:
    own = [each for each in rows if each[0]["source"] == "Megatron-Bridge"]
    others = [abs(error) for row, _, error, _ in own if not row["fitted"]]
    assert (len(own), len(others)) == (143, 70)
    assert statistics.mean(others) <= 0.052
    assert max(others) <= 0.215


def test_no_layout_by_hand_is_better_balanced_than_the_cut() -> None:
    found = planner.by_hand()
    assert len(found) == 26
    assert all(ours <= theirs + 1e-9 for *_, theirs, ours in found)


def test_the_tables_of_the_documentation_are_these(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planner.main(["--layouts"])
    simumax, bridge, *_ = capsys.readouterr().out.split("\n\n")
    text = (planner.ROWS.parents[1] / "docs/results-planning.md").read_text(
        encoding="utf-8"
    )
    for line in bridge.splitlines():
        assert line in text
    cells = [cell.strip() for cell in simumax.splitlines()[-1].strip("| ").split("|")]
    _, time_mean, time_worst, memory_mean, memory_worst = cells
    figures = f"{time_mean} | {time_worst} | {memory_worst} (mean {memory_mean})"
    assert f"| SimuMax v1.2, 43 rows on 8 B200 | {figures} |" in text
