"""The role of each process, for all sizes."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_ext.config.roles import Place, RankMap, rank_map
from megatron_ext.errors import ArgumentsError

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4), (False, True)))


@pytest.mark.parametrize(("tp", "pp", "dp", "merged"), SIZES)
def test_every_process_has_one_place_and_every_place_one_process(
    tp: int, pp: int, dp: int, merged: bool
) -> None:
    ranks = RankMap(tp, pp, dp, merged)
    assert ranks.num_ranks == ((tp + 1) * pp * dp if merged else 2 * tp * pp * dp)
    places = [ranks.place(rank) for rank in range(ranks.num_ranks)]
    assert len(set(places)) == ranks.num_ranks
    assert [ranks.rank(place) for place in places] == list(range(ranks.num_ranks))
    for role in ("forward", "backward"):
        mine = [place for place in places if place.role == role]
        assert [ranks.role_rank(place) for place in mine] == list(range(len(mine)))
        # Megatron's own order: tensor-parallel ranks innermost, stages outermost.
        assert mine == sorted(mine, key=lambda place: (place.pp, place.dp, place.tp))
    assert places[-1].role == "backward"
    assert places[-1].pp == pp - 1


@pytest.mark.parametrize(("tp", "pp", "dp", "merged"), SIZES)
def test_twins_hold_the_same_part_and_name_each_other(
    tp: int, pp: int, dp: int, merged: bool
) -> None:
    ranks = RankMap(tp, pp, dp, merged)
    for place in map(ranks.place, range(ranks.num_ranks)):
        twins = ranks.twins(place)
        assert {(t.pp, t.dp) for t in twins} == {(place.pp, place.dp)}
        assert all(t.role != place.role and place in ranks.twins(t) for t in twins)
        assert len(twins) == (tp if merged and place.role == "forward" else 1)


def test_the_places_that_the_documentation_shows() -> None:
    plain, merged = RankMap(2, 2, 1), RankMap(2, 2, 1, merged=True)
    forward = [Place("forward", 0, stage, tp) for stage in range(2) for tp in range(2)]
    assert [plain.rank(place) for place in forward] == [0, 1, 4, 5]
    assert [merged.rank(Place("forward", 0, stage, 0)) for stage in range(2)] == [0, 3]


@pytest.mark.parametrize(("tp", "pp", "dp", "merged"), SIZES)
def test_the_number_of_processes_gives_the_replicas(
    tp: int, pp: int, dp: int, merged: bool
) -> None:
    ranks = RankMap(tp, pp, dp, merged)
    assert rank_map(ranks.num_ranks, tp=tp, pp=pp, merged=merged) == ranks
    twice = RankMap(tp, pp, 2 * dp, merged)
    assert rank_map(twice.num_ranks, tp=tp, pp=pp, merged=merged, cp=2) == twice


@pytest.mark.parametrize(
    ("world_size", "merged", "wanted"),
    [(12, False, "8 or 16"), (4, False, "8"), (5, True, "6"), (16, True, "12 or 18")],
)
def test_a_wrong_number_of_processes_is_refused_with_right_ones(
    world_size: int, merged: bool, wanted: str
) -> None:
    with pytest.raises(ArgumentsError, match=f"start {wanted} processes"):
        rank_map(world_size, tp=2, pp=2, merged=merged)
