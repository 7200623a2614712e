"""The page about a run: it needs no network, shows what it should, and works in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.tools.trace import forecast, report
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tools.trace.survey import Step
from megatron_ext.tracing.records import SCHEDULE_FILE
from tests.commands import run_package
from tests.tools.trace import browser
from tests.tools.trace.runs import COSTS, trace_of, write_run

DATA = re.compile(
    r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL
)
LOOK = """
const seen = document.body.dataset, canvas = document.getElementById("timeline");
const painted = () => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) colours.add(pixels.slice(i, i + 4).join());
  return colours.size;
};
seen.background = getComputedStyle(document.body).backgroundColor;
seen.ranks = document.querySelectorAll("#ranks tbody tr").length;
seen.links = document.querySelectorAll("#links tbody tr").length;
for (const id of ["links", "causes", "ranks", "forecast"]) {
  const cells = document.querySelector(`#${id} tbody tr`).cells;
  seen[`${id}first`] = [...cells].map((cell) => cell.textContent).join("|");
}
seen.cards = [...document.querySelectorAll(".card b")].map((card) => card.textContent).join("|");
seen.title = document.title;
seen.verdict = document.querySelector("#verdict dd").textContent;
seen.flags = document.querySelector("#verdict code").textContent;
/* The page draws in its next frame; here at once, whatever the load of the machine. */
draw();
seen.colours = painted();
const width = () => { draw(); return Number(canvas.dataset.to) - Number(canvas.dataset.from); };
const before = width();
document.getElementById("in").click();
seen.zoomed = before / width();
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, clientX: box.left + 600,
                                               clientY: box.top + 40, cancelable: true }));
