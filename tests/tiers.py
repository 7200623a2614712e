"""Which cases of a grid run for every change; the others belong to the nightly tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(cases: Iterable[Any], number: int = 1) -> list[Any]:
    """Mark all cases but the first as slow.

    Args:
        cases: Values of `pytest.mark.parametrize`: `pytest.param`, a tuple of several arguments, or
            the value of one.
        number: How many stay quick.
    """
    return [case if index < number else _slow(case) for index, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
