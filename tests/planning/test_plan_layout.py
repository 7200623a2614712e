"""`megatron-ext plan --devices`, and its flags in the real validation."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.config.hosting import preflight
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.model_source import read_model
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
REST = (
    "--micro-batch-size 1 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --eval-interval 1000 --bf16"
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("example", "size", "devices", "batch", "fix"),
    [
        (
            "llama3",
            "8b",
            "8xh100",
            512,
            "cp=1",
        ),  # more needs Transformer Engine, which is not here
        ("llama3", "70b", "64xh100", 128, "tp=4,cp=1"),
        ("mixtral", None, "64xh100", 256, "tp=1,cp=1"),
        ("deepseek-v2", None, "128xh200", 1024, "tp=1,cp=1,micro_batch=1"),
        pytest.param(
            "deepseek-v3",
            None,
            "256xh200",
            1024,
            "tp=2,cp=1,micro_batch=1",
            marks=pytest.mark.slow,
        ),
        (
            "deepseek-v3",
            None,
            "256xh200",
            1024,
            "pp=16,tp=2,schedule=zb-v,recompute=full",
        ),
    ],
)
def test_training_takes_the_flags_of_every_plan(
    capsys: pytest.CaptureFixture[str],
    example: str,
    size: str | None,
    devices: str,
    batch: int,
    fix: str,
) -> None:
    require_training()
    chosen = ["--size", size] if size else []
    found = planned(
        capsys, "--model", str(EXAMPLES / example), *chosen, "--devices", devices,
        "--global-batch-size", str(batch), "--fix", fix,
    )  # fmt: skip
    model = read_model(EXAMPLES / example, size, []).flags
    own, vocabulary = list(model), model.index("--vocab-size")
    del own[vocabulary : vocabulary + 2]
    cases = [
        (
            "gpt",
            f"{REST} {' '.join(own)} {plan['flags']}".replace("'", ""),
            world_of(devices),
        )
        for plan in found["plans"]
        if "--moe-grouped-gemm" not in plan["flags"]  # a CUDA kernel, which is not here
    ]
    for plan in found["plans"]:
        needs = "moe_act" in plan["recompute"]
        assert needs == ("--moe-grouped-gemm" in plan["flags"])
    for (_, flags, _), result in zip(
        cases, run_ranks(1, outcomes, cases)[0], strict=True
    ):
        assert isinstance(result, dict), f"{flags}: {result}"
    assert found["bound_s"] <= found["plans"][0]["step_s"]
    assert found["gap"] == pytest.approx(
        found["plans"][0]["step_s"] / found["bound_s"] - 1
    )


def world_of(devices: str) -> int:
    return int(devices.partition("x")[0])


LLAMA = ["--model", str(EXAMPLES / "llama3"), "--size", "8b"]


def test_the_table_names_bound_gap_and_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.main(
            [
                "plan",
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "64",
                "--explain",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(
        r"bound: .* takes less than [\d.]+ s; the first layout is within [\d.]+ %",
        printed,
    )
    flags = re.findall(r"^  \d  (--tensor.*)$", printed, re.MULTILINE)
    assert len(flags) == 5
    assert "NVIDIA, H100 SXM" in printed
    [why] = re.findall(r"the second layout, with (.*); it needs", printed)
    why = re.sub(
        r"the bound for its schedule is \S+ s \(first: \S+ s\), ", "", why
    )  # no part of it
    slower, *seconds = map(float, re.findall(r"(-?\d+\.\d{3})", why))
    parts = sum(seconds[::2]) - sum(seconds[1::2])
    assert slower == pytest.approx(parts, abs=0.005)


def test_fixed_values_stay(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "Et*8|t*8|t*9|t*7,L"
    found = planned(
        capsys, *LLAMA, "--devices", "8xb200", "--global-batch-size", "64",
        "--fix", f"tp=1,pp=4,cp=1,micro_batch=2,schedule=zb-h1,recompute=none,layout={layout}",
    )  # fmt: skip
    [plan] = found["plans"]
    assert plan["layout"].count("|") == 3
    assert [stage.count("t") for stage in plan["layout"].split("|")] == [8, 8, 9, 7]
    assert (plan["pp"], plan["micro_batch"], plan["schedule"]) == (4, 2, "zb-h1")
    assert plan["tokens_per_s_per_gpu"] == pytest.approx(64 * 8192 / plan["step_s"] / 8)


MIXTRAL = ["--model", str(EXAMPLES / "mixtral"), "--devices", "64xh100"]
MIXTRAL += ["--global-batch-size", "256", "--fix"]
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess "


@pytest.mark.parametrize(
    ("fix", "graphs", "schedules", "techniques"),
    [
        ("tp=2,pp=4,cp=1,ep=8,micro_batch=1", "", None, ""),
        ("tp=2,pp=1,cp=1,ep=8,micro_batch=2,recompute=full", "", {"none"}, ""),
        (
            "tp=2,pp=1,cp=1,ep=8,micro_batch=1,recompute=layernorm", "", {"none"},
            GRAPHS,
        ),
        (
            "tp=2,pp=4,cp=1,ep=8,micro_batch=1", "--cuda-graph-impl transformer_engine",
            {"1f1b", "interleaved"},
            GRAPHS,
        ),
    ],
)  # fmt: skip
def test_graphs_are_planned_where_the_training_takes_them(
    capsys: pytest.CaptureFixture[str],
    fix: str,
    graphs: str,
    schedules: set[str] | None,
    techniques: str,
) -> None:
    """Schedules of ours exclude them, so their forecast is without."""
    plans = planned(
        capsys, *MIXTRAL, fix, *(["--", *graphs.split()] if graphs else [])
    )["plans"]
    sizes = read_model(EXAMPLES / "mixtral", None, []).flags
    for plan in plans:
        # The example has the dispatcher that the forecast is with.
        assert plan["techniques"] == f"{techniques}--tp-comm-overlap"
        assert schedules is None or plan["schedule"] in schedules
        ours = re.search("--pipeline-schedule|--enable-bitpipe-schedule", plan["flags"])
        assert bool(ours) == (plan["pp"] > 1 and not graphs)
        words = f"{plan['flags']} {plan['techniques']}".replace("'", "").split()
        assert preflight([*sizes, *words], world_size=64).refusals == []


def test_techniques_that_a_model_lacks_are_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [plan, *_] = planned(
        capsys, *LLAMA, "--devices", "8xb200", "--global-batch-size", "64",
        "--fix", "tp=1,pp=1,cp=1,micro_batch=1",
    )["plans"]  # fmt: skip
    assert (
        plan["techniques"]
        == "--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp"
    )


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], "--bf16"),
        (["--precision", "mxfp8"], "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"),
        (
            ["--", "--fp8-format", "hybrid"],
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
        ),
        (["--", "--cross-entropy-loss-fusion"], "--bf16 --cross-entropy-loss-fusion"),
    ],
)
def test_the_flags_have_the_precision_and_the_loss_of_the_forecast(
    capsys: pytest.CaptureFixture[str], words: list[str], flags: str
) -> None:
    sizes = [
        "--devices",
        "8xb200",
        "--global-batch-size",
        "64",
        "--fix",
        "tp=1,pp=1,micro_batch=1",
    ]
    [plan, *_] = planned(capsys, *LLAMA, *sizes, *words)["plans"]
    assert plan["flags"].endswith(f" {flags}")
    precision = "mxfp8" if "mxfp8" in flags else "fp8" if "fp8" in flags else "bf16"
    assert plan["tflops_per_gpu"] / plan["mfu"] == pytest.approx(
        DEVICES["b200"].peak(precision) / 1e12
    )


def test_flags_that_the_search_decides_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "--devices",
        "8xb200",
        "--global-batch-size",
        "64",
        "--fix",
        "tp=1,pp=1,micro_batch=1",
    ]
    given = ["--tensor-model-parallel-size", "8", "--recompute-granularity=full"]
    assert cli.main(["plan", *LLAMA, *sizes, "--", *given]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "plan chooses --tensor-model-parallel-size, --recompute-granularity itself; to set"
    )
    assert shown.out.startswith(
        "Llama 3 8b (8.03 billion parameters) on 8 x b200: 64 sequences"
    )


def test_given_sizes_that_do_not_fit_are_forecast_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--global-batch-size", "8", "--fix", "tp=1,pp=1,micro_batch=8"]
    words = [
        "plan",
        *LLAMA,
        "--devices",
        "1xh100",
        "--precision",
        "MXFP8",
        *sizes,
        "--json",
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    [plan] = json.loads(shown.out)["plans"]
    assert not plan["fits"]
    assert re.match(
        r"does not fit: the worst rank needs \d+ GiB of 79.1; shard", shown.err
    )
    assert (
        "(--use-megatron-fsdp), or keep activations on the host (--cpu-off" in shown.err
    )
    sharded = "shard the weights (--use-megatron-fsdp)"
    for schedule, told in (("1f1b", sharded), ("zb-v", "fix fewer values")):
        fixed = ["--global-batch-size", "8", "--fix", "tp=1,pp=2,micro_batch=4"]
        fixed[-1] += f",schedule={schedule}"
        assert cli.main(["plan", *LLAMA, "--devices", "2xh100", *fixed]) == 0
        shown = capsys.readouterr()
        assert (
            f"of 79.1; {told}, or keep activations on the host (--fine-grained"
            in shown.err
        )
    [_, bars] = shown.out.split(
        "memory per rank in the first layout, out of 79.1 GiB:\n"
    )
    assert max(map(len, bars.splitlines()[:2])) < 70


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*LLAMA, "--devices", "8xh100"], "--global-batch-size is missing"),
        (
            [*LLAMA, "--devices", "8xh100", "--lengths", "f"],
            "--lengths compares schedules for",
        ),
        (
            [*LLAMA, "--devices", "8xh100", "--schedule", "zb-v"],
            "--schedule compares schedules for",
        ),
        (
            [*LLAMA, "--devices", "8xh100", "--bitpipe-order", "zb"],
            "--bitpipe-order compares",
        ),
        (
            [*LLAMA, "--devices", "8xh100", "--use-dpp"],
            "--use-dpp compares schedules for",
        ),
        (
            ["--trace-dir", "run", "--schedule", "zb-v"],
            "--trace-dir takes sizes and costs from the run",
        ),
        ([*LLAMA], "--model needs --devices"),
        (["--no-overlap"], "--no-overlap needs --devices"),
        (
            ["--cross-entropy-loss-fusion"],
            "--cross-entropy-loss-fusion needs --devices",
        ),
        (["gpt"], "unknown argument gpt"),
        (["--devices", "8xh100", "--global-batch-size", "8"], "no model is given"),
        (
            [*LLAMA, "--devices", "8xh100", "--global-batch-size", "8", "--pp", "2"],
            "--fix pp=8",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "zp=2",
            ],
            "unknown key zp",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "tp=2,tp=4",
            ],
            "tp twice",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "pp=x",
            ],
            "pp=2",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "pp=²",
            ],
            "pp=2",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "schedule=fbd",
            ],
            "--fix .* allows no layout",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--",
                "--cuda-graph-impl",
            ],
            "--cuda-graph-impl: expected one argument; use the form that Megatron accepts",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "schedule=zb-w",
            ],
            "did you mean zb-",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "layout=Et|tL",
            ],
            "has 2 layers, .* has 32",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "layout=Et*32|L|",
            ],
            "MTP and the loss only in the last; put E first and mL last",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "pp=4,layout=Et*16|t*16L",
            ],
            "--fix .* allows no layout",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "tp=16,pairs=no",
            ],
            "with --fix tp=16,pairs=no; use sizes whose product divides the devices",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "schedule=zb-v",
                "--",
                "--cuda-graph-impl",
                "local",
            ],
            "--fix schedule=zb-v cannot be combined with CUDA graphs, .* remove --cuda-graph-impl",
        ),
        (
            [*LLAMA, "--devices", "1xh100", "--global-batch-size", "64"],
            r"not fit .*; use [24]",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "1xh100",
                "--global-batch-size",
                "1",
                "--memory-gib",
                ".2",
            ],
            "use devices with more memory",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "64",
                "--memory-gib",
                "12",
            ],
            "not fit on 8 x h100 under any layout; use (16|24|32)$",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "64",
                "--fix",
                "tp=2,pp=1,cp=1,recompute=none",
                "--memory-gib",
                "50",
            ],
            r"not fit on 8 x h100 with recompute=none; use --fix recompute=(layernorm\+mlp|full)$",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "recompute=all",
            ],
            "for Llama 3 8b, use none or any of full, layernorm, mlp",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--picture",
                "a.png",
            ],
            "unknown file type; use .svg",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--picture",
                "/no/a.svg",
                "--fix",
                "pp=2",
            ],
            "/no/a.svg.*; give another --picture",
        ),
        (
            [
                *LLAMA,
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--fix",
                "pp=1",
                "--picture",
                "a.svg",
            ],
            "no pipeline to draw",
        ),
        (
            [
                "--devices",
                "8xh100",
                "--global-batch-size",
                "8",
                "--",
                "--num-layers",
                "100000000",
                "--hidden-size",
                "64",
                "--num-attention-heads",
                "4",
                "--vocab-size",
                "99",
            ],
            "--num-layers 100000000 cannot be planned",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) != 0
    shown = capsys.readouterr().err.strip()
    assert re.search(message, shown), shown
    assert "\n" not in shown


def test_the_picture_shows_schedule_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "first.svg"
    words = [
        "plan",
        *LLAMA,
        "--devices",
        "8xh100",
        "--global-batch-size",
        "16",
        "--fix",
    ]
    assert (
        cli.main([*words, "pp=4,schedule=zb-h1,micro_batch=1", "--picture", str(path)])
        == 0
    )
    text = path.read_text()
    assert (
        text.count('class="lane"') == 4 + 4 + 1
    )  # of the schedule, of memory, in the legend
    assert text.count('class="memory"') == 4
    assert "time: s" in text
    assert "memory, of 79.1 GiB" in text


def start_search(*words: str) -> tuple[subprocess.Popen[str], int]:
    """Start a search for DeepSeek-V3 on many devices; return it and its terminal."""
    main, other = pty.openpty()
    job = ["--model", str(EXAMPLES / "deepseek-v3"), "--devices", "2048xh100"]
    job += ["--global-batch-size", "15360", "--seq-length", "4096", "--json", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", "plan", *job],
        stdout=subprocess.PIPE, stderr=other, text=True,
    )  # fmt: skip
    os.close(other)
    return process, main


def test_progress_is_shown_and_an_interrupt_gives_the_best_so_far() -> None:
    process, terminal = start_search(
        "--fix", "pp=8,micro_batch=1"
    )  # a first layout soon
    shown = ""
    while "best " not in shown:
        shown += os.read(terminal, 1000).decode()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 0
    assert "Ctrl-C stops" in shown
    found = json.loads(out)
    assert not found["is_complete"]
    assert found["plans"]
    assert found["bound_s"] <= found["plans"][0]["step_s"]


def test_an_interrupt_before_the_first_layout_is_one_line() -> None:
    process, terminal = start_search()
    assert b"0 layouts, " in os.read(terminal, 1000)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert os.read(terminal, 1000) == b"\r\x1b[Kmegatron-ext: interrupted\r\n"
    os.close(terminal)
    assert process.returncode == 130
    assert not out


def test_it_starts_without_torch_and_megatron() -> None:
    code = (
        "import sys; from megatron_ext import cli; "
        f"cli.main(['plan', *{LLAMA!r}, '--devices', '8xh100', '--global-batch-size', '16', "
        "'--json']); sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
