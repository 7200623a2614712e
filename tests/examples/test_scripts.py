"""The scripts for one node, two nodes and a hostfile, and those with names that users know."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.examples.scripts import (
    REPO,
    bash,
    dry_run,
    make_data,
    megatron_flags,
    value_of,
)
from tests.ranks import losses, run_script

SINGLE = "examples/gpt/run_single.sh"
TWO = "--node-ips 10.0.0.1 10.0.0.2".split()


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt", {"tensor": "2", "pipeline": "2"}),
        ("bert", {"tensor": "1", "pipeline": "4"}),
    ],
)
def test_one_node(model: str, sizes: dict[str, str]) -> None:
    words = dry_run(f"examples/{model}/run_single.sh", "--mock-data")
    for kind, size in sizes.items():
        flag = f"--{kind}-model-parallel-size"
        assert (value_of(words, flag) if flag in words else "1") == size
    assert {"--use-dpp", "--trace", "--standalone"} <= set(words)


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_two_nodes_run_the_same_but_for_their_rank(model: str) -> None:
    master = dry_run(f"examples/{model}/run_master.sh", *TWO)
    worker = dry_run(f"examples/{model}/run_worker.sh", *TWO)
    assert value_of(master, "--node-rank") == "0"
    assert value_of(worker, "--node-rank") == "1"
    position = master.index("--node-rank") + 1
    assert (
        master[:position] + master[position + 1 :]
        == worker[:position] + worker[position + 1 :]
    )
    assert value_of(worker, "--nnodes") == "2"
    assert value_of(worker, "--master-addr") == "10.0.0.1"
    assert value_of(worker, "--tensor-model-parallel-size") == "4"
    assert worker[-3:] == TWO


@pytest.mark.parametrize(
    ("size", "schedule", "cut"),
    [
        ("8b", "zb-h1", "--decoder-last-pipeline-num-layers"),
        ("8b", "1f1b", "--decoder-last-pipeline-num-layers"),
        ("8b", "zb-v", None),
        ("8b", "interleaved", None),
        ("70b", "interleaved", "--num-layers-per-virtual-pipeline-stage"),
        ("70b", "zb-h1", None),
        ("70b", "bitpipe", None),
    ],
)
def test_a_published_cut_is_kept_where_the_schedule_can(
    size: str, schedule: str, cut: str | None
) -> None:
    chosen = ["--size", size, "--pipeline-schedule", schedule]
    words = dry_run("examples/llama3/run.sh", *chosen, "--mock-data", NPROC="32")
    cuts = (
        "--decoder-last-pipeline-num-layers",
        "--num-layers-per-virtual-pipeline-stage",
    )
    assert [flag for flag in cuts if flag in words] == ([cut] if cut else [])


@pytest.mark.parametrize(
    ("flags", "nproc", "told"),
    [
        (
            ["--expert-model-parallel-size", "8"],
            "16",
            "tensor 1 x expert 8 x pipeline 4 = 32",
        ),
        (
            ["--context-parallel-size", "2"],
            "12",
            "pipeline 4 x context 2 = 8 processes",
        ),
        (
            ["--enable-bitpipe-schedule", "--expert-model-parallel-size", "8"],
            "16",
            None,
        ),
    ],
)
def test_processes_have_to_hold_the_experts(
    flags: list[str], nproc: str, told: str | None
) -> None:
    done = bash(
        "examples/mixtral/run.sh", "--dry-run", "--mock-data", *flags, NPROC=nproc
    )
    assert done.returncode == (0 if told is None else 2), done.stderr
    assert (told or "") in done.stderr


def test_a_worker_needs_the_address_of_the_master() -> None:
    done = bash("examples/gpt/run_worker.sh", "--dry-run")
    assert done.returncode == 2
    assert (
        "NNODES=2 needs NODE_RANK (0 to 1) and MASTER_ADDR"
        in done.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("size", ["--tiny", "--size=1b"])
def test_dynamic_order_is_one_flag(size: str, tmp_path: Path) -> None:
    """With its line removed from the script, Megatron's own interleaved schedule runs."""
    folder = tmp_path / "examples"
    (folder / "gpt").mkdir(parents=True)
    for name in (
        "common.sh",
        "train.sh",
        "gpt/run.sh",
        "gpt/model.env",
        "gpt/run_single.sh",
    ):
        shutil.copy(REPO / "examples" / name, folder / name)
    script = folder / "gpt/run_single.sh"
    kept = [line for line in script.read_text().splitlines() if "--use-dpp" not in line]
    script.write_text("\n".join(kept) + "\n")
    asked = size.split("=")
    ours, theirs = (
        dry_run(path, *asked, "--mock-data") for path in (SINGLE, str(script))
    )
    here, there = str(REPO), str(tmp_path)
    assert [word for word in ours if word != "--use-dpp"] == [
        w.replace(there, here) for w in theirs
    ]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("gpt", "python_reference"),
        pytest.param("bert", "word_pieces", marks=pytest.mark.slow),
    ],
)
def test_dynamic_order_changes_no_loss(model: str, data: str, tmp_path: Path) -> None:
    make_data(data)
    # With 0 steps of evaluation, 0.16.1 builds an empty set for BERT and refuses it.
    few = "--train-iters 2 --log-interval 1 --eval-iters 1 --num-workers 0 --micro-batch-size 1 "
    few += "--global-batch-size 4"
    trace = tmp_path / "trace"
    single = f"examples/{model}/run_single.sh"
    words = dry_run(single, "--tiny", *few.split(), "--trace-dir", str(trace))
    flags = megatron_flags(words)
    stored = flags.index("--save")
    del flags[stored : stored + 4]  # and --load
    static = [word for word in flags if word not in ("--use-dpp", "--trace")]
    del static[static.index("--trace-dir") :]  # the last flag
    script = f"pretrain_{model}.py"
    dynamic_logs = run_script(4, script, flags)
    static_logs = run_script(4, script, [*static, "--microbatch-rng"])
    first, last = re.findall(r"pipeline schedule: (.*)", "".join(dynamic_logs))
    assert re.search(
        r"dynamic order by hint, at most [\d.]+ activations \(\+1\); .*; messages over the fast",
        first,
    )
    assert re.search(
        r"order by hint, measured over 2 steps: [\d.]+ % of actions out of order, "
        r"[\d.]+ % of the time idle, at most [\d.]+ activations",
        last,
    )
    found = losses(dynamic_logs)
    assert len(found) == 2
    if (
        model == "bert"
    ):  # HuggingFace's order of the vocabulary, which masks are of, changes
        assert found == pytest.approx(losses(static_logs), rel=0.01)
    else:
        assert found == losses(static_logs)
    assert len(list(trace.glob("benchmark-data-*.json"))) == 4


