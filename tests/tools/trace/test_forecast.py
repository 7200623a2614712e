"""Predictions from a trace are simulations with the costs that the trace was made of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.tools.trace import forecast, measured_costs
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tracing.records import SCHEDULE_FILE
from tests.commands import run_package
from tests.tools.trace.runs import COSTS, trace_of, write_run

OUTSIDE_S = 0.019
EVEN = Costs(COSTS.forward, 0.010, 0.010, latency=COSTS.latency)
"""A trace of whole backwards does not show how they split: they are halved."""


def predicted(
    directory: Path, memory_gib: float | None = None
) -> dict[str, forecast.Prediction]:
    return {
        p.schedule: p
        for p in forecast.predict(read_run(directory), memory_gib).predictions
    }


@pytest.mark.parametrize(("traced", "costs"), [("1f1b", EVEN), ("zb-h1", COSTS)])
def test_predictions_are_simulations_with_the_costs_of_the_trace(
    tmp_path: Path, traced: str, costs: Costs
) -> None:
    found = predicted(write_run(tmp_path, schedule=traced))
    for name in ("1f1b", "gpipe", "zb-h1"):
        makespan_s = simulate(generate(name, 4, 8), costs).makespan
        assert found[name].step_s == pytest.approx(makespan_s + OUTSIDE_S, rel=1e-4)
    interleaved = simulate(generate("interleaved", 4, 8, 2), costs).makespan
    step_s = found["interleaved chunks=2"].step_s
    assert step_s == pytest.approx(interleaved + OUTSIDE_S, rel=1e-4)
    assert found["1f1b"].all_to_all_hidden is None, "no exchange was traced"
    assert {
        "1f1b with hint",
        "1f1b with breadth-first",
        "zb-v chunks=2",
    } <= found.keys()
    steps = [p.step_s for p in found.values()]
    assert steps == sorted(steps)


@pytest.mark.short_s(8)  # the only test of their durations
def test_slices_of_different_durations_are_no_jitter(tmp_path: Path) -> None:
    """Attention makes input and weight gradients of one slice unequal parts of a micro-batch."""
    costs = replace(COSTS, attention=0.5)
    run = read_run(write_run(tmp_path, schedule="zb-h1", slices=4, costs=costs))
    found = measured_costs.measured_costs(run, run.schedule)
    assert found.jitter == 0
    assert found.stages[0] == pytest.approx((COSTS.forward, COSTS.input, COSTS.weight))
    prediction = forecast.predict(run)
    assert prediction.of_traced_schedule.step_s == pytest.approx(
        prediction.measured_s, rel=1e-4
    )


def test_uneven_stages_stay_uneven(tmp_path: Path) -> None:
    stages = (0.01,) * 3, (0.01,) * 3, (0.012, 0.01, 0.01), (0.016, 0.018, 0.014)
    costs = Costs(0.012, 0.012, 0.011, latency=0.001, stages=stages)
    found = predicted(write_run(tmp_path, costs=costs))
    assert found["1f1b"].step_s == pytest.approx(
        simulate(generate("1f1b", 4, 8), costs).makespan + OUTSIDE_S, rel=1e-4
    )
    # The halves of the last stage differ: the loss is in the second.
    halves = [
        (forward / 2, 0.005, 0.005)
        for forward in (0.01, 0.01, 0.012, 0.012)
        for _ in "12"
    ]
    halves[-1] = 0.010, 0.011, 0.011
    finer = simulate(
        generate("interleaved", 4, 8, 2), replace(costs, stages=tuple(halves))
    )
    assert found["interleaved chunks=2"].step_s == pytest.approx(
        finer.makespan + OUTSIDE_S, rel=1e-4
    )


@pytest.mark.parametrize(("shares", "more_s"), [(False, 0.006), (True, 0.0)])
def test_twins_update_both_copies_unless_they_share_the_optimizer(
    tmp_path: Path, shares: bool, more_s: float
) -> None:
    about = {"transport": "torch", "use_distributed_optimizer": shares}
    runs = (
        predicted(write_run(tmp_path / str(took), settings=about, optimizer_s=took))
        for took in (0.0, 0.006)
    )
    without, updated = runs
    for name, more in (("1f1b", 0.0), ("dualpipe overlap=False", more_s)):
        assert updated[name].step_s - without[name].step_s == pytest.approx(
            more, abs=1e-6
        )


@pytest.mark.parametrize(("device", "launches"), [("cpu", False), ("musa", True)])
def test_dynamic_orders_are_those_of_the_device(
    tmp_path: Path, device: str, launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that launches chooses before its device is idle, one that computes afterwards."""
    seen, simulate_dynamic = [], forecast.simulate_dynamic

    def spied(schedule, policies, costs):
        seen.append(costs.launch > 0)
        return simulate_dynamic(schedule, policies, costs)

    monkeypatch.setattr(forecast, "simulate_dynamic", spied)
    predicted(write_run(tmp_path, settings={"transport": "torch", "device": device}))
    assert set(seen) == {launches}


