"""The short tier takes of each test what fits, by measured seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import tiers
from tests.mutations.run_mutant import ALL_MUTANTS

if TYPE_CHECKING:
    from pathlib import Path


class Item:
    """The part of a `pytest.Item` that `left_out` reads."""

    def __init__(self, nodeid: str, **marks: float) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return (
            getattr(pytest.mark, name)(self._marks[name]).mark
            if name in self._marks
            else None
        )


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "durations.json"
    path.write_text(
        json.dumps(
            {
                **{f"a::grid[{n}]": 1.0 for n in range(4)},
                "a::matrix[1]": 6.0,
                "a::long": 4.5,
            }
        )
    )
    monkeypatch.setattr(tiers, "DURATIONS", path)
    return path


def left_out(*items: Item) -> list[str]:
    return [item.nodeid for item in tiers.left_out(items)]  # type: ignore[arg-type]


def test_cases_are_taken_in_order_while_they_fit(measured: Path) -> None:
    # The last one was never measured: it is quick, or new.
    assert left_out(*(Item(f"a::grid[{n}]") for n in range(5))) == [
        "a::grid[2]",
        "a::grid[3]",
    ]
    assert left_out(*(Item(f"a::matrix[{n}]", short_s=6) for n in range(3))) == []


def test_what_takes_long_is_left_out_and_what_is_new_is_not(measured: Path) -> None:
    assert left_out(Item("a::long"), Item("a::new"), Item("a::marked", slow=1)) == [
        "a::long",
        "a::marked",
    ]


def test_what_a_mutant_names_always_stays(measured: Path) -> None:
    [guard, *_] = [test for one in ALL_MUTANTS for test in one.tests if "::" in test]
    measured.write_text(json.dumps({guard: 100.0}))
    assert left_out(Item(guard)) == []


def test_measuring_renews_the_tests_that_ran(measured: Path) -> None:
    tiers.write({"a::grid[1]": 0.1, "a::grid[2]": 2.04}, short=False)
    assert tiers.durations() == {"a::grid[2]": 2.0, "a::long": 4.5, "a::matrix[1]": 6.0}


def test_measuring_the_short_tier_keeps_the_seconds_of_what_it_leaves_out(
    measured: Path,
) -> None:
    tiers.write({"a::grid[0]": 0.9, "a::grid[1]": 0.1}, short=True)
    grid = {"a::grid[0]": 0.9, "a::grid[2]": 1.0, "a::grid[3]": 1.0}
    assert tiers.durations() == {**grid, "a::long": 4.5, "a::matrix[1]": 6.0}


def test_the_line_says_where() -> None:
    line = tiers.summary({"devices": 1200, "runtime": 3}, 4000)
    assert line.startswith(
        "the short tier left out 1,203 of 4,000 cases (devices 1200, runtime 3)"
    )