def test_a_hostfile_starts_the_launcher() -> None:
    words = dry_run(
        "examples/llama3/run.sh",
        "--tiny",
        "--hostfile",
        "hostfiles/localhost",
        NPROC="2",
    )
    assert words[:3] == ["#", "localhost", "cd"]
    assert value_of(words, "--nproc-per-node") == "2"
    assert value_of(words, "--pipeline-model-parallel-size") == "2"
    assert words.count("pretrain_gpt.py") == 1


FAILING = """\
import os, sys
if os.environ["RANK"] == "1":
    print(" iteration 1/ 2 | lm loss: 4.855E+00 |", flush=True)
    sys.exit("the data ends here")
"""


def test_a_hostfile_shows_what_the_launcher_shows(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(FAILING)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [
        "--tiny",
        "--mock-data",
        "--hostfile",
        "hosts",
        "--out",
        str(tmp_path / "out"),
    ]
    env = {"MEGATRON_EXT_RUNS": str(tmp_path / "runs")}
    done = bash(str(REPO / "examples/llama3/run.sh"), *words, cwd=tmp_path, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "iteration 1/2  loss 4.8550" in done.stdout
    assert (
        "failed first: localhost: rank 1 ended with exit code 1 after iteration 1: "
        "the data ends here (sys.exit at pretrain_gpt.py:4); everything: "
    ) in done.stdout


@pytest.mark.parametrize(
    ("script", "layers"),
    [
        ("examples/llama3/dist_run_pretrain_megatron_llama3_musa.sh", "32"),
        ("examples/deepseek-v2/run_deepseekv2.sh", "60"),
    ],
)
def test_names_that_users_know(script: str, layers: str, tmp_path: Path) -> None:
    """Scripts take the hosts of a file and look for nothing on the machine that starts them."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("# two nodes\n10.0.0.1 slots=32\n10.0.0.2 slots=32")
    done = bash(
        script, "--dry-run", "--data-path", "P", "--device-backend", "musa",
        HOSTFILE=str(hosts), MEGATRON_EXT_DEVICE=None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (
        line for line in done.stdout.splitlines() if "torch.distributed.run" in line
    )
    assert "--node-rank 0" in first
    assert "--node-rank 1" in second
    assert f"--num-layers {layers} " in second
    assert "MUSA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in second
    assert "MCCL_IB_GID_INDEX=3" in second
    assert "--device-backend musa" in second


def test_scripts_remove_nothing_of_the_user() -> None:
    scripts = [*(REPO / "examples").glob("*/*.sh"), REPO / "examples/train.sh"]
    assert len(scripts) > 12
    for script in scripts:
        text = re.sub(r"^\s*#.*", "", script.read_text(), flags=re.MULTILINE)
        assert not re.search(r"\brm\b|/dev/shm|\bpkill\b|\bkillall\b|sed -i", text), (
            script
        )


@pytest.mark.parametrize("program", ["python_reference", "word_pieces"])
def test_a_disk_that_is_full_is_one_line(program: str, tmp_path: Path) -> None:
    text, output = tmp_path / "text.jsonl", tmp_path / "tokenizer"
    text.write_text('{"text": "one two two"}\n')
    output.mkdir()
    (output / "config.json").symlink_to("/dev/full")
    words = [str(text), str(output)]
    if program == "python_reference":
        words = [str(output / "config.json")]
    done = run_python(str(REPO / f"examples/data/{program}.py"), *words)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"{words[-1]} cannot be written: No space left on device; make room there"
    )
