"""The example scripts: what they would run, what they refuse, and the tiny run from end to end."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.schedules import registered
from megatron_ext.upstream import releases
from tests.examples.scripts import LLAMA3, REPO, bash, dry_run, megatron_flags, value_of
from tests.ranks import parse


def test_the_tiny_command() -> None:
    words = dry_run(LLAMA3, "--tiny", "--log-interval", "7")
    assert words[1:3] == ["-m", "torch.distributed.run"]
    launch = words[: words.index("pretrain_gpt.py")]
    assert launch[-2:] == ["-m", "megatron_ext"]
    assert "--standalone" in launch
    assert value_of(launch, "--nproc-per-node") == "4"
    assert value_of(words, "--pipeline-model-parallel-size") == "2"
    assert value_of(words, "--tokenizer-type") == "NullTokenizer"
    assert words[-2:] == ["--log-interval", "7"]


def test_a_removed_flag_is_one_line() -> None:
    done = bash(LLAMA3, "--tiny", "--embedded", "--dry-run")
    assert done.returncode == 2
    assert done.stderr == (
        "run.sh: error: --embedded no longer exists; remove it: Megatron's own loop trains\n"
    )


def test_one_process_has_no_pipeline() -> None:
    words = dry_run(LLAMA3, "--tiny", NPROC="1")
    assert value_of(words, "--nproc-per-node") == "1"
    assert value_of(words, "--pipeline-model-parallel-size") == "1"


def test_the_full_size_is_the_published_one() -> None:
    words = dry_run(LLAMA3)
    expected = {
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--ffn-hidden-size": "14336",
        "--num-attention-heads": "32",
        "--num-query-groups": "8",
        "--seq-length": "8192",
        "--rotary-base": "500000",
        "--nproc-per-node": "8",
        "--decoder-last-pipeline-num-layers": "14",
    }
    assert {flag: value_of(words, flag) for flag in expected} == expected
    assert {"--bf16", "--swiglu", "--untie-embeddings-and-output-weights"} <= set(words)


@pytest.mark.parametrize("size", [["--tiny"], []], ids=["tiny", "8b"])
def test_the_flags_hang_together(size: list[str]) -> None:
    """Upstream's parser takes them, and the parallel sizes come out as intended."""

    words = dry_run(LLAMA3, *size)
    world = value_of(words, "--nproc-per-node")
    data = [] if size else ["--mock-data", "--vocab-size", "128256"]
    args = parse("gpt", [*megatron_flags(words), *data], {"WORLD_SIZE": world})
    assert args.pipeline_model_parallel_size == 2
    assert args.data_parallel_size == int(world) // 2
    assert args.num_query_groups < args.num_attention_heads


@pytest.mark.parametrize("size", [["--tiny"], []], ids=["tiny", "8b"])
@pytest.mark.parametrize("name", registered())
def test_every_schedule_can_be_asked_for(name: str, size: list[str]) -> None:
    """One pipeline of 4 where two are mirrored, else two pipelines of 2: no other flag needed."""
    from megatron_ext.config.active import clear_configuration, pipeline

    words = dry_run(LLAMA3, *size, "--pipeline-schedule", name)
    world = value_of(words, "--nproc-per-node")
    data = [] if size else ["--mock-data", "--vocab-size", "128256"]
    try:
        args = parse("gpt", [*megatron_flags(words), *data], {"WORLD_SIZE": world})
        chosen = pipeline()
        assert chosen is not None
        assert chosen.name == name
        assert (chosen.pp, args.pipeline_model_parallel_size) == (
            2 * chosen.config.twins,
            2,
        )
    finally:
        clear_configuration()


def test_an_option_may_have_its_value_behind_a_sign(tmp_path: Path) -> None:
    words = dry_run(LLAMA3, "--size=70b", f"--out={tmp_path}", NPROC="32")
    assert words == dry_run(LLAMA3, "--size", "70b", "--out", str(tmp_path), NPROC="32")
    assert value_of(words, "--num-layers") == "80"


def test_mirrored_pipelines_need_four_processes() -> None:
    done = bash(LLAMA3, "--dry-run", "--tiny", "--enable-bitpipe-schedule", NPROC="2")
    assert done.returncode == 2
    assert (
        "needs a multiple of 4 processes, but NPROC is 2; use NPROC=4, or zb-v"
        in done.stderr
    )


