"""Policies run every table to its end, below its memory, and add gradients in its order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules import Costs, Schedule, generate, simulate, validate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies, quiet
from megatron_ext.schedules.search.policies import (
    POLICIES,
    Curve,
    Hint,
    Patience,
    PolicyName,
    arena_slots,
)
from megatron_ext.schedules.table.memory import activation_peaks, measure, stash_ratio
from megatron_ext.schedules.table.transforms import split_backwards, weights_at_once
from megatron_ext.schedules.table.validation import check_first_gradients

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline

TABLES = [
    ("1f1b", 4, 8),
    ("interleaved", 4, 8),
    ("zb-v", 4, 6),
    ("v-half", 4, 8),
    ("dualpipe-v", 3, 8),
    ("bitpipe", 4, 8),
    ("dualpipe", 4, 8),
]


def run(
    table: Schedule,
    costs: Costs,
    name: PolicyName = "hint",
    *,
    extra: int = 0,
    fill: bool = False,
) -> Timeline:
    made = policies(name, table, extra_activations=extra, weights_fill=fill)
    return simulate_dynamic(table, made, costs)


noise = st.builds(
    Costs,
    forward=st.floats(0.5, 2),
    weight=st.floats(0.5, 2),
    latency=st.sampled_from([0.0, 0.3]),
    jitter=st.sampled_from([0.0, 0.5]),
    link_jitter=st.sampled_from([0.0, 1.0]),
    launch=st.sampled_from([0.0, 0.05, 0.6]),
    seed=st.integers(0, 1000),
)


@given(
    st.sampled_from(TABLES), st.sampled_from(sorted(POLICIES)), st.integers(0, 2), st.booleans(),
    noise,
)  # fmt: skip
# On stage 2 the message of micro-batch 1 overtakes that of 0.
@example(
    ("1f1b", 4, 8), "breadth-first", 0, False,
    Costs(latency=0.3, jitter=0.5, link_jitter=1.0, seed=2),
)  # fmt: skip
def test_every_policy_ends_within_its_memory(
    size: tuple[str, int, int], name: PolicyName, extra: int, split: bool, costs: Costs
) -> None:
    table = generate(*size)
    table = split_backwards(table) if split else table
    timeline = run(table, costs, name, extra=extra, fill=split)
    report = validate(timeline.schedule)
    assert report.ascending
    for rank in range(len(table.rows)):
        check_first_gradients(timeline.schedule, rank)
    if name == "hint":
        chunks = len(table.placement.stages_of[0])
        allowed = extra * chunks * table.pp / table.num_stages
        assert (
            max(report.memory.activations)
            <= max(measure(table).activations) + allowed + 1e-9
        )


@given(
    st.sampled_from(TABLES),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([1, 4, 8]),
    noise,
)
def test_a_large_weight_stash_counts_as_what_it_is(
    size: tuple[str, int, int], extra: int, split: bool, ranks: int, costs: Costs
) -> None:
    table = generate(*size)
    table = split_backwards(table) if split else table
    ratio = stash_ratio(ranks, sequence_parallel=True, keeps_gathered=True)
    made = policies(
        "hint", table, extra_activations=extra, weights_fill=split, stash_ratio=ratio
    )
    timeline = simulate_dynamic(table, made, costs)
    allowed = extra * len(table.placement.stages_of[0]) * table.pp / table.num_stages
    kept = max(activation_peaks(timeline.schedule, ratio))
    assert kept <= max(activation_peaks(table, ratio)) + allowed


def test_a_bound_that_ignores_the_stash_is_exceeded() -> None:
    """An order chosen as if a weight stash were no larger than the activations before it."""
    table = split_backwards(generate("interleaved", 4, 16))
    ratio = stash_ratio(8, sequence_parallel=True, keeps_gathered=True)
    costs = [Costs(latency=0.5, link_jitter=1.0, seed=seed) for seed in range(8)]
    bound = max(activation_peaks(table, ratio))

    def kept(assumed: float) -> float:
        made = policies("hint", table, weights_fill=True, stash_ratio=assumed)
        orders = [simulate_dynamic(table, made, these).schedule for these in costs]
        return max(max(activation_peaks(order, ratio)) for order in orders)

    assert kept(ratio) <= bound < kept(1.0)


def test_gathered_operands_are_what_transformer_engine_keeps() -> None:
    """Of a layer of width 1 and one token: two operands each of four linear layers, in 16 bits."""
    for ranks in (1, 2, 4, 8):
        operands = [(1, 3 / ranks), (1 / ranks, 1), (1, 4 / ranks), (4 / ranks, 1)]
        kept = 2 * sum(map(sum, operands))
        exact = max(1.0, kept / (34 / ranks))
        ratio = stash_ratio(ranks, sequence_parallel=True, keeps_gathered=True)
        assert exact <= ratio < exact + 1 / 16
        recomputed = stash_ratio(
            ranks, sequence_parallel=True, keeps_gathered=True, recomputed_layers=1
        )
        assert recomputed == kept / (
            2 / ranks
        )  # of a recomputed layer only its input is kept
    assert stash_ratio(8) == stash_ratio(8, sequence_parallel=True) == 1


@pytest.mark.parametrize(
    ("module", "ratio"),
    [("core_attn", 1), ("layernorm", 1.125), ("moe_act", 1.25), ("mlp", 1.8125)],
)
def test_a_recomputed_module_keeps_less_before_i(module: str, ratio: float) -> None:
    assert stash_ratio(recomputed=[module]) == ratio
    assert stash_ratio(recomputed=[module], recomputed_layers=1) == 16


@pytest.mark.parametrize(
    ("modules", "ratio"),
    [((), 1), (["attn_norm"], 1), (["core_attn"], 1.1875), (["moe_act"], 1.25)],
)
def test_what_an_offloaded_module_brings_back_in_i_counts_until_w(
    modules: list[str], ratio: float
) -> None:
    assert stash_ratio(offloaded=modules) == ratio


@given(st.sampled_from(TABLES))
def test_w_right_after_i_leaves_a_valid_table_with_one_stash(
    size: tuple[str, int, int],
) -> None:
    table = weights_at_once(generate(*size))
    validate(table)
    for row in table.rows:
        for action, following in pairwise([*row, None]):
            assert action is not None
            if action.kind == "I":
                assert following == action._replace(kind="W")


@given(st.sampled_from(TABLES))
def test_an_undisturbed_table_runs_as_it_is(size: tuple[str, int, int]) -> None:
    """With the costs it was made for, a table whose head never waits is followed."""
    table = generate(*size)
    dynamic, static = run(table, Costs()), simulate(table)
    assert dynamic.makespan <= static.makespan * 1.03


def test_the_hint_beats_the_static_table_on_slow_links_at_equal_memory() -> None:
    for name, extra, least in (
        ("interleaved", 0, 1.05),
        ("interleaved", 1, 1.10),
        ("bitpipe", 0, 1.1),
    ):
        options = {"order": "paper"} if name == "bitpipe" else {}
        table = split_backwards(generate(name, 4, 16, **options))
        seeds = [Costs(latency=0.5, link_jitter=1.0, seed=seed) for seed in range(8)]
        static = mean(simulate(table, costs).makespan for costs in seeds)
        dynamic = mean(
            run(table, costs, extra=extra, fill=True).makespan for costs in seeds
        )
        assert static / dynamic > least, (name, extra)


def test_the_hint_loses_nothing_where_nothing_is_late() -> None:
    """Against the interleaved table with split backwards, and against the best of its memory."""
    for pp in (4, 8):
        table = split_backwards(generate("interleaved", pp, 4 * pp))
        quiet = Costs(latency=0.01)
        dynamic = run(table, quiet, fill=True)
        best = min(
            simulate(table, quiet).makespan,
            simulate(generate("zb-v", pp, 4 * pp)).makespan,
        )
        assert dynamic.makespan <= best / 0.99
        assert dynamic.peak_activations == simulate(table).peak_activations


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("pp", [4, 8])
def test_a_table_without_room_is_left_alone_while_nothing_is_late(
    name: str, pp: int
) -> None:
    """Ranks that jump at once are up to 6 % slower there; late messages are jumped over still."""
    table = generate(name, pp, 4 * pp)
    dynamic, static = run(table, quiet()), simulate(table, quiet())
    assert dynamic.makespan <= static.makespan * (1 + 1e-9)
    assert dynamic.peak_activations == static.peak_activations
    late = [Costs(latency=0.5, link_jitter=1.0, seed=seed) for seed in range(3)]
    dynamic_s = mean(run(table, costs, extra=1).makespan for costs in late)
    assert mean(simulate(table, costs).makespan for costs in late) / dynamic_s > 1.02


def test_weight_gradients_leave_their_places_where_that_gains_more() -> None:
    table = generate("v-half", 8, 32)
    assert policies("hint", table)(0).patience is None
    for costs in (quiet(), Costs(1.0, 1.1, 0.9, latency=0.02)):
        assert run(table, costs).makespan < simulate(table, costs).makespan


def test_a_table_that_adds_gradients_in_another_order_is_refused() -> None:
    table = generate("gpipe", 2, 3)
    backwards = [
        tuple(a._replace(microbatch=2 - a.microbatch) for a in row)
        for row in table.rows
    ]
    with pytest.raises(ScheduleError, match="not in micro-batch order"):
        policies("hint", replace(table, rows=tuple(backwards)))


def test_greedy_rules_have_no_bound_on_memory() -> None:
    table = split_backwards(generate("interleaved", 4, 16))
    costs = Costs(latency=0.5, link_jitter=1.0)
    assert run(table, costs, "breadth-first", fill=True).peak_activations == 16
    assert (
        run(table, costs, fill=True).peak_activations
        == simulate(table).peak_activations
        == 5.5
    )


def test_splitting_keeps_memory_and_sends_sooner() -> None:
    table = generate("interleaved", 4, 8)
    split = split_backwards(table)
    assert validate(split).memory.activations == validate(table).memory.activations
    assert simulate(split).makespan < simulate(table).makespan
    assert split_backwards(split) == split


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), st.data())
def test_the_curve_is_the_highest_running_sum(
    changes: list[int], data: st.DataObject
) -> None:
    curve = Curve(changes)
    for _ in range(5):
        position = data.draw(st.integers(0, len(changes) - 1))
        assert curve.take(position) == changes[position]
        changes[position] = 0
        end = data.draw(st.integers(0, len(changes)))
        assert curve.top(end) == max(0, *(sum(changes[: i + 1]) for i in range(end)), 0)


@pytest.mark.parametrize("launch", [0.0, 0.1])
@pytest.mark.parametrize("name", ["hint", "breadth-first"])
@pytest.mark.parametrize("table", ["interleaved", "zb-v"])
def test_no_step_leaves_anything_to_the_next(
    table: str, name: PolicyName, launch: float
) -> None:
    schedule = generate(table, 4, 8)
    factory = policies(name, schedule, extra_activations=1)
    costs = Costs(jitter=0.5, seed=1, launch=launch)
    first = simulate_dynamic(schedule, factory, costs)
    simulate_dynamic(schedule, factory, Costs(jitter=0.5, seed=2, launch=launch))
    assert simulate_dynamic(schedule, factory, costs) == first


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("launch", [0.0, 0.01])
def test_ranks_pair_what_is_ready(name: str, jitter: float, launch: float) -> None:
    costs = Costs(all_to_all=0.5, latency=0.05, jitter=jitter, launch=launch)

    def step(*, pairs: bool) -> Timeline:
        split = split_backwards(generate(name, 4, 16, pairs=pairs))
        made = policies("hint", split, extra_activations=1, costs=Costs(all_to_all=0.5))
        return simulate_dynamic(split, made, costs)

    found = step(pairs=True)
    validate(found.schedule)
    assert found.hidden > 0.45
    assert found.makespan < 0.9 * step(pairs=False).makespan


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe-v"])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_pair_holds_both_of_its_micro_batches(name: str, extra: int) -> None:
    """Of a pair with a whole backward, the forward runs before anything is freed."""
    schedule = generate(name, 4, 16, pairs=True)
    made = policies(
        "hint", schedule, extra_activations=extra, costs=Costs(all_to_all=0.5)
    )
    costs = Costs(all_to_all=0.5, latency=0.05, jitter=1.0)
    found = simulate_dynamic(schedule, made, costs)
    assert any(found.schedule.pairs)
    allowed = (
        extra * len(schedule.placement.stages_of[0]) * schedule.pp / schedule.num_stages
    )
    kept = max(activation_peaks(found.schedule))
    assert kept <= max(activation_peaks(schedule)) + allowed


def test_a_greedy_rule_pairs_what_is_ready() -> None:
    split = split_backwards(generate("interleaved", 4, 16, pairs=True))
    found = simulate_dynamic(
        split, policies("depth-first", split), Costs(all_to_all=0.5)
    )
    validate(found.schedule)
    assert found.hidden > 0.3


def test_a_partner_is_awaited_for_no_longer_than_the_pair_gains() -> None:
    schedule = generate("1f1b", 2, 4, pairs=True)
    row, number = schedule.rows[0], len(schedule.rows[0])
    [first, *_] = sorted(schedule.pairs_of(0))
    gains = [2.5 * (index == first) for index in range(number)]
    patience = Patience(waits=[9.0] * number, durations=[1.0] * number, gains=gains)

    def at_the_pair() -> Hint:
        policy = Hint(schedule, 0, cap=4, weights_fill=False, patience=patience)
        for index in range(first):
            assert policy.wait() == 0
            assert policy.choose() == index
            assert policy.with_partner(index) == (index,)
            policy.progress.finished(index)
        return policy

    alone, together = at_the_pair(), at_the_pair()
    assert alone.wait() == 2.5
    assert not alone.looks_ahead()
    assert alone.choose() == first
    assert alone.with_partner(first) == (first,)
    together.progress.arrived(Message("B", 0, row[first + 1].microbatch))
    assert together.wait() == 0
    assert together.looks_ahead()
    assert together.choose() == first
    assert together.with_partner(first) == (first, first + 1)
    assert together.live == alone.live - 1


def test_an_arena_has_no_more_slots_than_the_core_makes() -> None:
    assert arena_slots(generate("gpipe", 2, 64)) == 256
    assert arena_slots(generate("gpipe", 2, 300)) == 1024
