"""The page of a comparison: what it holds, and that a browser shows it, light and dark."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ext.tools.compare.outcome import Contender, judge
from megatron_ext.tools.compare.page import page
from megatron_ext.tools.compare.recipe import Candidate
from megatron_ext.tools.compare.run_records import read
from megatron_ext.tools.compare.text import HEADER
from megatron_ext.tools.compare.tolerances import Promise
from tests.tools.compare.records import LOSSES, write
from tests.tools.trace import browser

TIMELINE = {
    "rows": [
        {"label": "rank 0", "spans": [["F", 0, 400, "0"], ["wait", 400, 100, "input"]]},
        {"label": "rank 1", "spans": [["B", 500, 500, "0"]]},
    ],
    "length": 1000.0,
}
LOOK = """
const seen = document.body.dataset;
seen.background = getComputedStyle(document.body).backgroundColor;
seen.text = getComputedStyle(document.querySelector("h1")).color;
seen.rows = document.querySelectorAll("#runs tr").length;
const lines = [...document.querySelectorAll("polyline")];
seen.lines = lines.filter((line) => line.getBBox().width > 100).length;
seen.bars = document.querySelectorAll("rect").length;
seen.strokes = new Set(lines.map((line) => getComputedStyle(line).stroke)).size;
seen.wide = document.documentElement.scrollWidth > innerWidth;
"""


def written(folder: Path) -> Path:
    contenders = []
    for label, scale in (("Megatron's own", 1.0), ("<b>zb-v", 1.01)):
        losses = [scale * loss for loss in LOSSES]
        records = [read(write(folder / label.strip("<>"), losses))]
        candidate = Candidate(
            label, () if scale == 1 else ("--pipeline-schedule", "zb-v")
        )
        contender = Contender(
            candidate, Promise(1e-1, 1e-1, "another order"), records=records
        )
        contender.timeline = TIMELINE
        contenders.append(contender)
    path = folder / "compare.html"
    path.write_text(
        page(judge(contenders, speed_only=False), contenders), encoding="utf-8"
    )
    return path


def test_labels_are_text_and_nothing_comes_from_the_network(tmp_path: Path) -> None:
    text = written(tmp_path).read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "&lt;b&gt;zb-v" in text
    assert not re.search(r"@[A-Z]+@|https?://|<script", text)
    assert all(f"<th>{name}</th>" in text for name in HEADER)
    assert text.count("<polyline") == 3 * 2, "losses, gradient norms and steps of both"


def test_a_browser_shows_it_light_and_dark(tmp_path: Path) -> None:
    path = written(tmp_path)
    # The page allows no script; the one that looks at it is one.
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("style-src", "script-src 'unsafe-inline'; style-src"))
    light, dark = browser.look(path, LOOK), browser.look(path, LOOK, dark=True)
    for seen in (light, dark):
        assert seen["rows"] == "3"
        assert int(seen["lines"]) >= 4
        assert seen["bars"] == "4", "waits stay blank"
        assert seen["strokes"] == "2"
        assert seen["wide"] == "false"
    assert light["background"] != dark["background"]
    assert light["text"] != dark["text"]