seen.wheeled = before / width();
document.getElementById("all").click();
document.getElementById("theme").click();
seen.switched = getComputedStyle(document.body).backgroundColor;
const choice = document.getElementById("choice");
seen.choices = [...choice.options].map((option) => option.textContent).join("; ");
choice.value = choice.options.length - 1;
choice.dispatchEvent(new Event("change"));
seen.planned = width();
"""


def content(page: str) -> dict:
    [text] = DATA.findall(page)
    return json.loads(text)


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_and_zooms(tmp_path: Path, dark: bool) -> None:
    run = write_run(tmp_path, schedule="1f1b")
    done = run_package("report", "--trace-dir", str(run))
    assert done.returncode == 0, done.stderr
    seen = browser.look(run / "report.html", LOOK, dark=dark)
    light, black = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    assert (seen["background"], seen["switched"]) == (
        (black, light) if dark else (light, black)
    )
    assert seen["title"] == "1f1b on 4 ranks, 8 micro-batches per step"
    assert seen["verdict"].startswith("A rank spends 66 % in actions, 29 % waiting")
    assert "--enable-bitpipe-schedule" in seen["flags"]
    assert (seen["ranks"], seen["links"]) == ("4", "6")
    assert seen["linksfirst"] == "rank 1|rank 0|8|0.01|106.00|1.000|1.0|torch"
    assert seen["causesfirst"] == "input of rank 1|134.0|9.7 %"
    assert seen["ranksfirst"] == "rank 0 (pp 0)||240.0|106.0|30.6 %|19.0|4|0.00|12.5 %"
    assert seen["forecastfirst"].startswith(
        "bitpipe order=paper with hint|266.0|2.8 %||--pipeline"
    )
    assert seen["cards"] == "365.0 ms|346.0 ms|30.6 %|346.0 ms|30.6 %|12.5 %|0.00 GiB|4"
    assert int(seen["colours"]) > 5
    assert float(seen["zoomed"]) == pytest.approx(2)
    assert float(seen["wheeled"]) == pytest.approx(2.5)
    choices = r"median step \(\d\); slowest step \(\d\); planned: 1f1b"
    assert re.fullmatch(choices, seen["choices"])
    planned_us = 1e6 * simulate(generate("1f1b", 4, 8), COSTS).makespan
    assert float(seen["planned"]) == pytest.approx(planned_us, rel=0.05)


def test_the_page_needs_nothing_else_and_runs_nothing_of_the_traces(
    tmp_path: Path,
) -> None:
    evil = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>"
    run = write_run(
        tmp_path, settings={"schedule": evil, evil: evil, "transport": evil}
    )
    page = report.page(read_run(run))
    assert evil not in page
    assert page.count("<script") == 2
    assert not re.search(r"""(src|href)\s*=|url\(|https?:""", DATA.sub("", page))
    assert [evil, evil] in content(page)["settings"]


def test_what_is_shown_is_what_was_traced(tmp_path: Path) -> None:
    shown = content(report.page(read_run(write_run(tmp_path))))
    assert [rank["label"] for rank in shown["ranks"]] == [
        f"rank {r} (pp {r})" for r in range(4)
    ]
    assert [rank["peak_live"] for rank in shown["ranks"]] == [4, 3, 2, 1]
    assert shown["total"]["idle_ns"].keys() >= {f"input of rank {r}" for r in range(4)}
    assert len(shown["links"]) == 6
    assert all(link["wire"] == "torch" for link in shown["links"])
    measured, _, planned = shown["timelines"]
    assert planned["title"] == "planned: 1f1b"
    forwards = [
        [bar for bar in row["spans"] if bar[0] == "F"] for row in measured["rows"]
    ]
    assert [len(row) for row in forwards] == [8] * 4
    assert forwards[3][0][1] == pytest.approx(33_000, rel=1e-3)


def test_bars_name_slices_and_the_tokens_of_their_micro_batch(tmp_path: Path) -> None:
    sizes = ((0.25,), (0.5, 0.5))
    run = write_run(
        tmp_path,
        pp=2,
        microbatches=2,
        slice_sizes=sizes,
        sizes=((2, 4), (8, 64)),
        settings={"slice_tokens": 4},
    )
    measured, *_ = content(report.page(read_run(run)))["timelines"]
    for row in measured["rows"]:
        forwards = [bar[3:] for bar in row["spans"] if bar[0] == "F"]
        assert forwards == [
            ["0", "micro-batch of 2 tokens"],
            ["1", "slice 1 of 2, micro-batch of 8 tokens"],
            ["1.1", "slice 2 of 2, micro-batch of 8 tokens"],
        ]


def test_the_page_begins_with_a_verdict(tmp_path: Path) -> None:
    settings = {"device": "cpu", "cpus": "0,1"}
    costs = Costs(stages=((0.01,) * 3, (0.01,) * 3, (0.015,) * 3, (0.01,) * 3))
    run = read_run(write_run(tmp_path, costs=costs, settings=settings))
    shown = content(report.page(run))
    verdict = dict(shown["verdict"])
    assert list(verdict) == [
        "Where the time goes", "What to run", "What to treat with caution", "What is slow",
    ]  # fmt: skip
    found = forecast.predict(run)
    best, modest = found.recommended
    assert verdict["What to run"] == found.advice
    assert (best.weight_copies, modest.weight_copies) == (2, 1)
    assert best.bounds_memory
    assert modest.bounds_memory
    assert shown["flags"] == [best.flags, modest.flags]
    words = (
        re.sub(r"\(.*?\)", "", found.advice).replace(", else", "").strip(" .").split()
    )
    assert "=" not in found.advice, "flags, which pages explain, and no options of ours"
    assert {word for word in words if word.startswith("--")} <= set(
        best.flags.split()
    ) | set(modest.flags.split())
    schedules = [row["schedule"].partition(" ")[0] for row in shown["forecast"]]
    assert set(schedules) == set(registered()), "each schedule, however many are faster"
    [own] = [p for p in found.predictions if p.schedule == "1f1b"]
    assert f"{own.step_s / best.step_s:.2f} x as fast" in verdict["What to run"]
    assert verdict["What to treat with caution"].startswith(
        "4 ranks shared 2 CPUs, so waits are longer"
    )
    assert verdict["What is slow"] == "rank 2 (1.5 x the median)."
    assert shown["forecast"][-1]["schedule"] == shown["traced"] == "1f1b"


def test_followers_wait_for_other_ranks_too() -> None:
    step = Step(
        busy_ns=60, idle_ns={"leader of rank 0": 20, "credit of rank 1": 10, "send": 10}
    )
    [(_, answer)] = report._verdict(step, forecast.Forecast([], 0.0, "", []), [])
    assert answer == (
        "A rank spends 60 % in actions, 30 % waiting for other ranks, 10 % in other "
        "gaps."
    )


def test_the_best_schedule_is_kept(tmp_path: Path) -> None:
    found = forecast.predict(
        read_run(write_run(tmp_path, schedule="zb-h1", pp=2, microbatches=2))
    )
    rest = [p for p in found.predictions if p.schedule == found.measured]
    kept = replace(found, predictions=rest)
    assert kept.advice == "zb-h1 as traced, because no other is predicted to be faster."


def test_links_are_about_steps_whose_number_is_given(tmp_path: Path) -> None:
    for iterations in (3, 6):
        run = write_run(tmp_path / str(iterations), iterations=iterations)
        links = content(report.page(read_run(run)))["links"]
        assert [link["messages"] / link["steps"] for link in links] == [8] * 6


def test_every_link_has_the_wire_that_carried_its_messages(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, wire_of=lambda a, b: "shm" if a // 2 == b // 2 else "tcp")
    links = content(report.page(read_run(run)))["links"]
    assert {(link["source"], link["target"]): link["wire"] for link in links} == {
        (0, 1): "shm", (1, 0): "shm", (1, 2): "tcp", (2, 1): "tcp", (2, 3): "shm", (3, 2): "shm",
    }  # fmt: skip


def test_the_page_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MAX_SPANS", 60)
    run = write_run(tmp_path, microbatches=40)
    rows = content(report.page(read_run(run)))["timelines"][0]["rows"]
    assert sum(len(row["spans"]) for row in rows) < 400
    steps = [step for each in read_run(run).surveys for step in each.file.iterations(2)]
    assert sum(len(step.spans) for step in steps) > 800


def test_steps_stand_below_each_other_in_the_heat_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has recorded nothing, and the second one has stopped in the middle."""
    monkeypatch.setattr(report, "_MAX_COLUMNS", 4)
    monkeypatch.setattr(report, "_MAX_ROWS", 3)
    folder = write_run(tmp_path, microbatches=4, iterations=12)
    for rank, kept in ((0, 1), (1, 5)):
        lines = trace_of(folder, rank).read_text().split("\n")
        trace_of(folder, rank).write_text("\n".join(lines[:kept]))
    shown = content(report.page(read_run(folder)))
    assert [len(row) for row in shown["heat"]] == [0, 2, 4], "columns of three steps"
    assert len(shown["ranks"]) == len(shown["heat"])
    assert shown["steps"] == [*range(1, 13)]


def test_a_step_that_ran_twice_has_each_rank_once(tmp_path: Path) -> None:
    titles = {}
    for iterations in (3, 6):
        folder = write_run(tmp_path / str(iterations), iterations=iterations)
        for rank in range(4):
            text = trace_of(folder, rank).read_text()
            trace_of(folder, rank).write_text(
                text.replace('"iteration":3,', '"iteration":2,')
            )
        *measured, _ = content(report.page(read_run(folder)))["timelines"]
        assert [len(timeline["rows"]) for timeline in measured] == [4] * len(measured)
        titles[iterations] = [timeline["title"] for timeline in measured]
    assert titles == {
        3: ["median step (2)"],
        6: ["median step (4)", "slowest step (6)"],
    }


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[" * 10_000, '{"schedule": 3}', '{"placement": {"num_ranks": 1e30}}'],
)
def test_a_damaged_table_is_told_and_left_out(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path)
    (run / SCHEDULE_FILE).write_text(text)
    shown = content(report.page(read_run(run)))
    assert len(shown["timelines"]) == 2
    assert any(
        "no planned step" in note and "is damaged" in note for note in shown["notes"]
    )
