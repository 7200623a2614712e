"""Orders of unequal micro-batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_balance import best_order, makespan_of
from megatron_ext.schedules import Costs, Schedule, generate, simulate
from tests.schedules.strategies import COSTS, schedules


@given(schedules(largest=10), COSTS, st.randoms(use_true_random=False))
def test_an_order_is_a_permutation_and_never_slower_than_that_of_the_file(
    schedule: Schedule, costs: Costs, rnd: random.Random
) -> None:
    scales = [
        rnd.choice([0.0, 0.25, 1.0, 7.0]) for _ in range(schedule.num_microbatches)
    ]
    order = best_order(schedule, scales, costs)
    assert sorted(order) == list(range(len(scales)))
    in_file_order = makespan_of(schedule, scales, range(len(scales)), costs)
    assert makespan_of(schedule, scales, order, costs) <= in_file_order * (1 + 1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_equal_microbatches_keep_the_order_of_the_file(scale: float) -> None:
    assert best_order(generate("1f1b", 2, 4), [scale] * 4) == (0, 1, 2, 3)


def test_small_microbatches_fill_and_drain_the_pipeline() -> None:
    scales = [8.0, 1.0, 2.0, 8.0, 8.0, 8.0, 1.0, 2.0]
    schedule = generate("1f1b", 4, 8)
    order = best_order(schedule, scales)
    gained = makespan_of(schedule, scales, range(8)) / makespan_of(
        schedule, scales, order
    )
    assert max(scales[order[0]], scales[order[-1]]) <= 2.0
    assert gained > 1.2


@pytest.mark.parametrize("unit", [1e-6, 1e12])
def test_the_unit_of_costs_does_not_matter(unit: float) -> None:
    schedule, scales = generate("interleaved", 2, 4, chunks=2), [3.0, 1.0, 4.0, 1.5]
    assert best_order(schedule, [unit * scale for scale in scales]) == best_order(
        schedule, scales
    )


def test_a_scale_scales_all_actions_of_its_microbatch() -> None:
    timeline = simulate(
        generate("zb-h1", 2, 3), Costs(1, 2, 3, microbatch_scale=(1, 10, 0))
    )
    base = {"F": 1, "I": 2, "W": 3, "B": 5}
    for row, starts, ends in zip(
        timeline.schedule.rows, timeline.starts, timeline.ends, strict=True
    ):
        for action, start, end in zip(row, starts, ends, strict=True):
            assert end - start == base[action.kind] * (1, 10, 0)[action.microbatch]


def test_scales_have_to_match_the_table() -> None:
    schedule = generate("1f1b", 2, 4)
    with pytest.raises(
        ScheduleError, match=r"microbatch_scale has 3 factors, but .* has 4 micro"
    ):
        simulate(schedule, Costs(microbatch_scale=(1, 2, 3)))
    with pytest.raises(
        ScheduleError, match="micro-batch factors must be between 0 and"
    ):
        Costs(microbatch_scale=(1, -2))
