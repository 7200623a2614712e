"""Tables made from others: pairs stay, and twins on screen run mirrored in both directions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from megatron_ext.schedules import Action, Schedule, generate, registered, validate
from megatron_ext.schedules.table.transforms import (
    literal_rows,
    split_backwards,
    weights_at_once,
)
from tests.schedules.strategies import schedules


def _pairs(table: Schedule) -> list[list[tuple[Action, Action]]]:
    """By rank the pairs of a table, with I for B."""
    return [
        [(row[n], row[n + 1]._replace(kind="I")) for n in sorted(table.pairs_of(rank))]
        for rank, row in enumerate(table.rows)
    ]


@pytest.mark.parametrize("name", registered())
def test_pairs_stay_where_weight_gradients_move(name: str) -> None:
    table = generate(name, 4, 8, pairs=True)
    for made in (split_backwards(table), weights_at_once(table)):
        validate(made)
        assert _pairs(made) == _pairs(table)


@given(schedules("bitpipe") | schedules("dualpipe"))
def test_rank_and_twin_mirror_each_other(schedule: Schedule) -> None:
    rows, half = literal_rows(schedule), schedule.num_microbatches
    assert len(rows) == schedule.pp
    for row, mirrored in zip(rows, rows[::-1], strict=True):
        swapped = tuple(
            a._replace(microbatch=(a.microbatch + half) % (2 * half)) for a in row
        )
        assert swapped == mirrored
    everything = Counter(action for row in rows for action in row)
    assert set(everything.values()) == {1}
    assert len(everything) == 2 * sum(map(len, schedule.rows))


@pytest.mark.parametrize(("name", "stages"), [("bitpipe", (0, 7)), ("dualpipe", (0,))])
def test_a_direction_goes_straight_through_all_ranks(
    name: str, stages: tuple[int, ...]
) -> None:
    rows = literal_rows(generate(name, 4, 8))
    down = {
        action.stage: rank
        for rank, row in enumerate(rows)
        for action in row
        if action.microbatch == 0
    }
    assert [down[stage] for stage in range(4)] == [0, 1, 2, 3]
    if name == "bitpipe":
        assert [down[stage] for stage in range(4, 8)] == [3, 2, 1, 0]


def test_with_local_routing_each_half_of_the_ranks_keeps_its_microbatches() -> None:
    rows = literal_rows(generate("bitpipe", 4, 4, routing="local"))
    assert {action.microbatch for row in rows[:2] for action in row} == {0, 1}
    assert {action.microbatch for row in rows[2:] for action in row} == {2, 3}
