"""Layouts: every layer once, in the order of stages, where the placement says."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)

from megatron_ext.config.cut import ends_of_layout
from megatron_ext.config.stages import layout_string
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.folded import PlacedLayout, placed_layout
from megatron_ext.schedules.table import placement as places
from megatron_ext.schedules.table.cuts import parse_layout

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement


_FOLDED = st.builds(
    lambda make, ranks: make(ranks),
    st.sampled_from([places.v, places.w]),
    st.integers(1, 8),
)
_ROUND_ROBIN = st.builds(places.loop, st.integers(1, 8), st.integers(2, 4)) | st.builds(
    places.linear, st.integers(1, 8)
)


@st.composite
def layouts(
    draw: st.DrawFn, placements: st.SearchStrategy[Placement] = _FOLDED | _ROUND_ROBIN
) -> tuple[Placement, list[int], int, str]:
    """A placement, layers by stage (some may have none), MTP layers, and their notation."""
    placement = draw(placements)
    stages = placement.num_stages
    layers = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    mtp = draw(st.integers(0, 2))
    text = "E" + "|".join("t" * count for count in layers) + "m" * mtp + "L"
    return placement, layers, mtp, text


@given(layouts())
def test_chunks_hold_the_stages_of_the_placement(
    drawn: tuple[Placement, list[int], int, str],
) -> None:
    placement, layers, _, text = drawn
    layout = PlacedLayout(text, placement)
    found = {}
    for rank, stages in enumerate(placement.stages_of):
        for chunk, stage in enumerate(stages):
            offset = layout.get_layer_offset(LayerType.decoder, chunk, rank)
            held = layout.layout[rank][chunk]
            assert held.count(LayerType.decoder) == layers[stage]
            found[stage] = list(range(offset, offset + layers[stage]))
            assert (LayerType.embedding in held) == (stage == 0)
            assert (LayerType.loss in held) == (stage == placement.num_stages - 1)
    assert list(chain.from_iterable(found[stage] for stage in sorted(found))) == list(
        range(sum(layers))
    )


@given(layouts(_ROUND_ROBIN))
def test_round_robin_placements_are_upstreams(
    drawn: tuple[Placement, list[int], int, str],
) -> None:
    placement, _, _, text = drawn
    ours, theirs = (
        PlacedLayout(text, placement),
        PipelineParallelLayerLayout(text, placement.num_ranks),
    )
    assert ours.layout == theirs.layout
    assert ours.flatten_layout == theirs.flatten_layout


@given(layouts())
def test_stage_order_and_copies(drawn: tuple[Placement, list[int], int, str]) -> None:
    placement, layers, mtp, text = drawn
    layout = PlacedLayout(text, placement)
    assert layout.flatten_layout == list(chain.from_iterable(layout.stages))
    assert layout.validate_layer_layout(sum(layers), mtp or None) is False
    for copied in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert type(copied) is PlacedLayout
        assert (copied.layout, copied.stages_of) == (layout.layout, placement.stages_of)


def test_offsets_of_the_folds() -> None:
    """Worked by hand: V on 4 ranks with 2 layers each, W on 2 ranks with 1."""

    def offsets(placement: Placement, layers: int) -> list[list[int]]:
        layout = placed_layout(layout_string(layers, placement), placement)
        return [
            [
                layout.get_layer_offset(vp_stage=chunk, pp_rank=rank)
                for chunk in range(len(stages))
            ]
            for rank, stages in enumerate(placement.stages_of)
        ]

    assert offsets(places.v(4), 16) == [[0, 14], [2, 12], [4, 10], [6, 8]]
    assert offsets(places.w(2), 8) == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_own_rank_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    layout = PlacedLayout("Et|t|t|tL", places.v(2))
    assert [layout.get_layer_offset(vp_stage=chunk) for chunk in (0, 1)] == [1, 2]
    with pytest.raises(AssertionError, match="pass vp_stage"):
        layout.get_layer_offset()


def test_a_configuration_takes_it() -> None:
    layout = PlacedLayout("Et|t|t|tmL", places.v(2))
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype="float32",
        pipeline_model_parallel_layout=layout,
    )
    assert config.virtual_pipeline_model_parallel_size == 2
    assert config.mtp_standalone is False
    assert copy.deepcopy(config).pipeline_model_parallel_layout.layout == layout.layout


def _reassigned(value: Any, levels: int) -> Any:
    """Copy an object by assigning to each of its attributes, as Megatron-Bridge exports weights."""
    if levels == 0 or isinstance(value, type) or not hasattr(value, "__dict__"):
        return value
    copied = copy.copy(value)
    for name in vars(copied):
        setattr(copied, name, _reassigned(getattr(copied, name), levels - 1))
    return copied


def test_a_host_may_assign_to_every_attribute() -> None:
    layout = PlacedLayout("Et|t|t|tL", places.v(2))
    copied = _reassigned(layout, 2)
    assert (copied.layout, copied.stages_of) == (layout.layout, layout.stages_of)
    assert pickle.loads(pickle.dumps(copied)).layout == layout.layout


def test_one_object_for_each_layout() -> None:
    assert placed_layout("Et|t|t|tL", places.v(2)) is placed_layout(
        "Et|t|t|tL", places.v(2)
    )


@pytest.mark.parametrize(
    ("layers", "placement", "mtp", "expected"),
    [
        (4, places.v(2), None, "Et|t|t|tL"),
        (8, places.v(2), 1, "Ett|tt|tt|ttmL"),
        (8, places.w(2), None, "Et|t|t|t|t|t|t|tL"),
        (4, places.linear(2), 2, "Ettt|tmmL"),
    ],
)
def test_derived_layout(
    layers: int, placement: Placement, mtp: int | None, expected: str
) -> None:
    assert layout_string(layers, placement, mtp_num_layers=mtp) == expected


def test_a_users_layout_stays() -> None:
    given_layout = "E|(tt|)*2,tL"
    assert layout_string(5, places.v(2), layout=given_layout) == given_layout


def refusal(layers: int, placement: Placement, **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        layout_string(layers, placement, **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("layers", "placement", "options", "expected"),
    [
        (10, places.v(4), {}, "Et|t|tt|tt|t|t|t|tL"),
        (5, places.w(2), {"mtp_num_layers": 1}, "E|t|t|t|t|t||mL"),
        # Two layers of multi-token prediction are worth moving one of the others.
        (8, places.v(2), {"mtp_num_layers": 2}, "Ettt|ttt|tt|mmL"),
        (126, places.v(8), {"first": 1, "last": 1}, "Et*7|(t*8|)*14t*7L"),
        # DeepSeek-V3 on 8 ranks: stages joined two by two.
        (
            61,
            places.v(8),
            {"layout": "Et|(tt|)*30mL", "mtp_num_layers": 1},
            "Et*3|(t*4|)*14t*2mL",
        ),
        (4, places.v(2), {"layout": "Et|tt|tm|L", "mtp_num_layers": 1}, "E|tt|tt|mL"),
    ],
)
def test_cuts_by_what_the_ends_compute(
    layers: int, placement: Placement, options: dict[str, Any], expected: str
) -> None:
    layout = options.get("layout")
    if layout is not None:
        first, last = ends_of_layout(layout)
        options = {**options, "first": first, "last": last}
    cut = layout_string(layers, placement, **options)
    assert parse_layout(cut) == parse_layout(expected)
    assert layout_string(layers, placement, **{**options, "layout": cut}) == cut


@pytest.mark.parametrize(
    ("layout", "mtp", "expected"),
    [
        ("Et|t|t|L", None, "t 4 times (--num-layers)"),
        ("t|Et|t|tL", None, "in this order"),
        ("Et|t|t|tL", 1, "m 1 times (--mtp-num-layers)"),
        ("Et|t|t|xL", None, "contains x, but layers are E, t, m and L"),
    ],
)
def test_layouts_that_do_not_fit(layout: str, mtp: int | None, expected: str) -> None:
    told = refusal(4, places.v(2), mtp_num_layers=mtp, layout=layout)
    assert expected in told
    assert re.search(rf"--pipeline-model-parallel-layout[ =]{re.escape(layout)}", told)


def test_other_placements() -> None:
    told = refusal(4, places.recognised((1, 0, 0, 1), 2))
    assert "stages on ranks (1, 0, 0, 1)" in told
    with pytest.raises(ScheduleError, match="has 3 stages"):
        PlacedLayout("Et|t|tL", places.v(2))
