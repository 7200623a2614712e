"""`tests.tiers` marks cases, and keeps their values and names."""

from __future__ import annotations

import pytest

from tests.tiers import first_quick


def test_all_cases_but_the_first_are_slow() -> None:
    cases = first_quick([1, (2, "b"), pytest.param(3, id="three", marks=pytest.mark.tree)])
    assert cases[0] == 1
    assert cases[1].values == (2, "b")
    assert (cases[2].values, cases[2].id) == ((3,), "three")
    assert [mark.name for mark in cases[1].marks] == ["slow"]
    assert [mark.name for mark in cases[2].marks] == ["tree", "slow"]


def test_several_cases_can_stay_quick() -> None:
    assert first_quick("abc", 2)[:2] == ["a", "b"]
    assert first_quick("ab", 2) == ["a", "b"]
