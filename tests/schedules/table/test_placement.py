"""The rank of each stage."""

from __future__ import annotations

from megatron_ext.schedules.table import placement


def test_the_four_placements() -> None:
    assert placement.linear(3).rank_of == (0, 1, 2)
    assert placement.loop(3, 2).rank_of == (0, 1, 2, 0, 1, 2)
    assert placement.v(3).rank_of == (0, 1, 2, 2, 1, 0)
    assert placement.w(2).rank_of == (0, 1, 1, 0, 0, 1, 1, 0)


def test_stages_chunks_and_hops() -> None:
    v = placement.v(2)
    assert v.stages_of == ((0, 3), (1, 2))
    assert [v.chunk_of(stage) for stage in range(4)] == [0, 0, 1, 1]
    assert v.hops == ("rank", "local", "rank")
    assert placement.loop(2, 2).hops == ("rank", "rank", "rank")


def test_twins_exchange_at_the_inner_folds_only() -> None:
    twin = placement.mirrored(placement.w(2), "twin")
    assert twin.hops == ("rank", "twin", "rank", "local", "rank", "twin", "rank")
    local = placement.mirrored(placement.w(2), "local")
    assert local.hops == placement.w(2).hops
    assert twin.twins == local.twins == 2


def test_placements_are_recognised() -> None:
    for known in (
        placement.linear(4),
        placement.loop(4, 3),
        placement.v(4),
        placement.w(4),
    ):
        assert placement.recognised(known.rank_of, 4) == known
    assert placement.recognised((1, 0), 2).name == "custom"
    assert placement.recognised((0, 1, 1), 2).name == "custom"
