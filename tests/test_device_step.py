"""The benchmark of steps on a device measures what it says; how long they take is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.expert_overlap import overlap, systems
from benchmarks.harness.comparison import Compared
from benchmarks.harness.metrics import Figures, evaluate
from benchmarks.harness.ops import Op, Sizes, Step
from benchmarks.harness.scenarios import noisy
from benchmarks.harness.systems import Own, Peer, device_systems
from megatron_ext.schedules import Costs, registered, simulate
from megatron_ext.upstream import releases

ROOT = Path(__file__).parents[1]
SYSTEMS = {system.name: system for system in device_systems()}


def _as_simulated(system: Own, late_s: float, waits: int) -> list[list[Step]]:
    """Return a step that runs as simulated, is late, and waits so often on each rank."""
    timeline = simulate(system.pipeline(4, 8).full)
    found = []
    for row, starts, ends in zip(
        timeline.schedule.rows, timeline.starts, timeline.ends, strict=True
    ):
        ops = [
            Op(*action[:3], start + late_s, end + late_s)
            for action, start, end in zip(row, starts, ends, strict=True)
        ]
        found.append([Step(0.0, timeline.makespan + late_s, ops, 0, host_waits=waits)])
    return found


def figures_of(system: Own, sizes: Sizes, steps: list[list[Step]]) -> Figures:
    return evaluate(steps, system.placement(sizes.pp), noisy(system, sizes, "quiet"))


def test_figures_are_ratios_to_the_order_that_ran() -> None:
    table, sizes = (
        SYSTEMS["ipc: interleaved chunks=2, static, split"],
        Sizes(4, 8, 1.0, 0, 1, 60),
    )
    dynamic = SYSTEMS["ipc: interleaved chunks=2, hint +1"]
    assert isinstance(table, Own)
    makespan = simulate(table.pipeline(4, 8).full).makespan
    found = figures_of(table, sizes, _as_simulated(table, 0.5, 3))
    assert found.order_s == [pytest.approx(makespan)]
    assert found.seconds == [pytest.approx(makespan + 0.5)]
    assert found.overheads == [pytest.approx(0.0)], "only the begin was late"
    assert found.op_inflation == pytest.approx(0.0)
    assert found.waits_per_action == 3 * 4 / (3 * 2 * 8 * 4)
    late = figures_of(table, sizes, _as_simulated(table, makespan, 0))
    rows = {(table.name, "quiet"): late, (dynamic.name, "quiet"): found}
    systems = {s.name: s for s in (table, dynamic)}
    measured = Compared(sizes, systems=systems, figures=rows)
    assert measured.speeds((table.name, "quiet")) is None
    faster = measured.speeds((dynamic.name, "quiet"))
    assert faster == (pytest.approx(2 * makespan / (makespan + 0.5)), 1.0)


def test_the_shortest_repetition_of_each_draw_counts() -> None:
    system, sizes = SYSTEMS["ipc: zb-h1"], Sizes(4, 8, 1.0, 0, 2, 60)
    assert isinstance(system, Own)
    makespan = simulate(system.pipeline(4, 8).full).makespan
    lates = [0.5, 3.0, 2.0, 1.0]  # two draws, two repetitions
    runs = [_as_simulated(system, late_s, waits=1) for late_s in lates]
    found = figures_of(
        system, sizes, [[run[rank][0] for run in runs] for rank in range(4)]
    )
    assert found.seconds == [
        pytest.approx(makespan + 0.5),
        pytest.approx(makespan + 1.0),
    ]
    assert found.waits_per_action == 4 * 4 / (4 * 3 * 8 * 4), (
        "no repetition is left out"
    )


def test_every_schedule_is_measured_on_both_paths_beside_upstream() -> None:
    own = [system for system in SYSTEMS.values() if isinstance(system, Own)]
    for path in ("torch", "shm"):
        configs = [system.config for system in own if system.config.wire == path]
        static = {config.schedule for config in configs if config.dynamic is None}
        assert static == set(registered())
    peers = [system for system in SYSTEMS.values() if isinstance(system, Peer)]
    assert {peer.schedule for peer in peers} >= {"1f1b", "interleaved-overlap"}
    assert {peer.module for peer in peers} == {"megatron_core"}


def quick_run(script: str, *options: str) -> str:
    """Run a benchmark; return what it prints."""
    argv = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *options]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("emulated_musa")
def test_command(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    quick_run("schedules.py", "--device", "--json", str(path))
    [measured] = json.loads(path.read_text())["measured"]
    assert measured["failures"] == {}
    names = ["megatron-core 1F1B", "communicator: 1f1b", "ipc: 1f1b"]
    assert [row["system"] for row in measured["systems"]] == names
    order_s = 2e-3 * simulate(SYSTEMS["ipc: 1f1b"].pipeline(2, 4).full).makespan
    for row in measured["systems"]:
        assert row["order_s"] == [pytest.approx(order_s)]
        assert row["num_ops"] == 2 * 4
    peer, *own = measured["systems"]
    assert peer["waits_per_action"], (
        "Megatron's own batched P2P synchronises with the device"
    )
    assert [row["waits_per_action"] for row in own] == [0, 0]


@pytest.mark.parametrize("hides", [1.0, 0.5])
def test_what_pairs_hide_is_a_part_of_what_they_could(hides: float) -> None:
    system, share = next(each for each in systems() if each.name == "zb-v, pairs"), 0.6
    assert isinstance(system, Own)
    costs = Costs(1 + share, 1 + share, 1, all_to_all=share / (1 + share), hides=hides)
    timeline = simulate(system.pipeline(4, 8).full, costs)
    steps = []
    for row, starts, ends in zip(
        timeline.schedule.rows, timeline.starts, timeline.ends, strict=True
    ):
        ops = [Op(*a[:3], *times) for a, *times in zip(row, starts, ends, strict=True)]
        steps.append([Step(0.0, timeline.makespan, ops, 0)])
    found = overlap(steps, system, Sizes(4, 8, 1.0, 0, 1, 60), share)
    assert found.hidden == pytest.approx(hides)
    assert found.of_all == pytest.approx(timeline.hidden)
    assert found.activations == timeline.peak_activations
    assert (found.step_s == pytest.approx(found.bound_s)) is (hides == 1)


def test_pairs_are_measured_under_every_schedule_beside_upstream() -> None:
    own = [system for system in systems() if isinstance(system, Own)]
    assert all(system.config.pairs for system in own)
    assert {system.config.schedule for system in own} == set(registered()) - {"gpipe"}
    assert sum(isinstance(system, Peer) for system in systems()) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    (releases.installed_release() or (0, 19)) < (0, 19),
    reason="Megatron makes plans of other models than its own from 0.19 on",
)
@pytest.mark.usefixtures("emulated_musa")
def test_command_of_pairs() -> None:
    printed = quick_run("expert_overlap.py")
    stock, paired = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if line.startswith(("| megatron-core", "| zb-v"))
    )
    assert stock[0] == "megatron-core interleaved, overlap"
    assert paired[3], "what pairs could hide that they hid"
    zb_v = next(each for each in systems() if each.name == "zb-v, pairs")
    assert isinstance(zb_v, Own)
    table = simulate(zb_v.pipeline(2, 4).full)
    assert float(paired[-1]) == table.peak_activations


@pytest.mark.slow
@pytest.mark.skipif(
    (releases.installed_release() or (0, 19)) < (0, 19),
    reason="Megatron makes plans of other models than its own from 0.19 on",
)
@pytest.mark.usefixtures("emulated_musa")
def test_command_of_unequal_experts() -> None:
    printed = quick_run("expert_overlap.py", "--imbalance", "1.66")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if line.startswith(("| W0", "| drawn"))
    ]
    assert [row[:3] for row in rows] == [
        ["W0 balanced", "1.00", "zb-h1, pairs"],
        ["W0 balanced", "1.00", "zb-h1, pairs, 8 waiting"],
        ["drawn, 1.66", "1.66", "zb-h1, pairs"],
        ["drawn, 1.66", "1.66", "zb-h1, pairs, 8 waiting"],
    ]
    for row in rows:
        assert float(row[4]) >= 1, "no order beats the busiest rank"
