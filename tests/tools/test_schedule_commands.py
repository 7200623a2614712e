"""`megatron-ext plan` and `megatron-ext plot` as users call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from megatron_ext import cli
from megatron_ext.schedules import Costs, generate, registered
from megatron_ext.schedules.comparison import compare
from megatron_ext.schedules.drawing import svg
from megatron_ext.schedules.table import table_files

ROOT = Path(__file__).parents[2]
KEYS = [
    "schedule", "options", "pp", "num_microbatches", "makespan", "ideal", "bubble", "bubble_ratio",
    "peak_activations", "peak_activations_per_rank", "weight_copies", "p2p_messages",
]  # fmt: skip


def _run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    code = cli.main(command.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_ranks_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "plan --pp 8 --microbatches 16 --schedule all")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert (
        lines[0].split()
        == "schedule makespan ideal bubble bubble % peak act. weights messages".split()
    )
    assert lines[1].split() == "bitpipe order=zb 49.5 48 1.5 3.0 8 2x 448".split()
    table = lines[1 : lines.index("")]
    assert {line.split()[0] for line in table} == set(registered())
    flags = [line for line in lines if "--pipeline-model-parallel-size 8 " in line]
    assert len(flags) == 3
    assert lines[lines.index("") :].count("flags of the first three:") == 1
    advice = "recommended: bitpipe order=zb if 2 copies of the weights fit, otherwise zb-v chunks=2"
    assert advice in lines
    automatic = "--pipeline-schedule auto chooses --pipeline-schedule zb-v: 51.5 forward passes "
    assert any(line.startswith(automatic) for line in lines)
    assert flags[0].endswith("--enable-bitpipe-schedule")


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys, "plan --pp 4 --microbatches 8 --schedule interleaved --chunks 2 --json"
    )
    [entry] = json.loads(out)
    assert code == 0
    assert list(entry) == KEYS
    assert entry == {
        "schedule": "interleaved", "options": {"chunks": 2}, "pp": 4, "num_microbatches": 8,
        "makespan": 28.5, "ideal": 24, "bubble": 4.5, "bubble_ratio": 0.157895,
        "peak_activations": 5.5, "peak_activations_per_rank": [5.5, 4.5, 3.5, 2.5],
        "weight_copies": 1, "p2p_messages": 112,
    }  # fmt: skip


def test_gains_of_a_dynamic_order_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --pp 4 --microbatches 8 --use-dpp"
    _, out, _ = _run(capsys, f"{words} --json")
    shown = [entry["use_dpp"] for entry in json.loads(out)]
    _, text, _ = _run(capsys, words)
    assert len(shown) > 5
    for found in shown:
        quiet, late = found["quiet"], found["late"]
        assert f"  {quiet:.3f} if no message is late, {late:.3f} if messages" in text


def test_plan_with_costs_and_latency(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(
        capsys, "plan --pp 8 --microbatches 16 --schedule 1f1b --comm 0.1 --json"
    )
    assert json.loads(out)[0]["makespan"] == pytest.approx(73, abs=0.05)
    _, out, _ = _run(
        capsys, "plan --pp 2 --microbatches 2 --schedule 1f1b --costs 1,1.5,0.5 --json"
    )
    assert json.loads(out)[0]["ideal"] == 6


def test_searched_tables_are_made_for_the_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = _run(
        capsys, "plan --pp 8 --microbatches 16 --schedule bitpipe --comm 0.1 --json"
    )
    assert json.loads(out)[0]["makespan"] == 51.7
    _, out, _ = _run(
        capsys, "plan --pp 8 --microbatches 16 --schedule bitpipe --comm 0.1"
    )
    assert "--enable-bitpipe-schedule --pipeline-costs 1,1,1,0.1" in out


def test_plan_tells_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "plan --pp 3 --microbatches 4")
    assert code == 0
    assert "bitpipe" not in out
    assert "left out: bitpipe mirrors two pipelines" in err


def test_plot_draws_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "plot 1f1b --pp 2 --microbatches 2")
    assert code == 0
    assert out.splitlines() == [
        "1f1b: pp 2, m 2, makespan 9, bubble 3 (33.3 %), peak 2",
        "0|F0 F1 .  .  B0--- .  B1---",
        "1|.  F0 B0--- F1 B1--- .  .",
        "F forward, B backward, one column: 1",
    ]


def test_plot_draws_the_dynamic_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = _run(
        capsys, f"plot 1f1b --pp 4 --microbatches 12 --use-dpp -o {tmp_path / 'x.svg'}"
    )
    static, dynamic, _ = out.splitlines()
    assert code == 0
    assert static.startswith("1f1b: ")
    assert dynamic.startswith("1f1b --use-dpp: ")
    took = [
        float(line.split("makespan ")[1].split(",")[0]) for line in (static, dynamic)
    ]
    assert took[0] > 1.2 * took[1], "messages are late"
    assert static in (tmp_path / "x.svg").read_text()


def test_plot_writes_each_kind_of_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for suffix in ("svg", "csv", "json"):
        path = tmp_path / f"plot.{suffix}"
        code, out, err = _run(
            capsys,
            f"plot bitpipe --pp 4 --microbatches 8 --bitpipe-order paper -o {path}",
        )
        assert (code, out.splitlines()[-1]) == (0, f"wrote {path}")
        assert ("one of the two mirrored pipelines (2 ranks)" in err) == (
            suffix == "csv"
        )
    schedule = generate("bitpipe", 4, 8, order="paper")
    assert table_files.from_json((tmp_path / "plot.json").read_text()) == schedule
    assert table_files.load_csv(str(tmp_path / "plot.csv")).rows == schedule.rows
    ET.parse(tmp_path / "plot.svg")


def test_a_csv_needs_no_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    _run(capsys, f"plot zb-v --pp 4 --microbatches 6 -o {path}")
    code, out, _ = _run(capsys, f"plan --schedule csv:{path}")
    assert code == 0
    assert f"--pipeline-model-parallel-size 4 --pipeline-schedule csv:{path}" in out


@pytest.mark.parametrize(
    ("command", "messages"),
    [
        ("plan --microbatches 8", ["--pp is missing"]),
        ("plan --pp 8", ["--microbatches is missing"]),
        ("plan --pp 7 --microbatches 8 --schedule bitpipe", ["pp must be even", "use 6 or 8"]),
        ("plan --pp 4 --microbatches 3 --schedule bitpipe", ["must be even, got 3", "use 4"]),
        ("plan --pp 4 --microbatches 8 --schedule zb_v", ["no schedule 'zb_v'", "zb-v"]),
        ("plan --pp 4 --microbatches 8 --costs 1,2", ["--costs needs three numbers", "1,1,1"]),
        ("plan --pp 4 --microbatches 8 --costs 1,0,1", ["must be positive"]),
        ("plan --pp 4 --microbatches 8 --comm -1", ["must be between 0 and"]),
        ("plan --pp -4 --microbatches 8", ["pp must be at least 1"]),
        ("plan --pp 1 --microbatches 8", ["--pp 1 leaves no pipeline", "use 2 or more"]),
        ("plan --pp 100000 --microbatches 8", ["--pp 100000", "use at most 4096"]),
        ("plan --pp 8 --microbatches 1000000000", ["with 8 ranks; use at most 262144"]),
        ("plot interleaved --pp 4 --microbatches 8 --chunks 1000000", ["2097152", "stages"]),
        ("plot zb-v --pp 512 --microbatches 1000", ["limited to 262144", "use fewer"]),
        ("plot 1f1b --pp 256 --microbatches 1400", ["columns of 1", "at most 4096 can be drawn"]),
        ("plot zb-v --pp 4 --microbatches 8 --costs 1e-9,1e9,1", ["--costs that differ less"]),
        ("plan --pp 4 --microbatches 8 --costs 1e308,1,1", ["between 1e-09 and 1e+09"]),
        ("plan --pp 4 --microbatches 8 --comm 1e308", ["between 0 and 1e+09"]),
        ("plan --schedule csv:/dev/zero", ["it is a pipe or a device, not a regular file"]),
        ("plan --schedule csv:/nowhere.csv", ["/nowhere.csv cannot be read"]),
        ("plot fbd --pp 4 --microbatches 4 --use-dpp", ["different ranks", "remove --use-dpp"]),
        ("plot fbd --pp 4 --microbatches 4 -o x.csv", ["every stage on two ranks", "a .json file"]),
        ("plan --schedule csv:x.csv --chunks 2", ["csv:x.csv: the file fixes chunks"]),
        (
            "plan --pp 4 --microbatches 8 --schedule zb-v --bitpipe-order zb",
            ["--bitpipe-order is for bitpipe, not for zb-v"],
        ),
        ("plan --pp 4 --microbatches 8 --attention 0.5", ["needs --slices; add --slices"]),
        ("plan --pp 4 --microbatches 8 --hides 0.5", ["--hides needs --pairs; add --pairs"]),
        ("plot all --pp 4 --microbatches 8", ["plot needs the names of schedules"]),
        ("plot 1f1b --pp 4 --microbatches 8 -o x.png", ["use .svg, .csv or .json"]),
        ("plot 1f1b --pp 4 --microbatches 8 -o /nowhere/x.svg", ["cannot be written"]),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_message(
    capsys: pytest.CaptureFixture[str], command: str, messages: list[str]
) -> None:
    code, out, err = _run(capsys, command)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-ext: error: ")
    for message in messages:
        assert message in err


@pytest.mark.parametrize(
    "command", ["plan --pp 4 --microbatches 8", "plot zb-v --pp 4 --microbatches 8"]
)
def test_commands_import_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from megatron_ext import cli; "
        f"assert cli.main({command.split()!r}) == 0; "
        "print('heavy:', *{'torch', 'numpy', 'megatron.core', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def test_the_legend_has_what_takes_time() -> None:
    one = compare("1f1b", 4, 8, Costs())[0]
    for activations, shown in (("ship", False), ("recompute", True)):
        options = {"fbd": {"activations": activations}}
        fbd = compare("fbd", 4, 8, Costs(), options=options)[0]
        assert ("recomputation" in svg.draw(*one, *fbd)) == shown


def test_several_schedules_in_one_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = f"--pp 4 --microbatches 8 -o {tmp_path / 'all'}"
    code, out, _ = _run(capsys, f"plot 1f1b bitpipe {sizes}.svg")
    assert code == 0
    picture = (tmp_path / "all.svg").read_text()
    assert all(caption in picture for caption in out.splitlines()[:2])
    assert picture.count('class="lane"') == 8 + 1, "and one in the legend"
    assert "input gradient" in picture  # of bitpipe, in the legend of both
    code, _, err = _run(capsys, f"plot 1f1b bitpipe {sizes}.json")
    assert code == 2
    assert "can contain only one schedule" in err
