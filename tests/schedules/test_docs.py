"""docs/schedules.md and docs/adding-a-schedule.md show what the code does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.schedules import UNIT, Costs, generate, registered, simulate
from megatron_ext.schedules.comparison import compare
from megatron_ext.schedules.drawing import svg
from megatron_ext.schedules.table import table_files
from megatron_ext.tools.schedule_commands import comparison_table

ROOT = Path(__file__).parents[2]
SCHEDULES = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
LENGTHS = (ROOT / "docs" / "lengths.md").read_text(encoding="utf-8")
ADDING = (ROOT / "docs" / "adding-a-schedule.md").read_text(encoding="utf-8")
IMAGES = ROOT / "docs" / "images" / "schedules"
PLOTS = [
    command
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for command in re.findall(
        r"<sub>`(megatron-ext plot .* -o \S+)`", page.read_text("utf-8")
    )
]
"""The commands below pictures, which write them."""

PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registered()},
    "bitpipe-paper": ("bitpipe", {"order": "paper"}),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_current(picture: str) -> None:
    name, options = PICTURES[picture]
    flags = "".join(f" --{name}-{key} {value}" for key, value in options.items())
    path = IMAGES / f"{picture}.svg"
    command = f"megatron-ext plot {name} --pp 4 --microbatches 8{flags} -o {path.relative_to(ROOT)}"
    drawn = svg.draw(simulate(generate(name, 4, 8, **options)))
    assert path.read_text(encoding="utf-8") == drawn, f"run `{command}`"
    assert f"](images/schedules/{path.name})" in SCHEDULES


@pytest.mark.parametrize("command", PLOTS)
def test_a_picture_is_what_the_command_below_it_draws(
    command: str, tmp_path: Path
) -> None:
    *words, path = shlex.split(command)[1:]
    assert cli.main([*words, str(tmp_path / "picture.svg")]) == 0
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert (ROOT / path).read_text(encoding="utf-8") == drawn, f"run `{command}`"


def test_there_are_no_other_pictures() -> None:
    assert {path.stem for path in IMAGES.iterdir()} == set(PICTURES)


def test_the_comparison_is_current() -> None:
    pattern = r"<!-- plan: begin -->\n```text\n(.*)\n```\n<!-- plan: end -->"
    [written] = re.findall(pattern, SCHEDULES, re.DOTALL)
    timelines, _ = compare("all", 8, 16, UNIT)
    assert written == comparison_table(timelines), (
        "copy what `megatron-ext plan` prints"
    )


def test_each_schedule_has_its_formulas() -> None:
    rows = re.findall(r"^\| ([\w-]+)(?:, \w+)? \|", SCHEDULES, re.MULTILINE)
    assert set(rows) - {"schedule"} == set(registered())


def test_the_figures_of_pairs_are_what_plan_prints() -> None:
    timelines, _ = compare("all", 8, 32, Costs(all_to_all=0.4), pairs=True)
    fastest = [timeline.makespan for timeline in timelines[:3]]
    assert {f"{min(fastest):g}", f"{max(fastest):g}"} <= _figures_beside("are fastest")
    peaks = {
        timeline.schedule.name: timeline.peak_activations for timeline in timelines
    }
    alone, _ = compare("all", 8, 16, UNIT)
    peaks_alone = {
        timeline.schedule.name: timeline.peak_activations for timeline in alone
    }
    for name in ("1f1b", "zb-h1", "v-half"):
        figures = {f"{peaks[name]:g}", f"{peaks_alone[name]:g}"}
        assert figures <= _figures_beside("instead of 8")
    drawn = svg.draw(
        simulate(generate("dualpipe-v", 4, 8, pairs=True), Costs(all_to_all=0.4))
    )
    assert (IMAGES.parent / "pairs.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_the_figures_of_slices_are_what_plan_prints(name: str) -> None:
    [whole], _ = compare(name, 8, 16, UNIT)
    [sliced], _ = compare(name, 8, 16, UNIT, slices=8)
    figures = [
        whole.bubble,
        sliced.bubble,
        whole.peak_activations,
        sliced.peak_activations,
        sliced.keys_and_values,
    ]
    row = " | ".join([name, *(f"{float(figure):g}" for figure in figures)])
    assert f"\n| {row} |\n" in LENGTHS


def test_the_page_about_slices_shows_current_simulations() -> None:
    drawn = svg.draw(
        *(simulate(generate("zb-h1", 4, 4, slices=count)) for count in (1, 4))
    )
    assert (IMAGES.parent / "slices.svg").read_text(encoding="utf-8") == drawn
    costs = Costs(attention=0.3)
    bubble = simulate(generate("zb-h1", 8, 16, costs=costs, slices=8), costs).bubble
    assert f"the zb-h1 bubble is {bubble:.1f} instead of 0.9" in " ".join(
        LENGTHS.split()
    )


def _figures_beside(words: str) -> set[str]:
    """Return the numbers in the paragraph of the page that has these words."""
    [paragraph] = [
        text for text in SCHEDULES.split("\n\n") if words in " ".join(text.split())
    ]
    return set(re.findall(r"\d+(?:\.\d+)?", paragraph))


def test_figures_at_equal_memory_for_weights() -> None:
    sizes = [("zb-v", None), ("interleaved", 4), ("interleaved", 2)]
    # A share of 1/4 of the model takes twice the time of one of 1/8.
    bubbles = [
        2 * simulate(generate(name, 4, 8, chunks)).bubble for name, chunks in sizes
    ]
    assert bubbles == [3, 4.5, 9]
    assert {"3", "4.5", "9"} <= _figures_beside("equal memory for weights")


def test_figures_of_tables_made_for_other_costs() -> None:
    slow_links = Costs(latency=0.1)
    for made_for, makespan in ((UNIT, 57), (slow_links, 51.7)):
        schedule = generate("bitpipe", 8, 16, costs=made_for)
        assert simulate(schedule, slow_links).makespan == pytest.approx(makespan)
    assert {"57", "51.7"} <= _figures_beside("links with latency 0.1")


def test_the_error_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text(
        table_files.csv_text(generate("1f1b", 4, 6)).replace("2F3,", "")
    )
    assert cli.main(["plan", "--schedule", "csv:table.csv"]) == 2
    assert f"```text\n{capsys.readouterr().err}```" in SCHEDULES


CHECK = """
from megatron_ext.schedules import Costs, generate, simulate, validate
from megatron_ext.schedules.drawing import render

for pp in (1, 2, 4, 5):
    for count in (1, 3, 4, 8):
        schedule = generate("zb-late", pp, count)
        assert max(validate(schedule).memory.activations) <= count
        costs = Costs(1, 2, 0.5)
        assert simulate(schedule, costs).bubble == (pp - 1) * (1 + 2)
print(render.picture(simulate(generate("zb-late", 4, 4))))
"""


def test_the_example_of_a_new_schedule_works() -> None:
    [code] = re.findall(r"```python\n(.*?)```", ADDING, re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace("from __future__ import annotations\n", "") + CHECK,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"```text\n{done.stdout}```" in ADDING
