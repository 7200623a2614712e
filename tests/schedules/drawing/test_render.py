"""Pictures: the grids in the docstrings are the goldens; wrapping, labels and SVG."""

from __future__ import annotations

import importlib
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings

from megatron_ext.schedules import Costs, Schedule, generate, registered, simulate
from megatron_ext.schedules.drawing import render, svg
from megatron_ext.schedules.drawing.palette import KINDS
from tests.schedules.strategies import COSTS, schedules

VARIANTS = [
    (name, dict(variant))
    for name, generator in registered().items()
    for variant in generator.variants
    if variant.get("chunks", 2) == 2
]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_picture_in_the_docstring_is_the_table(
    name: str, variant: dict[str, str]
) -> None:
    text = importlib.import_module(registered()[name].build.__module__).__doc__ or ""
    num_microbatches = (
        8 if name.startswith("dualpipe") else 4
    )  # below 2 pp, a part of that table
    timeline = simulate(generate(name, 4, num_microbatches, **variant))
    assert f"\n{render.caption(timeline)}\n{render.grid(timeline)}\n" in text
    assert "Bubble:" in text
    assert "Activations:" in text


def test_the_whole_picture() -> None:
    timeline = simulate(generate("zb-v", 2, 2))
    assert render.picture(timeline).splitlines() == [
        "zb-v chunks=2: pp 2, m 2, makespan 6.5, bubble 0.5 (7.7 %), peak 2",
        "0|F0 F1 .  f0 i0 f1 i1 I0 W0 I1 W1 w0 w1",
        "1|.  F0 f0 F1 f1 i0 I0 i1 I1 W0 W1 w0 w1",
        "F forward, I input gradient, W weight gradient, lower case: second chunk, one column: 0.5",
    ]


def test_more_than_two_chunks_name_the_stage() -> None:
    grid = render.grid(simulate(generate("interleaved", 2, 2, chunks=3)))
    assert grid.splitlines()[0].startswith("0|0F0 0F1 2F0 2F1 4F0 4F1")


@settings(max_examples=50)
@given(schedules(largest=8), COSTS)
def test_grids_of_any_cost_show_every_action_once(
    schedule: Schedule, costs: Costs
) -> None:
    timeline = simulate(schedule, costs)
    words = render.grid(timeline, width=10**6).replace("|", "| ").split()
    labels = [
        word.rstrip("-") for word in words if word != "." and not word.endswith("|")
    ]
    assert len(labels) == schedule.placement.twins * sum(map(len, schedule.rows))


def test_wide_grids_go_on_below() -> None:
    timeline = simulate(generate("1f1b", 4, 8))
    blocks = render.grid(timeline, width=40).split("\n\n")
    assert len(blocks) == 3
    assert all(len(line) <= 40 for block in blocks for line in block.splitlines())
    whole = render.grid(timeline, width=10**6).splitlines()
    lines = [block.splitlines() for block in blocks]
    for rank, row in enumerate(whole):
        pieces = [block[rank][2:].ljust(36) for block in lines]
        assert "".join(pieces).rstrip() == row[2:]


@settings(max_examples=25)
@given(schedules(largest=8), COSTS)
def test_svg_has_a_box_for_every_action(schedule: Schedule, costs: Costs) -> None:
    root = ET.fromstring(svg.draw(simulate(schedule, costs)))
    boxes = [
        e
        for e in root.iter()
        if e.get("class", "")[:1] in "FBIW" and e.get("height") == "20"
    ]
    boxes = [e for e in boxes if e.get("class")]
    assert len(boxes) == schedule.placement.twins * sum(map(len, schedule.rows))
    right = max(float(e.get("x", 0)) + float(e.get("width", 0)) for e in boxes)
    assert right <= float(root.get("width", 0))


@settings(max_examples=25)
@given(schedules(largest=8), COSTS)
def test_svg_shows_every_number_within_its_box(
    schedule: Schedule, costs: Costs
) -> None:
    root = ET.fromstring(svg.draw(simulate(schedule, costs)))
    elements = list(root.iter())
    bars = [
        (box, text)
        for box, text in pairwise(elements)
        if box.get("class", "")[:1] in KINDS and text.get("class", "").startswith("n ")
    ]
    assert len(bars) == schedule.placement.twins * sum(map(len, schedule.rows))
    for box, text in bars:
        assert 5.5 * len(text.text or "") < float(box.get("width", 0))


def test_svg_grows_with_the_table_and_has_an_axis_of_time() -> None:
    root = ET.fromstring(svg.draw(simulate(generate("bitpipe", 8, 16))))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert float(root.get("width", 0)) > 1300
    assert [f"rank {rank}" for rank in range(8)] == [
        w for w in words if w and w.startswith("rank")
    ]
    assert "time: 1 = forward of one micro-batch on 1/pp of the model" in words
    ticks = [e.text for e in root.iter() if e.get("class") == "tick quiet"]
    assert ticks == [str(time) for time in range(0, 50, 2)]
    assert {"forward", "input gradient", "idle", "framed: second direction"} <= set(
        words
    )


def test_svg_has_colours_for_dark_pages() -> None:
    assert "prefers-color-scheme: dark" in svg.draw(simulate(generate("bitpipe", 4, 4)))


def test_a_terminal_gets_the_same_colours() -> None:
    timeline = simulate(generate("zb-v", 2, 2))
    plain, painted = render.picture(timeline), render.picture(timeline, coloured=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
    for colour in (KINDS["F"][0], KINDS["W"][1]):
        assert ";".join(map(str, bytes.fromhex(colour[1:]))) in painted
