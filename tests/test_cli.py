"""The `megatron-ext` command: golden list of subcommands, output and exit codes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.config.flags import add_arguments, pipeline_config
from megatron_ext.config.pipeline_config import PipelineConfig
from tests.commands import run_package, run_python, subcommands


def test_the_subcommands_are_these() -> None:
    assert subcommands() == {
        "aggregate", "compare", "doctor", "launch", "logs", "patches", "plan", "plot",
        "report", "status", "stop", "upstream",
    }  # fmt: skip


def test_our_training_flags_are_these() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    add_arguments(parser)  # a second time changes nothing
    flags = {option for action in parser._actions for option in action.option_strings}
    assert flags == {
        "-h", "--help", "--device-backend", "--ext-list-patches",
        "--pipeline-schedule", "--enable-bitpipe-schedule", "--bitpipe-order", "--bitpipe-routing",
        "--pipeline-costs", "--pipeline-layout",
        "--use-dpp", "--dpp-policy", "--dpp-extra-activations",
        "--pipeline-slices", "--pipeline-slice-tokens", "--pipeline-balance",
        "--pipeline-length-costs", "--pipeline-waiting-weights",
        "--variable-seq-lengths", "--microbatch-rng",
        "--forward-backward-disaggregating", "--ignore-forward-tensor-parallel",
        "--fbd-activations",
        "--fbd-forward-device",  # removed, and says so
        "--pipeline-transport", "--node-ips", "--pipeline-device-path", "--pipeline-checksum",
        "--trace", "--trace-interval", "--trace-iterations", "--trace-dir", "--hang-timeout",
        "--data-impl",
    }  # fmt: skip


def test_settings_missing_from_a_namespace_get_their_defaults() -> None:
    assert pipeline_config(argparse.Namespace()) == PipelineConfig()
    config = pipeline_config(argparse.Namespace(device_backend="cpu", other=1))
    assert config == PipelineConfig(device="cpu")


@pytest.mark.short_s(8)  # the only test of --json
def test_listing_shows_each_patch_with_target_and_reason() -> None:
    lists = "cli.main(['patches', 'list']); print(chr(0)); cli.main(['patches', 'list', '--json'])"
    done = run_python("-c", f"from megatron_ext import cli; {lists}")
    assert done.returncode == 0, done.stderr
    text, found = done.stdout.split("\0")
    rows = json.loads(found)
    ids = {row["id"] for row in rows}
    assert {
        patch.id for patch in importlib.import_module("megatron_ext.patches").rows()
    } <= ids
    assert all(row["reason"] and ":" in row["target"] and row["intact"] for row in rows)
    states = {row["id"]: row["state"] for row in rows}
    assert states["arguments.flags"] in {"pending", "installed"}
    assert "torch names redirected" in text
    assert "megatron.training.arguments:validate_args" in text


def test_check_passes_on_the_pin() -> None:
    done = run_package("patches", "check")
    assert "Warning" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("0 problems")


def test_upstream_check_compares_the_tree_with_the_pin(megatron_lm_path: Path) -> None:
    done = run_package("upstream", "check")
    assert done.returncode == 0, done.stdout
    assert str(megatron_lm_path) in done.stdout
    assert run_package("upstream", "path").stdout.strip() == str(
        megatron_lm_path.resolve()
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["upstream", "path"], 2, "no Megatron-LM tree was found"),
        (["upstream", "fetch", "--url", "file:///nowhere"], 2, "git could not fetch"),
        (["nonsense"], 2, "'nonsense' is not a command; use one of "),
        (["plann"], 2, "'plann' is not a command; did you mean plan?"),
        (["patches"], 2, "ACTION is missing; see megatron-ext patches --help"),
        (["plan"], 2, "--pp and --microbatches are missing; give them"),
        (["plan", "--pp", "four"], 2, "--pp is 'four'; it must be a whole number"),
        (["plan", "--microbach", "4"], 2, "--microbach; did you mean --microbatches?"),
        (
            ["plan", "--qwerty", "4", "--microbach", "4", "--asdfgh"],
            2,
            "--microbatches? unknown arguments --qwerty, --asdfgh; see megatron-ext plan --help",
        ),
        (["plan", "--fp8"], 2, "--fp8 was removed; use --precision fp8"),
        (
            ["patches", "list", "--markdown"],
            2,
            "--markdown was removed; python website/",
        ),
        (["plot", "zbv", "--pp", "4", "--microbatches", "8"], 2, "did you mean zb-v?"),
        (["plot"], 2, "NAME is missing"),
        (["aggregate"], 2, "--trace-dir is missing"),
        (["report"], 2, "--trace-dir is missing"),
        (["plan", "--pp"], 2, "--pp: expected one argument"),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str], code: int, message: str
) -> None:
    done = run_package(*arguments, MEGATRON_LM_PATH="")
    assert done.returncode == code
    [line] = done.stderr.splitlines()
    assert line.startswith("megatron-ext: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("launch --nproc 2 -- pretrain_gptt.py", "did you mean pretrain_gpt.py?"),
        (
            "launch --dry-run --nproc 2 -- pretrain_gpt.py --pipeline-transport smh",
            "did you mean shm?",
        ),
        (
            "plan --model examples/llama3 --devices 8xh100 --global-batch-size 8",
            "in a clone of megatron_ext (--model CLONE/examples/llama3)",
        ),
        (
            "report --trace-dir absent",
            "give the folder of a run that was trained with --trace",
        ),
        ("plot csv:absent.csv", "-o FILE.csv` writes such a file"),
    ],
)
def test_what_is_not_there_has_a_remedy(
    words: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert remedy in line


def test_help_shows_every_command_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for name in subcommands():
        assert f"$ megatron-ext {name}" in text
    pages = set(re.findall(r"docs/\w+\.md", text))
    assert len(pages) == 4
    assert all((Path(__file__).parents[1] / page).exists() for page in pages)
    for name in subcommands():
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "example: megatron-ext" in text
        for optional in ("[--trace-dir", "[--pp"):
            assert optional not in text


def on_the_standard_library(*words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-m", "megatron_ext", *words],
        capture_output=True, text=True, timeout=200, check=False, cwd=root, env=environment,
    )  # fmt: skip


FLIGHT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 1024 "
    "--bf16 --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 4 "
    "--pipeline-schedule zb-v --disable-bias-linear"
).split()


def test_planning_needs_the_standard_library_alone(tmp_path: Path) -> None:
    for words in (
        ["plan", "--pp", "4", "--microbatches", "8"],
        [
            "plot",
            "zb-v",
            "--pp",
            "2",
            "--microbatches",
            "4",
            "-o",
            str(tmp_path / "x.svg"),
        ],
        ["doctor", "--devices", "8xh100", "--", *FLIGHT],
        [],
    ):
        done = on_the_standard_library(*words)
        assert (done.returncode, done.stderr) == (0, "")
    done = on_the_standard_library("report", "--trace-dir", "/nowhere")
    assert done.stderr.startswith("megatron-ext: error: /nowhere cannot be listed")


@pytest.mark.parametrize("words", [["doctor"], ["launch", "--", "a.py"], ["a.py"]])
def test_what_an_environment_lacks_is_one_line(words: list[str]) -> None:
    done = on_the_standard_library(*words)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "; run in the environment where megatron_ext is installed" in line


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_prints_the_help_of_a_script(tmp_path: Path, rank: str) -> None:
    script = tmp_path / "pretrain_x.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = run_package(str(script), "--help", RANK=rank)
    assert done.returncode == 0, done.stderr
    assert ("usage:" in done.stdout) == (rank == "0")


@pytest.mark.parametrize(
    "line",
    [
        "plan --pp 2 --microbatches 4",
        "plot 1f1b --pp 2 --microbatches 4",
        "doctor --json",
    ],
)
def test_a_full_disk_behind_the_output_is_one_line(line: str) -> None:
    root = Path(__file__).parents[1]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "megatron_ext", *line.split()],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False, cwd=root,
        )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    expected = "megatron-ext: error: standard output: No space left on device"
    assert done.stderr.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("la", ["launch"]),
        ("plot zb-", ["zb-h1", "zb-v"]),
        ("launch --ma", ["--master-port", "--max-restarts"]),
        ("report --trace-", ["--trace-dir"]),
    ],
)
def test_a_shell_completes_commands_flags_and_schedules(
    typed: str, offered: list[str]
) -> None:
    pytest.importorskip("argcomplete", reason="pip install 'megatron-ext[completion]'")
    line = f"megatron-ext {typed}"
    # What the shell function of argcomplete does: it reads candidates from descriptor 8.
    done = subprocess.run(
        ["bash", "-c", '"$0" -m megatron_ext 8>&1 9>/dev/null >/dev/null', sys.executable],
        env={
            **os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line,
            "COMP_POINT": str(len(line)), "PYTHONPATH": str(Path(__file__).parent.parent),
        },
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert [word.strip() for word in done.stdout.splitlines()] == offered


def test_a_checkout_without_its_requirements_says_how_to_install_itself() -> None:
    line = cli.lacking(ModuleNotFoundError(name="psutil"))
    [command] = re.findall("`(.*)`", line)
    *install, option, checkout = shlex.split(command)
    assert install == [sys.executable, "-m", "pip", "install"]
    assert option == "-e"
    assert (Path(checkout) / "pyproject.toml").is_file()
