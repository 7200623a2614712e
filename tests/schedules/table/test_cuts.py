"""Cuts against exhaustive search, and against layouts that people wrote by hand."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table import placement as place
from megatron_ext.schedules.table.cuts import (
    cut,
    layout_of,
    loads,
    parse_layout,
    spread,
)

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

WORK = st.sampled_from([0.5, 1.0, 1.5, 3.0])


def shortest(
    layers: list[float],
    first: float,
    last: float,
    placement: Placement,
    least_last: int,
) -> float:
    """The longest work of a rank under the best of all cuts."""
    stages, found = placement.num_stages, float("inf")
    for ends in combinations(range(1, len(layers) + (least_last == 0)), stages - 1):
        counts = [b - a for a, b in zip((0, *ends), (*ends, len(layers)), strict=True)]
        found = min(found, max(loads(counts, layers, first, last, placement)))
    return found


@settings(max_examples=60)
@given(
    st.lists(WORK, min_size=5, max_size=10),
    WORK,
    WORK,
    st.integers(2, 5),
    st.integers(0, 1),
)
@example([0.5, 0.5, 0.5, 0.5, 1.0], 0.5, 1.0, 5, 1)  # no stage can have fewer layers
def test_a_cut_for_one_stage_on_each_rank_is_the_best(
    layers: list[float], first: float, last: float, ranks: int, least_last: int
) -> None:
    placement = place.linear(ranks)
    counts = cut(layers, first, last, placement, least_last=least_last)
    assert sum(counts) == len(layers)
    assert min(counts[:-1]) >= 1 <= counts[-1] + 1 - least_last
    found = max(loads(counts, layers, first, last, placement))
    assert found == pytest.approx(shortest(layers, first, last, placement, least_last))


@settings(max_examples=40)
@given(
    st.integers(8, 14), WORK, WORK, st.sampled_from(["loop", "v"]), st.integers(0, 3)
)
def test_a_cut_for_several_stages_is_within_one_layer_of_the_best(
    count: int, first: float, last: float, name: str, dense: int
) -> None:
    placement = place.v(4) if name == "v" else place.loop(2, 3)
    layers = [0.5] * dense + [1.0] * (count - dense)
    found = max(
        loads(cut(layers, first, last, placement), layers, first, last, placement)
    )
    best = shortest(layers, first, last, placement, 1)
    assert best - 1e-9 <= found <= best + 1.0


def test_stages_or_ranks_are_even() -> None:
    layers, last, placement = [1.0] * 10, 1.5, place.loop(2, 2)
    by_rank = cut(layers, 0.0, last, placement)
    by_stage = cut(layers, 0.0, last, placement, by_stage=True)
    longest = [max(*counts[:3], counts[3] + last) for counts in (by_rank, by_stage)]
    busiest = [
        max(loads(counts, layers, 0.0, last, placement))
        for counts in (by_rank, by_stage)
    ]
    assert longest[1] == 3 <= longest[0]
    assert busiest[0] == 6 <= busiest[1]


@given(
    num_layers=st.integers(1, 100), ranks=st.integers(2, 16), chunks=st.integers(1, 4)
)
def test_layers_that_do_not_divide_are_spread_over_ranks(
    num_layers: int, ranks: int, chunks: int
) -> None:
    """In a V both stages of a middle rank got one more, and the ranks of the ends none."""
    for placement in (place.v(ranks), place.loop(ranks, chunks)):
        counts = spread(num_layers, placement.num_stages, rank_of=placement.rank_of)
        of_rank = [0] * ranks
        for stage, count in enumerate(counts):
            of_rank[placement.rank_of[stage]] += count
        assert sum(counts) == num_layers
        assert max(counts) - min(counts) <= 1
        assert max(of_rank) - min(of_rank) <= 1
    assert layout_of(spread(4, 8, rank_of=place.v(4).rank_of), 0) == "Et|t|t|t||||L"


def test_too_few_layers_are_an_error() -> None:
    with pytest.raises(ScheduleError, match="3 layers are too few for 4 stages"):
        cut([1.0] * 3, 0.0, 0.0, place.linear(4))


def test_the_layout_of_glm_5_2_is_better_balanced_than_by_hand() -> None:
    """Megatron#6392: shares of 19.1, 25.6, 25.6 and 29.7 % of `Et*18|t*24|t*24|t*12m*7L`."""
    layer = 25.6 / 24
    first, last = 19.1 - 18 * layer, 29.7 - 12 * layer
    placement = place.linear(4)
    counts = cut([layer] * 78, max(0.0, first), last, placement)
    assert max(loads(counts, [layer] * 78, max(0.0, first), last, placement)) <= 26.0
    [*_, tail] = parse_layout(layout_of(counts, 7))
    assert tail == "t" * counts[-1] + "m" * 7 + "L"


BY_HAND = [
    # From recipes of Megatron-Bridge: layout, ranks, layers that are dense, heads of MTP.
    ("Et*4|(t*4|)*14tmL", 4, 3, 1),
    ("Et*4|(t*4|)*14tmL", 2, 3, 1),
    ("Et*4|(t*4|)*14tmL", 8, 3, 1),
    ("Et*4|(t*4|)*14tmL", 16, 3, 1),
    ("Et|(tt|)*30mL", 8, 3, 1),
    ("Et*4|(t*4|)*14tL", 16, 1, 0),
    ("Et*4|(t*4|)*14tL", 4, 1, 0),
    ("Et|(tt|)*30L", 16, 1, 0),
    ("Et*4|(t*7|)*5t*8|tmL", 2, 0, 1),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, 0, 0),
    ("Et*7|t*8|t*8|t*8|t*8|t*8|t*8|t*7,L", 4, 0, 0),
    ("Etttttt|tttttt|tttttt|ttttt|ttttt|ttttt|ttttt|tttttmL", 8, 0, 1),
    ("Ettttttttttt|ttttttttttt|ttttttttttt|ttttttttttmL", 4, 0, 1),
    ("Et*7|t*7mL", 2, 0, 1),
    ("Et*2|(tt|)*5t|tmL", 4, 0, 1),
]


@pytest.mark.parametrize(("layout", "ranks", "dense", "mtp"), BY_HAND)
@pytest.mark.parametrize("loss", [0.5, 1.5])
def test_a_cut_is_never_worse_than_by_hand(
    layout: str, ranks: int, dense: int, mtp: int, loss: float
) -> None:
    theirs = [stage.count("t") for stage in parse_layout(layout)]
    stages = len(theirs)
    placement = (
        place.linear(ranks) if stages == ranks else place.loop(ranks, stages // ranks)
    )
    layers = [0.6] * dense + [1.0] * (sum(theirs) - dense)
    ends = (0.05, loss + 1.5 * mtp)
    least = min(1, theirs[-1])
    counts = cut(layers, *ends, placement, least_last=least)
    ours = max(loads(counts, layers, *ends, placement))
    assert ours <= max(loads(theirs, layers, *ends, placement)) + 1e-9
