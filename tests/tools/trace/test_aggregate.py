"""One Chrome trace of all ranks, figures of the run, and what is slow."""

from __future__ import annotations

import json
import shutil
import statistics
from bisect import bisect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.tools.trace.aggregate import (
    Run,
    aggregated_name,
    read_run,
    slow,
    write_chrome_trace,
)
from megatron_ext.tools.trace.clocks import align, use_one_clock
from megatron_ext.tools.trace.measured_costs import planned
from megatron_ext.tools.trace.reader import TraceFile
from megatron_ext.tools.trace.survey import RankSurvey, Step, figures
from megatron_ext.tracing.records import Header
from tests.commands import run_package
from tests.tools.trace.runs import COSTS, MS, arrows, trace_of, write_run


def chrome(directory: Path) -> list[dict]:
    output = aggregated_name(directory)
    size = write_chrome_trace(read_run(directory), output)
    assert size == output.stat().st_size
    assert sorted(p.name for p in directory.iterdir() if p.name.startswith(".")) == []
    return json.loads(output.read_text())


def test_every_rank_has_a_row_and_every_message_an_arrow(tmp_path: Path) -> None:
    events = chrome(write_run(tmp_path))
    bars = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in bars} == {(rank, 0) for rank in range(4)}
    forwards = [e for e in bars if e["name"].startswith("forward")]
    assert len(forwards) == 3 * 4 * 8
    assert sum(e["dur"] for e in forwards) == pytest.approx(3 * 4 * 8 * 10_000)
    starts, ends = arrows(events)
    assert starts.keys() == ends.keys()
    assert len(starts) == 3 * 2 * 3 * 8
    assert all(ends[key] > start for key, start in starts.items())
    assert all(key < 2**53 for key in starts), "viewers read whole numbers"


def test_the_figures_are_those_of_the_simulated_step(tmp_path: Path) -> None:
    timeline = simulate(generate("1f1b", 4, 8), COSTS)
    run = read_run(write_run(tmp_path, costs=COSTS))
    first = figures(run.surveys[:1])
    assert first.pipeline_ns == pytest.approx(1e9 * timeline.makespan)
    assert first.busy_ns == pytest.approx(1e9 * timeline.ideal)
    waited = sum(first.idle_ns.values())
    assert waited == pytest.approx(1e9 * timeline.bubble, rel=1e-6)
    assert {cause for cause, time_ns in first.idle_ns.items() if time_ns} == {
        "input of rank 1"
    }
    assert first.peak_live == 4
    assert (first.out_of_order, first.actions) == (2 * 2, 2 * 16)
    assert figures(run.surveys[3:]).peak_live == 1


def test_slices_by_length_count_as_parts_of_the_longest_micro_batch(
    tmp_path: Path,
) -> None:
    sizes = ((0.25,), (0.25,) * 4, (0.125, 0.125))
    table = generate("1f1b", 4, 3, slice_sizes=sizes)
    run = read_run(write_run(tmp_path, microbatches=3, slice_sizes=sizes))
    for rank, expected in enumerate(activation_peaks(table)):
        assert figures([run.surveys[rank]]).peak_live == expected <= 1.5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-v"])
def test_the_bubble_is_that_of_the_table(tmp_path: Path, schedule: str) -> None:
    """Ranks also idle before their first action, and behind their last one until all have ended."""
    run = read_run(write_run(tmp_path, schedule=schedule))
    timeline = planned(run, run.schedule)
    assert figures(run.surveys).bubble_ratio == pytest.approx(
        timeline.bubble_ratio, rel=1e-3
    )
    for survey in run.surveys:
        mine = figures([survey])
        assert mine.pipeline_ns == pytest.approx(1e9 * timeline.makespan, rel=1e-3)
        assert mine.pipeline_ns + mine.after_ns == pytest.approx(mine.duration_ns)
        assert sum(mine.idle_ns.values()) + mine.busy_ns == pytest.approx(
            mine.pipeline_ns
        )


def test_a_pair_is_busy_once_and_no_measure_of_its_halves(tmp_path: Path) -> None:
    schedule = generate("1f1b", 4, 8, pairs=True)
    timeline = simulate(schedule, COSTS)
    [first, *_] = read_run(write_run(tmp_path, costs=COSTS, pairs=True)).surveys
    begins = schedule.begins(0)
    busy = sum(timeline.ends[0][at] - timeline.starts[0][at] for at in begins)
    assert figures([first]).busy_ns == pytest.approx(1e9 * busy)
    alone = schedule.num_microbatches - len(schedule.pairs[0])
    assert alone > 0
    forward = first.actions["forward", 0, 0]
    assert (statistics.median(forward), len(forward)) == (10 * MS, 2 * alone)


