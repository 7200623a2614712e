"""Properties of every registered schedule: correctness, published bubble, bound on activations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import (
    UNIT,
    Costs,
    Schedule,
    generate,
    registered,
    simulate,
    validate,
)
from megatron_ext.schedules.search.queues import check_queues
from tests.schedules import published
from tests.schedules.reference import span
from tests.schedules.strategies import COSTS, schedules

NAMES = list(registered())


def test_the_schedules_are_these() -> None:
    expected = "1f1b bitpipe dualpipe dualpipe-v gpipe interleaved v-half zb-h1 zb-v"
    assert expected.split() == NAMES


def _check(schedule: Schedule) -> None:
    report = validate(schedule)
    assert report.ascending
    # pp / num_stages need not be exact in binary, nor its multiples.
    assert max(report.memory.activations) <= published.peak(schedule) + 1e-9


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_tables_hold_what_is_published(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name, slices=False))
    costs = data.draw(COSTS)
    _check(schedule)
    timeline = simulate(schedule, costs)
    bubble = published.bubble(schedule, costs)
    if bubble is not None:
        assert math.isclose(timeline.bubble, bubble, abs_tol=1e-9)
    assert math.isclose(timeline.ideal, costs.work * schedule.total_microbatches)


@settings(max_examples=30)
@given(schedules(), COSTS, st.floats(0, 2), st.integers(0, 9))
def test_noise_and_latency_never_deadlock(
    schedule: Schedule, costs: Costs, latency: float, seed: int
) -> None:
    noisy = Costs(
        costs.forward,
        costs.input,
        costs.weight,
        latency,
        jitter=0.5,
        link_jitter=1.0,
        seed=seed,
    )
    timeline = simulate(schedule, noisy)
    assert timeline.makespan >= timeline.ideal > 0


@settings(max_examples=40)
@given(
    schedules("bitpipe") | schedules("v-half") | schedules("zb-v"),
    COSTS,
    st.sampled_from([0, 0.3]),
)
def test_tables_made_for_other_costs_are_correct(
    schedule: Schedule, costs: Costs, latency: float
) -> None:
    costs = Costs(costs.forward, costs.input, costs.weight, latency)
    options = {
        key: schedule.options[key]
        for key in registered()[schedule.name].options
        if key in schedule.options
    }
    size = schedule.pp, schedule.total_microbatches
    other = generate(schedule.name, *size, costs=costs, **options)
    _check(other)
    assert other.placement == schedule.placement


def test_bitpipe_zb_for_known_costs() -> None:
    slow_links, slow_input = Costs(latency=0.1), Costs(1, 1.2, 0.8)
    for costs, makespan in ((slow_links, 51.7), (slow_input, 49.8)):
        made_for_them = generate("bitpipe", 8, 16, costs=costs)
        assert simulate(made_for_them, costs).makespan == pytest.approx(makespan)
        made_for_others = generate("bitpipe", 8, 16)
        assert simulate(made_for_others, costs).makespan > makespan + 5


@pytest.mark.parametrize("pp", [4, 6, 8, 10, 12, 16, 22, 32])
def test_bitpipe_zb_reaches_the_bound_of_its_placement(pp: int) -> None:
    for num_microbatches in (pp, 2 * pp - 2, 2 * pp, 3 * pp, 4 * pp):
        timeline = simulate(generate("bitpipe", pp, num_microbatches))
        assert timeline.bubble == (pp - 2) / 4
        assert timeline.peak_activations == pp


@pytest.mark.parametrize("order", ["zb", "paper"])
def test_bitpipe_stays_below_its_cap_for_any_even_number(order: str) -> None:
    for num_microbatches in range(2, 40, 2):
        schedule = generate("bitpipe", 8, num_microbatches, order=order)
        assert max(validate(schedule).memory.activations) <= 8


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8, 12, 16])
def test_v_half_halves_bubble_and_memory_of_1f1b(pp: int) -> None:
    for rounds in (1, 2, 4):
        timeline = simulate(generate("v-half", pp, rounds * pp))
        assert timeline.bubble <= (pp - 1) * UNIT.work / 2
        assert timeline.peak_activations <= (pp + 2) / 2


def test_zb_v_ranks_never_pause_once_the_pipeline_is_full() -> None:
    for pp in (2, 4, 8):
        timeline = simulate(generate("zb-v", pp, 2 * pp))
        assert span(timeline) == timeline.ideal


@pytest.mark.parametrize("pp", [3, 5, 8, 12, 16])
def test_zb_v_reaches_the_bound_of_its_placement_from_pp_micro_batches_on(
    pp: int,
) -> None:
    for num_microbatches in range(pp, 2 * pp):
        schedule = generate("zb-v", pp, num_microbatches)
        validate(schedule)
        timeline = simulate(schedule)
        assert (timeline.bubble, timeline.peak_activations) == ((pp - 1) / 2, pp)


@pytest.mark.parametrize(
    "costs", [Costs(1, 1.2, 0.8), Costs(latency=0.1), Costs(1, 0.8, 1.2)]
)
def test_short_zb_v_is_never_longer_than_the_published_order(costs: Costs) -> None:
    pp, long = 12, generate("zb-v", 12, 23)
    for m in range(pp + 1, 2 * pp - 2):
        rows = tuple(tuple(a for a in row if a.microbatch < m) for row in long.rows)
        cut = Schedule("zb-v", long.placement, m, rows)
        found = simulate(generate("zb-v", pp, m, costs=costs), costs).makespan
        assert found <= simulate(cut, costs).makespan + 1e-9


@pytest.mark.short_s(4)
@given(name=st.sampled_from(NAMES), ranks=st.integers(2, 9), number=st.integers(1, 30))
def test_every_number_of_micro_batches_has_a_table(
    name: str, ranks: int, number: int
) -> None:
    """Mirrored pipelines need even numbers; nothing else is refused."""
    twins = registered()[name].twins
    schedule = generate(name, 2 * ranks if twins == 2 else ranks, number * twins)
    assert schedule.num_microbatches == number
    _check(schedule)
    check_queues(schedule)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_groups_that_are_not_full_cost_no_more_than_full_ones(pp: int) -> None:
    for m in range(1, 3 * pp):
        found = simulate(generate("interleaved", pp, m))
        full = simulate(generate("interleaved", pp, -(-m // pp) * pp))
        assert found.makespan <= full.makespan
        assert found.makespan <= simulate(generate("1f1b", pp, m)).makespan


@pytest.mark.parametrize(
    ("name", "pp", "m", "options", "rule", "remedy"),
    [
        ("bitpipe", 7, 8, {}, "pp must be even", "use 6 or 8"),
        ("bitpipe", 2, 8, {}, "at least 4, got 2", "use 4, or zb-v"),
        ("bitpipe", 8, 9, {}, "must be even, got 9", "use 10"),
        ("bitpipe", 8, 8, {"order": "best"}, "order must be one of zb, paper", "got best"),
        ("interleaved", 1, 4, {}, "at least 2 ranks", "use 1f1b"),
        ("interleaved", 4, 4, {"chunks": 1}, "at least 2 chunks", "1f1b"),
        ("dualpipe", 3, 8, {}, "pp must be even", "use 4, or zb-v"),
        ("dualpipe", 2, 8, {}, "at least 4, got 2", "use 4, or zb-v"),
        ("dualpipe", 4, 9, {}, "must be even, got 9", "use 10"),
        ("zb-v", 4, 8, {"chunks": 3}, "2 stages per rank", "interleaved"),
        ("zb-v", 4, 8, {"order": "zb"}, "has no option 'order'", "it has: none"),
        ("1f1b", 0, 8, {}, "pp must be at least 1", "got 0"),
        ("1f1b", 4, 0, {}, "micro-batches must be at least 1", "got 0"),
        ("2f2b", 4, 8, {}, "no schedule '2f2b'", "1f1b, bitpipe"),
    ],
)  # fmt: skip
def test_impossible_sizes_say_the_rule_and_what_works(
    name: str, pp: int, m: int, options: dict[str, object], rule: str, remedy: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        generate(name, pp, m, **options)
    assert rule in str(caught.value)
    assert remedy in str(caught.value)