def test_exchanges_of_experts_tell_what_pairs_hide(tmp_path: Path) -> None:
    costs = replace(EVEN, all_to_all=0.4)
    with_pairs = forecast.predict(
        read_run(write_run(tmp_path, costs=costs, pairs=True))
    )
    found = {p.schedule: p for p in with_pairs.predictions}
    for name, label in (("1f1b", "1f1b"), ("zb-v", "zb-v chunks=2")):
        paired, plain = found[f"{label} pairs=True"], found[label]
        timeline = simulate(generate(name, 4, 8, pairs=True), costs)
        assert paired.all_to_all_hidden == pytest.approx(timeline.hidden)
        assert paired.step_s == pytest.approx(timeline.makespan + OUTSIDE_S, rel=1e-4)
        assert plain.all_to_all_hidden == 0
        flag = "--overlap-moe-expert-parallel-comm"
        assert (flag in paired.flags, flag in plain.flags) == (True, False)
    dynamic = found["zb-v chunks=2 pairs=True with hint"].all_to_all_hidden
    assert dynamic is not None
    assert dynamic > 0.3
    assert "hidden %" in forecast.table(with_pairs)


def test_memory_is_predicted_and_held(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    mib = 1 << 20
    for rank in range(4):
        path = trace_of(directory, rank)
        peak = 1000 * mib + (4 - rank) * 100 * mib
        told = f'"memory_bytes":{peak},"activation_bytes":{100 * mib}'
        path.write_text(path.read_text().replace('"memory_bytes":0', told))
    found = predicted(directory)
    assert found["1f1b"].memory_bytes == 1400 * mib
    assert found["gpipe"].memory_bytes == 1800 * mib
    assert found["v-half chunks=2"].memory_bytes < found["1f1b"].memory_bytes
    assert found["dualpipe overlap=False"].memory_bytes > 2000 * mib, (
        "two copies of the weights"
    )
    held = predicted(directory, memory_gib=1.4)
    assert "1f1b" in held
    assert "gpipe" not in held
    with pytest.raises(ScheduleError, match=r"needs 1\.37 GiB"):
        predicted(directory, memory_gib=1.0)


def test_a_large_weight_stash_is_predicted(tmp_path: Path) -> None:
    """A stash of 2.25 activations, in a traced zb-h1, whose own peaks are known."""
    ratio, mib = 2.25, 1 << 20
    directory = write_run(tmp_path, schedule="zb-h1", settings={"stash_ratio": ratio})
    for rank, kept in enumerate(activation_peaks(generate("zb-h1", 4, 8), ratio)):
        path = trace_of(directory, rank)
        peak = 1000 * mib + round(100 * mib * kept)
        told = f'"memory_bytes":{peak},"activation_bytes":{100 * mib}'
        path.write_text(path.read_text().replace('"memory_bytes":0', told))
    found = predicted(directory)
    assert found["gpipe"].memory_bytes == 1800 * mib, "nothing is between I and W"
    for name in ("zb-h1", "zb-v chunks=2"):
        table = generate(name.split()[0], 4, 8)
        most = max(activation_peaks(table, ratio))
        assert most > max(activation_peaks(table))
        assert found[name].memory_bytes == pytest.approx((1000 + 100 * most) * mib)


def test_only_steps_of_the_size_of_the_table_count(tmp_path: Path) -> None:
    """A run with --rampup-batch-size has steps of 2, 4 and 8 micro-batches; the table has 8."""
    ramped = write_run(tmp_path / "ramped", ramp=(2, 2, 4, 4, 4), iterations=8)
    plain = forecast.predict(read_run(write_run(tmp_path / "plain")))
    found = forecast.predict(read_run(ramped))
    assert found.measured_s == plain.measured_s
    assert found.predictions == plain.predictions, "costs, too"
    [note] = [note for note in found.notes if "whose size differs" in note]
    assert note.endswith(
        "from the table's 8 micro-batches do not count: 2 of 2, 3 of 4"
    )
    early = write_run(tmp_path / "early", ramp=(2, 2, 4), iterations=3)
    with pytest.raises(
        DataError, match="no traced step had the table's 8 micro-batches"
    ):
        forecast.predict(read_run(early))


def test_models_whose_layers_do_not_fill_the_stages_are_left_out(
    tmp_path: Path,
) -> None:
    found = forecast.predict(read_run(write_run(tmp_path, settings={"num_layers": 4})))
    assert not any(p.schedule.startswith("interleaved") for p in found.predictions)
    assert any(
        "which do not evenly divide its 4 layers" in note for note in found.notes
    )


def test_models_of_unknown_layers_are_not_cut_into_more_stages(tmp_path: Path) -> None:
    """As of programs that call `configure`, and of which the trace has no settings."""
    found = forecast.predict(
        read_run(write_run(tmp_path, settings={"num_layers": None}))
    )
    stages = {p.schedule: p.is_known_to_fit for p in found.predictions}
    assert (stages["zb-h1"], stages["interleaved chunks=2"]) == (True, False)
    assert found.recommended
    assert all(p.is_known_to_fit for p in [*found.recommended, *found.candidates])
    assert "interleaved" not in forecast.table(found).partition("flags (")[2]
    assert any(
        "more than its 4 stages are predicted but not" in note for note in found.notes
    )


def test_the_margin_of_a_dynamic_order_is_that_of_the_run(tmp_path: Path) -> None:
    flags = {}
    for margin in (1, 4):
        traced = {"dpp_policy": "hint", "dpp_extra_activations": margin}
        found = forecast.predict(
            read_run(write_run(tmp_path / str(margin), settings=traced))
        )
        flags[margin] = found.of_traced_schedule.flags
    assert flags[1].endswith(" --use-dpp --dpp-policy hint")
    assert flags[4] == f"{flags[1]} --dpp-extra-activations 4"


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"device": "cpu", "cpus": "0,1"}, "4 ranks shared 2 CPUs"),
        ({"device": "cpu", "cpus": "0,1,2,3"}, None),
        ({"device": "cuda", "cpus": "0,1"}, None),
    ],
)
def test_ranks_that_shared_cpus_are_told_beside_the_number(
    tmp_path: Path, settings: dict[str, object], shared: str | None
) -> None:
    found = forecast.predict(read_run(write_run(tmp_path, settings=settings)))
    assert found.shared_cpus == shared
    first = forecast.table(found).splitlines()[0]
    told = f" ms for ranks with a CPU or a device each ({shared}); predicted:"
    assert first.endswith(told if shared else " ms; predicted:")
    assert any("the forecast assumes a CPU" in note for note in found.notes) == bool(
        shared
    )