def test_several_nodes() -> None:
    words = dry_run(LLAMA3, NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    assert value_of(words, "--nnodes") == "2"
    assert value_of(words, "--node-rank") == "1"
    assert value_of(words, "--master-addr") == "node0"
    assert "--standalone" not in words


def test_the_command_can_be_pasted() -> None:
    done = bash(LLAMA3, "--dry-run", "--tiny", "--moe-layer-freq", "([0]*1+[1]*7)")
    assert r"--moe-layer-freq \(\[0\]\*1+\[1\]\*7\)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 200


def test_a_dry_run_needs_no_environment_and_makes_none(tmp_path: Path) -> None:
    folder = copy_of_the_scripts(tmp_path)
    done = bash(str(folder / LLAMA3), "--tiny", "--dry-run", VIRTUAL_ENV=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python3 -m torch.distributed.run")
    assert not (folder / ".venv").exists()


def copy_of_the_scripts(tmp_path: Path, model: str = "llama3") -> Path:
    folder = tmp_path / "clone"
    for name in ("common.sh", "train.sh", f"{model}/run.sh", f"{model}/model.env"):
        name = f"examples/{name}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((REPO / name).read_bytes())
    for name in ("pyproject.toml", "CMakeLists.txt"):
        (folder / name).touch()
    (folder / "csrc").mkdir()
    return folder


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        (["stray"], {}, 'unexpected "stray"; flags start with --'),
        (["--out"], {}, "--out needs a value"),
        (
            ["--tiny", "--out", "/proc/x"],
            {},
            "--out /proc/x cannot be created; name a folder",
        ),
        (
            ["--size", "9b"],
            {},
            "--size 9b does not exist; use one of: 70b 8b tiny",
        ),
        (["--hostfile", "/absent"], {}, "--hostfile /absent does not exist"),
        (["--tiny"], {"NPROC": "none"}, "NPROC=none is not a number of processes"),
        (
            ["--dry-run", "--size", "70b"],
            {},
            "one copy of the model takes tensor 8 x pipeline 4",
        ),
        (["--tiny"], {"VIRTUAL_ENV": "/absent"}, "/absent has no bin/python"),
        (
            ["--tiny"],
            {"MEGATRON_EXT_DEVICE": "abacus"},
            "MEGATRON_EXT_DEVICE is 'abacus'",
        ),
        (["--data-path", "p"], {}, "the 8b model needs accelerators"),
        (["--tinny"], {}, "--tinny is not a flag of this script; did you mean --tiny?"),
        (["--dry-run", "--pipeline-schedule", "zbv"], {}, "did you mean zb-v?"),
        (
            ["--tiny", "--num-layers", "4x"],
            {},
            "--num-layers is '4x'; it must be a whole number",
        ),
        (["--tiny", "--num-layrs", "4"], {}, "did you mean --num-layers?"),
        (
            ["--dry-run"],
            {"NNODES": "2"},
            "NNODES=2 needs NODE_RANK (0 to 1) and MASTER_ADDR",
        ),
    ],
)
def test_bad_input_is_explained(
    flags: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = bash(LLAMA3, *flags, **env)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prefix_may_have_only_a_versioned_python(tmp_path: Path) -> None:
    """Such as /usr in a container."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text("#!/bin/sh\necho torch\n")  # says which modules are missing
    python.chmod(0o755)
    done = bash(LLAMA3, "--tiny", VIRTUAL_ENV=str(tmp_path))
    assert done.returncode == 2
    assert f"the environment {tmp_path} lacks torch" in done.stderr


def test_bert_is_refused_before_a_release_without_it_is_installed(
    tmp_path: Path,
) -> None:
    folder = copy_of_the_scripts(tmp_path, "bert")
    done = bash(str(folder / "examples/bert/run.sh"), "--tiny", VIRTUAL_ENV=None)
    assert done.returncode == 2
    assert (
        "start again with MEGATRON_CORE=0.17.1 and MEGATRON_LM_PATH=DIR" in done.stderr
    )
    assert not (folder / ".venv").exists()


LOCAL = [
    "--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
]  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "flags"),
    [
        ([], [*LOCAL, "--no-gradient-accumulation-fusion"]),
        (["transformer_engine"], ["--no-gradient-accumulation-fusion"]),
        (["fused_weight_gradient_mlp_cuda"], LOCAL),
        (["transformer_engine", "fused_weight_gradient_mlp_cuda"], []),
    ],
)
def test_kernels_that_a_gpu_lacks_are_switched_off(
    installed: list[str], flags: list[str], tmp_path: Path
) -> None:
    for module in installed:
        (tmp_path / f"{module}.py").touch()
    lines = [
        "HERE=examples/llama3; source examples/train.sh",
        f"PYTHON={shlex.quote(sys.executable)} DEVICE=cuda EXTRA=()",
        "choose_kernels",
        'echo ${KERNELS[@]+"${KERNELS[@]}"}',
    ]
    done = bash("-euc", "\n".join(lines), PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == flags, done.stderr


def test_without_a_usable_python_the_remedy_is_named(tmp_path: Path) -> None:
    folder = copy_of_the_scripts(tmp_path)
    done = bash(
        str(folder / LLAMA3), "--tiny", VIRTUAL_ENV=None, PYTHON3="/absent/python3"
    )
    assert done.returncode == 2
    assert "found no Python >= 3.10" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def fake_python(path: Path, version: str, *, headers: bool = True) -> Path:
    """A Python of another version: this one, which says so."""
    lines = [
        "import ensurepip, sys, sysconfig, venv",
        f"sys.executable = {str(path)!r}",
        f"sys.version_info = ({version.replace('.', ', ')}, 'final', 0)",
    ]
    if not headers:
        lines.append("sysconfig.get_paths = lambda: {'include': '/nowhere'}")
    before = shlex.quote("\n".join(lines) + "\n")
    program = f'exec {shlex.quote(sys.executable)} -c {before}"$2"'
    path.write_text(f"#!/bin/bash\n[[ $1 == -c ]] && {program}\nexit 1\n")
    path.chmod(0o755)
    return path


def test_the_newest_python_is_taken_that_has_the_headers(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "python3.9", "3.9.1")
    new = fake_python(tmp_path / "python3.13", "3.13.0")
    bare = fake_python(tmp_path / "python3.14", "3.14.0", headers=False)

    def chosen(*candidates: Path) -> str:
        return common(
            f"PYTHON3={shlex.quote(' '.join(map(str, candidates)))} find_python"
        ).stdout

    assert chosen(bare, old, new) == f"{new}\n"
    assert chosen(old, bare) == f"{bare}\n"
    path = f"PATH={tmp_path}:/usr/bin:/bin; unset PYTHON3; find_python"
    assert common(path).stdout == f"{new}\n"


def test_an_environment_with_another_python_or_torch_is_not_taken_for_the_one_asked_for(
    tmp_path: Path,
) -> None:
    folder = copy_of_the_scripts(tmp_path)
    (folder / ".venv" / "bin").mkdir(parents=True)
    fake_python(folder / ".venv" / "bin" / "python", "3.11.2")
    asked = fake_python(tmp_path / "python3.12", "3.12.1")
    done = bash(str(folder / LLAMA3), "--tiny", VIRTUAL_ENV=None, PYTHON3=str(asked))
    assert done.returncode == 2
    assert (
        f"PYTHON3={asked} is Python 3.12, but {folder}/.venv was made with 3.11"
        in done.stderr
    )
    assert f"rm -r {folder}/.venv" in done.stderr
    done = bash(str(folder / LLAMA3), "--tiny", VIRTUAL_ENV=None, TORCH_VERSION="1.2.3")
    assert done.returncode == 2
    assert f"TORCH_VERSION is 1.2.3, but {folder}/.venv has torch " in done.stderr
    done = bash(
        str(folder / LLAMA3), "--tiny", VIRTUAL_ENV=None, PYTHON3="/absent/python3"
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "found no Python >= 3.10" in line


def common(script: str) -> subprocess.CompletedProcess[str]:
    return bash("-c", f"set -euo pipefail; source examples/common.sh; {script}")


def test_the_last_value_of_a_flag_counts() -> None:
    done = common("flag_value --a 0 --a 1 --b 5 --a=3; flag_value --c none --a 1")
    assert done.stdout.split() == ["3", "none"]


def test_a_command_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    done = common(
        f"RAW=true; run_command {tmp_path}/log bash -c 'echo out; echo err >&2; exit 7'"
    )
    assert done.returncode == 7
    assert sorted(done.stdout.split()) == ["err", "out"]
    assert (tmp_path / "log").read_text() == done.stdout


def test_a_command_that_has_ended_before_it_is_waited_for_keeps_its_exit_code(
    tmp_path: Path,
) -> None:
    slow_trap = (
        'trap() { builtin trap "$@"; sleep 0.3; }'  # comes between starting and waiting
    )
    assert common(f"{slow_trap}; run_command {tmp_path}/log false").returncode == 1


def test_termination_reaches_the_command(tmp_path: Path) -> None:
    program = (
        f"trap 'echo told; exit 3' TERM; touch {tmp_path}/started; "
        "while :; do sleep 0.1; done"
    )
    run = f"RAW=true; run_command {tmp_path}/log bash -c {shlex.quote(program)}"
    script = f"source examples/common.sh; {run}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=REPO, stdout=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert output == b"told\n"
    assert process.returncode == 3


@pytest.mark.parametrize(
    ("latest", "more", "told"),
    [
        ("", "", "starts from random weights, checkpoints go to out"),
        ("6", "", "resumes from iteration 6 of {load}"),
        (
            "4",
            "",
            "trains to iteration 8; run again with --load out, without --finetune, to continue",
        ),
        (
            "4",
            "--save {load}",
            "trains to iteration 8; run again to continue from there",
        ),
        ("6", "--finetune", "starts from the weights in {load}, checkpoints go to out"),
        (
            "release",
            "--save there",
            "starts from the weights in {load}, checkpoints go to there",
        ),
        ("8", "", "nothing to do: already trained to --train-iters 8"),
    ],
)
def test_the_folder_that_is_loaded_is_named(
    tmp_path: Path, latest: str, more: str, told: str
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest or "0")
    given = (
        f"--save out --load out --train-iters 8 --exit-interval 4 --load {tmp_path} "
    )
    given += more.format(load=tmp_path)
    done = bash(
        "-c",
        f"HERE=examples/llama3; source examples/train.sh; FLAGS=({given}); announce",
    )
    assert told.format(load=tmp_path) in done.stdout


@pytest.mark.e2e
@pytest.mark.usefixtures("a_training_loop")
def test_the_tiny_run_learns_and_resumes(tmp_path: Path) -> None:
    flags = [
        "--tiny",
        "--out",
        str(tmp_path),
        "--log-interval",
        "1",
        "--eval-iters",
        "1",
    ]
    first = bash(LLAMA3, *flags, "--train-iters", "6", NPROC="2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "starts from random weights" in first.stdout
    shown = re.search(r"loss (\S+) at iteration 1, (\S+) at iteration 6", first.stdout)
    assert shown, first.stdout
    assert float(shown[2]) < float(shown[1]) < 7

    second = bash(LLAMA3, *flags, "--train-iters", "8", NPROC="2")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"resumes from iteration 6 of {tmp_path}/checkpoints" in second.stdout
    resumed = re.search(
        r"loss (\S+) at iteration 7, (\S+) at iteration 8", second.stdout
    )
    assert resumed, second.stdout
    assert float(resumed[1]) < float(shown[1])

    third = bash(LLAMA3, *flags, "--train-iters", "8", NPROC="2")
    assert third.returncode == 0
    assert "nothing to do: already trained to --train-iters 8" in third.stdout


@pytest.mark.e2e
@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.slow
def test_the_tiny_run_goes_on_under_another_schedule(tmp_path: Path) -> None:
    flags = [
        "--tiny",
        "--out",
        str(tmp_path),
        "--log-interval",
        "1",
        "--eval-iters",
        "1",
    ]
    losses = []
    for index, name in enumerate((None, "zb-v")):
        chosen = ["--pipeline-schedule", name] if name else []
        done = bash(
            LLAMA3, *flags, *chosen, "--train-iters", str(2 * index + 2), NPROC="2"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        line = r"(?m)^megatron_ext: pipeline schedule: (\S+).* on \d+ ranks"
        begun = re.findall(line, done.stdout)
        assert begun == ([name] if name else [])
        steps = re.findall(r"(?m)^iteration \d+/\d+  loss (\S+)", done.stdout)
        losses += [float(loss) for loss in steps]
    assert len(losses) == 4
    assert losses[2] < losses[1]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.tree
@pytest.mark.skipif(
    not releases.has_training(), reason="the wheel has no training loop"
)
def test_both_ways_print_the_same_losses(
    tmp_path: Path, megatron_lm_path: Path
) -> None:
    """Upstream's script, and the few lines that stand in for it without a tree."""
    printed = []
    for tree in (str(megatron_lm_path), None):
        flags = [
            "--tiny",
            "--train-iters",
            "3",
            "--log-interval",
            "1",
            "--eval-iters",
            "1",
        ]
        out = str(tmp_path / str(tree is None))
        done = bash(LLAMA3, *flags, "--out", out, MEGATRON_LM_PATH=tree)
        assert done.returncode == 0, done.stdout + done.stderr
        log = Path(out, "log.txt").read_text(encoding="utf-8")
        assert ("with the wheel's megatron.training" in log) == (tree is None)
        printed.append(re.findall(r"lm loss: (\S+)", log))
    assert len(printed[0]) == 3
    assert printed[1] == printed[0]


@pytest.mark.e2e
@pytest.mark.usefixtures("a_training_loop")
def test_an_unknown_flag_is_named_last(tmp_path: Path) -> None:
    done = bash(LLAMA3, "--tiny", "--out", str(tmp_path), "--no-such-flag", NPROC="1")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "checkpoints").exists()
