"""Every micro-batch gets its own item, in whatever order it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.compute import MicrobatchData


@given(st.permutations(range(8)))
def test_items_belong_to_micro_batches(order: list[int]) -> None:
    data = MicrobatchData(iter(range(100, 200)))
    for microbatch in order:
        view = data.view(microbatch)
        assert view is not None
        assert next(view) == 100 + microbatch


def test_nothing_is_fetched_before_it_is_asked_for() -> None:
    fetched = []

    def items() -> Iterator[int]:
        for i in range(4):
            fetched.append(i)
            yield i

    data = MicrobatchData(items())
    views = [data.view(i) for i in range(4)]
    assert fetched == []
    assert next(views[1]) == 1  # type: ignore[arg-type]
    assert fetched == [0, 1]


def test_ranks_without_data_get_none() -> None:
    assert MicrobatchData(None).view(0) is None


def test_a_second_item_is_refused() -> None:
    view = MicrobatchData(iter(range(8))).view(2)
    assert view is not None
    assert next(view) == 2
    with pytest.raises(ScheduleError, match="second time for micro-batch 2"):
        next(view)


def test_the_end_of_the_data_is_the_end() -> None:
    view = MicrobatchData(iter([])).view(0)
    assert view is not None
    with pytest.raises(StopIteration):
        next(view)


class Rollout:
    """Data of an RL framework: fields by name, and no iterator."""

    def get_next(self, names: list[str]) -> list[str]:
        return names


def test_what_is_no_iterator_is_handed_over_in_its_order() -> None:
    source: Any = Rollout()
    data = MicrobatchData(source)
    assert [data.view(i) is source for i in range(3)] == [True] * 3
    with pytest.raises(ScheduleError, match="micro-batch 5 runs out of order"):
        data.view(5)