@pytest.mark.parametrize("offset_ns", [250 * MS, -7 * MS])
def test_clocks_of_hosts_are_aligned_by_their_messages(
    tmp_path: Path, offset_ns: int
) -> None:
    straight = chrome(write_run(tmp_path / "one"))
    skewed = write_run(
        tmp_path / "two",
        clock_of=lambda rank: f"boot {rank // 2}",
        clock_offset_ns=lambda rank: offset_ns * (rank // 2),
    )
    run = read_run(skewed)
    [note] = [note for note in run.notes if note.startswith("clock boot 1: ")]
    error_ns = 1e3 * float(note.split()[-4])
    assert abs(run.surveys[2].file.shift_ns + offset_ns) <= error_ns <= 2 * MS
    for before, after in zip(straight, chrome(skewed), strict=True):
        assert after.get("ts", 0) == pytest.approx(before.get("ts", 0), abs=2000)


def test_clocks_that_exchange_nothing_are_aligned_by_the_time_of_day(
    tmp_path: Path,
) -> None:
    run = write_run(
        tmp_path,
        clock_of=lambda rank: f"boot {rank // 2}",
        clock_offset_ns=lambda rank: 90 * MS * (rank // 2),
    )
    for rank in range(4):
        text = trace_of(run, rank).read_text()
        trace_of(run, rank).write_text(text.replace('"receive"', '"other"'))
    found = read_run(run)
    assert found.surveys[2].file.shift_ns == -90 * MS
    assert "clock boot 1: -90.000 ms, by the time of day" in found.notes


def test_clocks_apart_from_the_first_are_aligned_by_their_own_messages() -> None:
    """Two pipelines on hosts of their own; the time of day of the last host is 5 ms off."""
    headers = {
        rank: Header(rank, rank % 2, rank // 2, 0, (2, 2, 1), 4, clock=f"{rank}")
        for rank in range(4)
    }
    headers[3] = replace(headers[3], wall_ns=5 * MS)
    took = dict.fromkeys([(0, 2), (2, 0), (1, 3), (3, 1)], MS // 10)
    assert align(headers, took) == {
        "0": (0, 0), "1": (0, None), "2": (0, MS // 10), "3": (0, None),
    }  # fmt: skip


def test_missing_ranks_other_lengths_and_a_trailing_slash(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    trace_of(directory, 1).unlink()
    text = trace_of(directory, 2).read_bytes()
    trace_of(directory, 2).write_bytes(text[: len(text) // 2])
    done = run_package(
        "aggregate", "--benchmark_dir", f"{directory}/"
    )  # the other name
    assert done.returncode == 0, done.stderr
    assert "1 of 4 ranks have no trace" in done.stderr
    assert "ranks recorded between" in done.stderr
    events = json.loads((directory / f"{directory.name}-aggregated.json").read_text())
    assert {e["pid"] for e in events if "pid" in e} == {0, 2, 3}


def test_files_that_an_earlier_run_left_in_the_folder_do_not_count(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "earlier", pp=4)
    later = write_run(tmp_path / "later", pp=2)
    for rank in range(2):
        text = trace_of(later, rank).read_text().replace('"wall_ns":1', '"wall_ns":2')
        trace_of(folder, rank).write_text(text)
    run = read_run(folder)
    assert [survey.header.sizes for survey in run.surveys] == [[1, 2, 1]] * 2
    [note] = [note for note in run.notes if "rank" in note or "file" in note]
    assert note.startswith("2 files are left out: ")


@pytest.mark.parametrize(
    ("earlier", "later", "ranks"),
    [("job/0", "job/1", [0, 1]), ("job", "job-r1", [0, 1]), ("", "job/0", [0, 1, 2])],
)
def test_files_of_an_earlier_attempt_do_not_count(
    tmp_path: Path, earlier: str, later: str, ranks: list[int]
) -> None:
    """The sizes are equal, and a rank of the later one left no file."""
    folder = write_run(tmp_path / "earlier", pp=3, run=earlier)
    again = write_run(tmp_path / "later", pp=3, run=later)
    for rank in range(2):
        text = trace_of(again, rank).read_text().replace('"wall_ns":1', '"wall_ns":2')
        trace_of(folder, rank).write_text(text)
    run = read_run(folder)
    assert [survey.header.rank for survey in run.surveys] == ranks
    left_out = "1 files are left out: copies, or files from an earlier run or attempt"
    assert (left_out in run.notes) == (len(ranks) == 2)


def test_only_lines_that_were_surveyed_and_are_whole_are_merged(tmp_path: Path) -> None:
    """A file may grow meanwhile, and its last line may be half of one."""
    folder = write_run(tmp_path, pp=2, microbatches=2)
    path = trace_of(folder, 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:-9], lines[3]]))
    run = read_run(folder)
    with path.open("a") as file:
        file.write(f"\n{lines[3]}\n{lines[3][:50]}")
    size = write_chrome_trace(run, tmp_path / "merged.json")
    assert (tmp_path / "merged.json").stat().st_size == size
    events = json.loads((tmp_path / "merged.json").read_text())
    numbers = [
        (e["pid"], e["args"]["iteration"])
        for e in events
        if e.get("cat") == "iteration"
    ]
    assert numbers == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]


def test_replicas_whose_clocks_differ_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    """Nothing but the time of day relates them, which may be wrong by more than a step."""
    step = Step(
        1,
        0,
        duration_ns=100 * MS,
        first_ns=10 * MS,
        pipeline_ns=60 * MS,
        after_ns=40 * MS,
        actions=2,
    )
    surveys = []
    for data, wall_ns in ((0, 1), (1, 1000 * MS)):
        header = Header(
            data, data, 0, 0, (2, 1, 1), 2, clock=f"{data}", wall_ns=wall_ns
        )
        surveys.append(RankSurvey(TraceFile(tmp_path, header), steps=[step]))
    assert "by the time of day" in use_one_clock(surveys)[1]
    for survey in surveys:
        assert survey.steps == [step._replace(begin_ns=survey.file.shift_ns)]


def test_clocks_that_have_drifted_are_not_called_exact() -> None:
    headers = {
        rank: Header(rank, 0, rank, 0, (1, 2, 1), 2, clock=f"{rank}") for rank in (0, 1)
    }
    shifts = align(headers, {(0, 1): 10 * MS, (1, 0): -30 * MS})
    assert shifts["1"] == (-20 * MS, 10 * MS)


def test_steps_that_failed_do_not_count(tmp_path: Path) -> None:
    """They may have lasted as long as a time-out."""
    folder = write_run(tmp_path)
    text = trace_of(folder, 1).read_text()
    before, _, last = text.rpartition('"microbatches":8')
    trace_of(folder, 1).write_text(f'{before}"failed":true,"microbatches":8{last}')
    run = read_run(folder)
    assert [[s.number for s in each.complete_steps] for each in run.surveys[:2]] == [
        [2, 3],
        [2],
    ]
    assert [each.num_sampled for each in run.surveys[:2]] == [2, 1]
    assert "steps that failed or were discarded do not count: 3" in run.notes


def test_a_step_that_was_discarded_and_run_again_is_that_of_its_second_run(
    tmp_path: Path,
) -> None:
    """Megatron's rerun state machine runs a step again under its number."""
    straight = read_run(write_run(tmp_path / "straight", iterations=3))
    folder = write_run(tmp_path / "again", iterations=4)
    for rank in range(4):
        lines = trace_of(folder, rank).read_text().split("\n")
        lines[2] = lines[2].replace(
            '"microbatches":8', '"failed":true,"microbatches":8'
        )
        lines[3] = lines[3].replace('"iteration":3,', '"iteration":2,')
        trace_of(folder, rank).write_text("\n".join(lines))
    run = read_run(folder)
    assert {number: len(steps) for number, steps in run.steps.items()} == {2: 4, 4: 4}
    assert figures(run.surveys) == figures(straight.surveys)
    assert "steps that failed or were discarded do not count: 2" in run.notes
    [pipeline_ns, other] = [
        {step.pipeline_ns - step.first_ns for step in found.steps[2]}
        for found in (run, straight)
    ]
    assert pipeline_ns == other


def test_slow_ranks_and_links_are_named(tmp_path: Path) -> None:
    directory = write_run(
        tmp_path,
        costs=Costs(stages=((0.01,) * 3, (0.01,) * 3, (0.015,) * 3, (0.01,) * 3)),
    )
    assert [name for name, _ in slow(read_run(directory))] == ["rank 2"]
    done = run_package("aggregate", "--trace-dir", str(directory), "--detect")
    assert done.returncode == 1
    assert "slow rank 2: 1.50 x the median" in done.stdout
    even = write_run(tmp_path / "even")
    done = run_package("aggregate", "--trace-dir", str(even), "--detect")
    assert done.returncode == 0
    assert "no rank takes 1.2 x and no link 2 x the median" in done.stdout


def test_links_of_ranks_that_share_cpus_are_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message to a process without a CPU takes as long as a slow one."""
    for cpus, links in (("0,1,2,3", ["link from rank 1 to rank 2"]), ("0,1", [])):
        folder = write_run(tmp_path / cpus, settings={"device": "cpu", "cpus": cpus})
        run = read_run(folder)
        for link in run.links:
            link.delay_ns = 37 * MS if (link.source, link.target) == (1, 2) else MS
        assert [name for name, _ in slow(run)] == links
    assert cli.main(["aggregate", "--trace-dir", str(folder), "--detect"]) == 0
    told = capsys.readouterr().out
    assert "4 ranks shared 2 CPUs of host: their links are not judged" in told


@pytest.mark.parametrize(
    ("of_third", "named"), [((15, 15), []), ((15, 10), ["rank 4"])]
)
def test_a_cut_that_is_uneven_is_no_slow_rank(
    tmp_path: Path, of_third: tuple[int, int], named: list[str]
) -> None:
    """Four stages of two replicas: the other replica tells the rank from the stage."""
    surveys = []
    for rank in range(8):
        header = Header(rank, rank % 2, rank // 2, 0, (2, 4, 1), 4, clock="", wall_ns=0)
        took = of_third[rank % 2] if rank // 2 == 2 else 10
        actions = {("F", rank // 2, 0): [took * MS]}
        surveys.append(RankSurvey(TraceFile(tmp_path, header), actions=actions))
    assert [name for name, _ in slow(Run(tmp_path, surveys, []))] == named


def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    for command in ("aggregate", "report", "plan"):
        done = run_package(command, "--trace-dir", str(tmp_path))
        assert done.returncode == 2
        assert "contains no trace of a rank" in done.stderr
        assert "Traceback" not in done.stderr
    run = write_run(tmp_path)
    shutil.copytree(run, tmp_path / "copy")
    done = run_package(
        "report", "--trace-dir", str(run), "-o", str(tmp_path / "no" / "where.html")
    )
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


def test_steps_behind_the_bound_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, pp=2, microbatches=2, iterations=6)
    assert not any("count" in note for note in read_run(folder).notes)
    monkeypatch.setattr("megatron_ext.tools.trace.survey._MAX_STEPS", 5)
    assert "only the first 5 of 6 iterations count" in read_run(folder).notes


@pytest.mark.parametrize("interval", [1, 2])
def test_surveys_of_long_runs_stay_small_and_are_of_all_of_them(
    tmp_path: Path, interval: int
) -> None:
    sampling = Tracing(
        interval=interval, iterations=1
    )  # all, or those with odd numbers
    run = write_run(tmp_path, pp=2, microbatches=2, iterations=80, sampling=sampling)
    lines = trace_of(run, 1).read_text().split("\n")
    lines[4] = lines[4][:-9]  # a damaged line of one rank
    trace_of(run, 1).write_text("\n".join(lines))
    first, second = read_run(run).surveys
    assert second.file.damaged == {4}
    assert len(first.steps) == first.num_iterations == 80 // interval
    assert 8 <= first.num_sampled <= 16
    assert {len(times) for times in first.actions.values()} == {2 * first.num_sampled}
    begins = [step.begin_ns for step in first.steps]
    numbers = sorted({bisect(begins, sent) for sent in first.sends.values()})
    assert 1 < numbers[0] < 15 // interval
    assert numbers[-1] > 65 // interval
    assert max(after - before for before, after in pairwise(numbers)) < 15 // interval
    common = first.sends.keys() & second.receives.keys()
    assert len(common) >= 2 * (first.num_sampled - 1), (
        "all but the damaged one are the same"
    )
