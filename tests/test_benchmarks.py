"""The benchmark of schedules measures what it says; how long things take is not tested here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import ranks
from benchmarks.harness.metrics import evaluate, replay
from benchmarks.harness.ops import Op, OpTimes, Sizes, Step
from benchmarks.harness.systems import Own, System, all_systems, own
from megatron_ext.schedules import UNIT, Costs, Schedule, generate, simulate
from megatron_ext.upstream import releases
from tests.commands import run_python
from tests.planning import model_memory
from tests.ranks import require_training

ROOT = Path(__file__).parents[1]
PP, MICROBATCHES = 4, 8
FORWARD_S = 1e-3

SYSTEMS = {system.name: system for system in all_systems()}
OWN = {name: system for name, system in SYSTEMS.items() if isinstance(system, Own)}
PEERS = {name: system for name, system in SYSTEMS.items() if name not in OWN}
TABLES = [
    n for n, s in OWN.items() if s.config.wire == "shm" or s.config.schedule == "1f1b"
]
"""Those over gloo are the same tables; tests/test_matrix.py has the transports."""


def measure(system: System) -> list[list[Step]]:
    sizes = Sizes(PP, MICROBATCHES, FORWARD_S, warmup=1, steps=1, timeout_s=60)
    return ranks.run(ranks.measure, system, sizes)


def table_of(system: Own) -> Schedule:
    config = system.config
    return generate(
        config.schedule,
        PP,
        MICROBATCHES,
        config.chunks,
        config.costs or UNIT,
        **config.options,
    )


@pytest.mark.parametrize("name", TABLES)
def test_own_schedules_run_their_table_and_keep_what_the_simulator_says(
    name: str,
) -> None:
    system, schedule = OWN[name], table_of(OWN[name])
    steps = measure(system)
    for world_rank, [step] in enumerate(steps):
        row = schedule.rows[world_rank // schedule.placement.twins]
        assert [op[:3] for op in step.ops] == [action[:3] for action in row]
    figures = evaluate(
        steps, system.placement(PP), [OpTimes(FORWARD_S, system.share(PP))]
    )
    timeline = simulate(schedule)
    assert figures.optimum_s == pytest.approx(FORWARD_S * timeline.makespan)
    assert figures.peak_live == figures.peak_of_order == timeline.peak_activations


@pytest.mark.parametrize(
    "name", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.slow)]
)
def test_slices_run_their_table_and_keep_what_the_simulator_says(name: str) -> None:
    system = own(name, name, slices=4, attention=0.5)
    schedule = generate(name, PP, MICROBATCHES, costs=Costs(attention=0.5), slices=4)
    steps = measure(system)
    for row, [step] in zip(schedule.rows, steps, strict=True):
        assert [op[:3] for op in step.ops] == [
            (s, kind, 4 * m + part) for s, kind, m, part in row
        ]
    times = system.times(
        Sizes(PP, MICROBATCHES, FORWARD_S, warmup=1, steps=1, timeout_s=60)
    )
    figures = evaluate(steps, system.placement(PP), [times])
    timeline = simulate(schedule, Costs(attention=0.5))
    assert figures.optimum_s == pytest.approx(FORWARD_S * timeline.makespan)
    assert figures.peak_live == pytest.approx(timeline.peak_activations, abs=0.01)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zb-h1", ""),
        pytest.param("1f1b", "", marks=pytest.mark.slow),
        pytest.param(
            "zb-h1", "--use-dpp --dpp-extra-activations 0", marks=pytest.mark.slow
        ),
    ],
)
def test_a_real_model_in_slices_keeps_what_its_table_says(name: str, more: str) -> None:
    """In a dynamic order at most that."""
    require_training()
    [one, _] = model_memory.sliced("1f1b", 2, 1, 1, 256)
    [first, _] = model_memory.sliced(name, 2, 4, 4, 256, more)
    assert 1 < first.planned < 1.5
    found = first.held.kept / one.held.kept
    assert found <= 1.05 * first.planned
    assert more or found >= 0.95 * first.planned
    width = 2 * 2 * 256 * model_memory.HIDDEN  # keys and values, in bf16
    assert 1 < first.keys_bytes / width <= first.planned_keys


@pytest.mark.parametrize("name", PEERS)
def test_peers_run_every_op_once(name: str) -> None:
    system = PEERS[name]
    steps = measure(system)
    stages_of = system.placement(PP).stages_of
    for stages, [step] in zip(stages_of, steps, strict=True):
        forwards = sorted(
            (op.stage, op.microbatch) for op in step.ops if op.kind == "F"
        )
        backwards = sorted(
            (op.stage, op.microbatch) for op in step.ops if op.kind in "BI"
        )
        assert (
            forwards
            == backwards
            == [(s, m) for s in stages for m in range(MICROBATCHES)]
        )
        split = sum(op.kind == "I" for op in step.ops)
        assert sum(op.kind == "W" for op in step.ops) == split


@pytest.mark.parametrize("name", TABLES)
def test_replay_agrees_with_the_simulator(name: str) -> None:
    schedule = table_of(OWN[name])
    costs = Costs(forward=1, input=1.5, weight=0.75, jitter=0.3, seed=7)
    timeline = simulate(schedule, costs)
    durations, rows = {}, []
    for row, starts, ends in zip(
        schedule.rows, timeline.starts, timeline.ends, strict=True
    ):
        ops = [Op(*a[:3], s, e) for a, s, e in zip(row, starts, ends, strict=True)]
        durations.update({op[:3]: op.duration_s for op in ops})
        rows += [ops] * schedule.placement.twins
    found = replay(rows, schedule.placement, lambda op: durations[op[:3]])
    assert found == pytest.approx(timeline.makespan)


def test_replay_refuses_an_impossible_record() -> None:
    schedule = generate("1f1b", 2, 2)
    rows = [[Op(*action[:3], 0.0, 1.0) for action in row] for row in schedule.rows]
    rows[0].reverse()
    with pytest.raises(ValueError, match="before what it needs"):
        replay(rows, schedule.placement, lambda op: op.duration_s)


def test_what_lies_between_ops_is_told_apart() -> None:
    rows = [
        [Op(0, "F", 0, 1.0, 2.0), Op(0, "B", 0, 6.0, 8.0)],
        [Op(1, "F", 0, 2.25, 3.25), Op(1, "B", 0, 3.375, 5.5)],
    ]
    steps = [[Step(1.0, 8.0, row, 1, 0.0)] for row in rows]
    figures = evaluate(steps, generate("1f1b", 2, 1).placement, [OpTimes(1.0, 1.0)])
    assert figures.gap_s == 0.125, "B of the last stage follows its F"
    assert figures.hop_s == 0.5, "B of the first stage waits for that"


def test_the_page_shows_every_system() -> None:
    page = (ROOT / "docs" / "results-schedules.md").read_text(encoding="utf-8")
    table = re.findall(
        r"<!-- measured: begin -->\n```text\n(.*?)\n```", page, re.DOTALL
    )[0]
    names = [re.split(r"  +", line)[0] for line in table.splitlines()[1:]]
    assert names == list(SYSTEMS), "copy what `benchmarks/schedules.py` prints"


def command(*options: str) -> list[str]:
    script = str(ROOT / "benchmarks" / "schedules.py")
    return [sys.executable, script, "--pp", "2", "--microbatches", "3", *options]


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = subprocess.run(
        command(
            "--steps=1",
            "--forward-ms=1",
            "--only",
            "core 1F1B",
            "gloo: 1f1b",
            "--json",
            str(path),
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ["megatron-core 1F1B", "megatron_ext, gloo: 1f1b"]
    [content] = json.loads(path.read_text())["measured"]
    assert [figures["system"] for figures in content["systems"]] == names
    assert content["systems"][1]["peak_live"] == 2
    assert all(name in done.stdout for name in names)


def test_what_cannot_run_is_told() -> None:
    done = subprocess.run(
        command("--only", "interleaved, batched", "bitpipe order=zb"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"interleaved, batched P2P: rank \d failed first", done.stderr)
    assert (
        "megatron_ext, gloo: bitpipe order=zb: bitpipe mirrors two pipelines"
        in done.stderr
    )


def test_unknown_system() -> None:
    done = subprocess.run(
        command("--only", "gpipes"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "no system has gpipes in its name; the systems are: megatron-core 1F1B; "
        in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interrupt(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        command("--forward-ms=1000", "--only", "gloo: 1f1b"),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(tmp_path.glob("megatron_ext_*/rank1.log")))
        # A terminal interrupts all of its processes, `kill` only the one that was started.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.wait(timeout=60)
        wait_until(lambda: not running(process.pid))
        assert list(tmp_path.glob("megatron_ext_*")) == []
    finally:
        if running(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 240  # other runs of this checkout may be first
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["folder", "missing folder", "full"])
def test_figures_that_cannot_be_written_are_one_line(tmp_path: Path, kind: str) -> None:
    """Where it can be told, before anything is measured."""
    path = {
        "folder": tmp_path,
        "missing folder": tmp_path / "no/x",
        "full": Path("/dev/full"),
    }[kind]
    done = run_python(str(ROOT / "benchmarks/planner.py"), "--json", str(path))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert f"{path} cannot be written" in done.stderr.splitlines()[-1]
    assert ("SimuMax" in done.stdout) == (kind == "full")


def test_figures_that_were_there_survive_a_disk_that_fills_up(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("before")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from benchmarks.harness.command import write_json\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_json(Path(sys.argv[1]), list(range(1000)))"
    )
    done = run_python("-c", code, str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path} cannot be written: File too large")
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
@pytest.mark.skipif(
    not releases.has_training(), reason="the wheel has no training loop"
)
def test_the_way_from_a_killed_rank_to_the_next_step_is_broken_down() -> None:
    done = run_python(str(ROOT / "benchmarks/launch.py"), "restart", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = re.findall(r"\| (\S+) s \|", done.stdout)
    assert len(seconds) == 6
    assert all(float(each) > 0 for each in seconds)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("executor", ["megatron-core 1F1B", "megatron_ext, gloo: zb-h1"]),
        ("tables", ["interleaved", "1f1b", "zb-v"]),
        ("traces", ["aggregate", "report"]),
        ("tracing", ["megatron_ext, gloo: 1f1b"]),
        ("digests", ["0", "1"]),
    ],
    ids=["executor", "tables", "traces", "tracing", "digests"],
)
def test_overheads_are_measured(part: str, names: list[str]) -> None:
    done = run_python(str(ROOT / "benchmarks/overhead.py"), part, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} | " in done.stdout for name in names)
    assert ("an event: " in done.stdout) == (part == "tracing")


@pytest.mark.slow
def test_slices_are_printed_beside_what_the_executor_takes() -> None:
    done = run_python(
        str(ROOT / "benchmarks/slices.py"), *"--quick --parts schedules".split()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    peaks = {line[0]: line[-2] for line in lines if line[0].startswith("zb-h1 slices")}
    assert peaks == {
        "zb-h1 slices=1": "4", "zb-h1 slices=4": "1.75", "zb-h1 slices=8": "1.375",
        "zb-h1 slices=16": "1.1875", "zb-h1 slices=8 attention 30 %": "1.4873",
        "zb-h1 slices=8 attention 60 %": "1.625",
    }  # fmt: skip
    assert re.search(
        r"between two actions: \d+ us with slices=1, \d+ us with", done.stdout
    )