def test_orders_that_bound_no_memory_are_marked(tmp_path: Path) -> None:
    found = forecast.predict(read_run(write_run(tmp_path)))
    bounded = {p.schedule: p.bounds_memory for p in found.predictions}
    assert bounded["1f1b"]
    assert bounded["1f1b with hint"]
    assert not bounded["1f1b with breadth-first"]
    table = forecast.table(found)
    marked = [line for line in table.splitlines() if line.endswith("*")]
    assert marked
    assert all("first" in line for line in marked)
    assert "\n* unbounded: " in table


def test_the_command_prints_flags_to_paste(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    done = run_package("plan", "--trace-dir", str(directory))
    assert done.returncode == 0, done.stderr
    assert "traced: 1f1b, step " in done.stdout
    advice = next(
        line for line in done.stdout.splitlines() if line.startswith("recommended: ")
    )
    assert re.search(
        r"--enable-bitpipe-schedule.* x as fast\) if 2 copies of the weights fit, otherwise ",
        advice,
    )
    listed = done.stdout.partition("flags (--json shows all):\n")[2].splitlines()
    assert 3 <= len(listed) <= 5
    assert not any("first" in line for line in listed), "those that bound memory"
    assert "memory is not predicted" in done.stderr
    rows = json.loads(
        run_package("plan", "--trace-dir", str(directory), "--json").stdout
    )
    [row] = [row for row in rows if row["schedule"] == "1f1b with hint"]
    assert row["flags"] == (
        "--pipeline-model-parallel-size 4 --pipeline-schedule 1f1b --use-dpp --dpp-policy hint"
    )


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    with pytest.raises(DataError, match="which --memory-gib needs"):
        forecast.predict(read_run(directory), 16)
    trace_of(directory, 2).unlink()
    with pytest.raises(DataError, match="lacks forward or backward passes of stage 2"):
        forecast.predict(read_run(directory))
    (directory / SCHEDULE_FILE).unlink()
    with pytest.raises(DataError, match=r"has no schedule\.json"):
        forecast.predict(read_run(directory))
    done = run_package("plan", "--memory-gb", "3", "--pp", "4", "--microbatches", "8")
    assert done.returncode == 2
    assert "add --trace-dir DIR" in done.stderr


def test_micro_batches_cut_by_length_have_no_measured_costs(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, settings={"slice_tokens": 2048}))
    with pytest.raises(
        DataError, match=r"with --pipeline-slice-tokens, .*; trace a run without"
    ):
        forecast.predict(run)


def test_weights_that_ran_during_other_actions_have_no_measured_costs(
    tmp_path: Path,
) -> None:
    run = read_run(
        write_run(tmp_path, schedule="zb-h1", settings={"waiting_weights": 2})
    )
    with pytest.raises(
        DataError,
        match=r"W ran during other actions, .*; trace a run without this flag",
    ):
        forecast.predict(run)
