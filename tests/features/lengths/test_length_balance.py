"""Sharing out by cost: what any packing has to keep, and a bound that none beats."""

from __future__ import annotations

import random
from itertools import chain, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_balance import (
    best_order,
    deal_out,
    fills_of,
    makespan_of,
    packs_in_file_order,
    shortest,
)
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.table.length_cost import LengthCost

MAX_TOKENS = 100
LENGTHS = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=60)
REPLICAS = st.integers(1, 5)
LENGTH_COSTS = st.builds(
    LengthCost, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.01, 0.04, 1.0])
)
FILLS = st.sampled_from([0.0, 1.5, 7.0])


@given(LENGTHS)
def test_packs_hold_the_samples_in_their_order_and_within_the_limit(
    lengths: list[int],
) -> None:
    packs = list(packs_in_file_order(lengths, MAX_TOKENS))
    assert list(chain.from_iterable(packs)) == lengths
    assert all(sum(pack) <= MAX_TOKENS for pack in packs)
    assert all(sum(pack) + after[0] > MAX_TOKENS for pack, after in pairwise(packs))


MICROBATCH_COSTS = st.sampled_from([0.0, 0.1, 1.0, 2.0, 7.0, 30.0])


@st.composite
def _microbatches(draw: st.DrawFn, most: int = 8) -> tuple[list[float], int]:
    """Costs in the order of the file, and the number of replicas."""
    replicas = draw(st.integers(1, 5))
    each = draw(st.integers(1, most))
    size = replicas * each
    return draw(st.lists(MICROBATCH_COSTS, min_size=size, max_size=size)), replicas


def _costliest(shares: list[list[int]], costs: list[float], fills: float) -> float:
    rows = [[costs[number] for number in share] for share in shares]
    return max(sum(row) + fills * max(row) for row in rows)


@given(_microbatches(), FILLS)
def test_replicas_share_out_all_microbatches_equally(
    batch: tuple[list[float], int], fills: float
) -> None:
    costs, replicas = batch
    shares = deal_out(costs, replicas, fills)
    assert sorted(chain.from_iterable(shares)) == list(range(len(costs)))
    assert {len(share) for share in shares} == {len(costs) // replicas}
    assert all(share == sorted(share) for share in shares)
    in_file_order = [
        list(range(first, len(costs), replicas)) for first in range(replicas)
    ]
    before = _costliest(in_file_order, costs, fills)
    assert _costliest(shares, costs, fills) <= before * (1 + 1e-12)


@given(_microbatches(), FILLS)
def test_what_is_shared_out_already_stays(
    batch: tuple[list[float], int], fills: float
) -> None:
    costs, replicas = batch
    shares = deal_out(costs, replicas, fills)
    again = [costs[number] for turn in zip(*shares, strict=True) for number in turn]
    once_more = deal_out(again, replicas, fills)
    assert _costliest(once_more, again, fills) == pytest.approx(
        _costliest(shares, costs, fills)
    )


@given(st.lists(MICROBATCH_COSTS, min_size=6, max_size=6))
def test_shares_are_close_to_the_best(costs: list[float]) -> None:
    # Costliest first is at most 4/3 of the best without the equal numbers (Graham 1969).
    halves = ([list(found[:3]), list(found[3:])] for found in permutations(range(6)))
    best = min(_costliest(shares, costs, 0.0) for shares in halves)
    assert _costliest(deal_out(costs, 2), costs, 0.0) <= 4 / 3 * best + 1e-12


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_equal_microbatches_stay_where_they_were_read(replicas: int) -> None:
    in_file_order = [list(range(first, 8, replicas)) for first in range(replicas)]
    assert deal_out([0.1] * 8, replicas, 3.0) == in_file_order


def test_few_microbatches_move() -> None:
    # Replica 0 reads 9, 9, 1 and 1, replica 1 reads 1 four times: one 9 for one 1 is enough.
    shares = deal_out([9.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    kept = [sum(number % 2 == r for number in share) for r, share in enumerate(shares)]
    assert kept == [3, 3]


def test_microbatches_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(
        ScheduleError, match="7 micro-batches cannot be divided equally among 2"
    ):
        deal_out([1.0] * 7, 2)


def test_chunks_fill_the_pipeline_faster() -> None:
    assert fills_of(generate("1f1b", 4, 4).placement) == 3
    assert fills_of(generate("interleaved", 4, 4, chunks=2).placement) == 1.5


SIZES = st.sampled_from(
    [
        ("1f1b", 4, {}),
        ("interleaved", 4, {"chunks": 2}),
        ("zb-v", 4, {}),
        ("zb-h1", 3, {}),
    ]
)


@given(
    SIZES,
    REPLICAS,
    LENGTH_COSTS,
    st.sampled_from([Costs(), Costs(1, 0.5, 2), Costs(1, 1, 1, latency=0.3)]),
    st.randoms(use_true_random=False),
)
def test_no_packing_and_no_order_beats_the_bound(
    size: tuple[str, int, dict[str, int]],
    replicas: int,
    cost: LengthCost,
    costs: Costs,
    rnd: random.Random,
) -> None:
    name, pp, options = size
    schedule = generate(name, pp, 2 * pp, costs=costs, **options)
    packing = [
        [[rnd.randint(1, 50) for _ in range(rnd.randint(1, 3))] for _ in range(2 * pp)]
        for _ in range(replicas)
    ]
    of_samples = [cost.of_length(n) for row in packing for pack in row for n in pack]
    bound = shortest(of_samples, replicas, schedule.placement, costs)
    rows = [[cost.of_pack(pack) for pack in row] for row in packing]
    step = max(
        makespan_of(schedule, row, best_order(schedule, row, costs), costs)
        for row in rows
    )
    assert bound <= step * (1 + 1e-9)


def test_the_bound_is_reached() -> None:
    # One replica of one rank; and one sample that goes through all ranks alone.
    one_rank = generate("1f1b", 1, 3)
    assert shortest([1.0, 2.0, 4.0], 1, one_rank.placement) == 21.0
    assert makespan_of(one_rank, [1.0, 2.0, 4.0], (0, 1, 2)) == 21.0
    split = generate("zb-h1", 4, 1)
    assert shortest([2.0], 1, split.placement) == 16.0
    assert (
        simulate(split, Costs(microbatch_scale=(2.0,))).makespan == 18.0
    )  # and its last W


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([0, 5], "a sample has 0 tokens; remove empty samples"),
        (
            [101],
            "a sample has 101 tokens, but a micro-batch has at most 100; cut the sample",
        ),
    ],
)
def test_impossible_batches_are_refused(lengths: list[int], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        list(packs_in_file_order(lengths, MAX_TOKENS))


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "-1,2", "0,0"])
def test_impossible_costs_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"for example 1,0\.0001"):
        LengthCost.parse(text)


def test_the_cost_of_a_model_is_the_published_count() -> None:
    # 24 h^2 L + 4 h L^2 (Narayanan et al.), of whose second part a causal mask leaves half.
    assert LengthCost.of_model(1024) == LengthCost(24 * 1024**2, 2 * 1024)
    # Llama 3 8B: 32 heads of 128, 8 groups of keys, three matrices of 14336.
    llama = LengthCost.of_model(
        4096, 14336, gated=True, query_width=4096, key_width=1024
    )
    weights_of_a_layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert llama.linear == 2 * weights_of_a_layer
    assert llama.of_length(2) == 2 * llama.linear + 4 * llama.quadratic
