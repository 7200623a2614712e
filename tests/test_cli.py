"""The `megatron-ext` command: golden list of subcommands, output and exit codes."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.config.flags import add_arguments, pipeline_config
from megatron_ext.config.pipeline_config import PipelineConfig
from tests.commands import run_package, subcommands


def test_the_subcommands_are_these() -> None:
    assert subcommands() == {
        "aggregate", "collect", "doctor", "launch", "logs", "patches", "plan", "plot", "preprocess",
        "report", "status", "stop", "upstream",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["launch", "--kubernetes", "--", "a.py"], "examples/kubernetes/trainjob.yaml"),
        (["launch", "--image=i", "--", "a.py"], "examples/kubernetes/trainjob.yaml"),
        (["launch", "--hostfile", "h", "--push", "--", "a.py"], "rsync -a"),
    ],
)
def test_what_was_removed_answers_with_its_remedy(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "was removed; " in line
    assert remedy in line


def test_a_flag_of_the_script_is_not_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--hostfile", "/nowhere", "--", "a.py", "--push"]) == 2
    assert "was removed" not in capsys.readouterr().err


def test_our_training_flags_are_these() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    add_arguments(parser)  # a second time changes nothing
    flags = {option for action in parser._actions for option in action.option_strings}
    assert flags == {
        "-h", "--help", "--device-backend", "--ext-list-patches",
        "--pipeline-schedule", "--enable-bitpipe-schedule", "--bitpipe-order", "--bitpipe-routing",
        "--pipeline-costs",
        "--use-dpp", "--dpp-policy", "--dpp-extra-activations",
        "--pipeline-balance", "--pipeline-length-costs",
        "--variable-seq-lengths", "--microbatch-rng",
        "--forward-backward-disaggregating", "--ignore-forward-tensor-parallel",
        "--fbd-activations",
        "--fbd-forward-device",
        "--pipeline-transport", "--node-ips", "--pipeline-device-path", "--pipeline-checksum",
        "--trace", "--trace-interval", "--trace-iterations", "--trace-dir", "--hang-timeout",
        "--data-impl",
    }  # fmt: skip


def test_settings_missing_from_a_namespace_get_their_defaults() -> None:
    assert pipeline_config(argparse.Namespace()) == PipelineConfig()
    config = pipeline_config(argparse.Namespace(device_backend="cpu", other=1))
    assert config == PipelineConfig(device="cpu")


def test_listing_shows_each_patch_with_target_and_reason() -> None:
    done = run_package("patches", "list", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    ids = {row["id"] for row in rows}
    assert {patch.id for patch in importlib.import_module("megatron_ext.patches").rows()} <= ids
    assert all(row["reason"] and ":" in row["target"] and row["intact"] for row in rows)
    states = {row["id"]: row["state"] for row in rows}
    assert states["arguments.flags"] in {"pending", "installed"}
    text = run_package("patches", "list").stdout
    assert "names of torch redirected" in text
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
    assert run_package("upstream", "path").stdout.strip() == str(megatron_lm_path.resolve())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["upstream", "path"], 2, "no Megatron-LM tree was found"),
        (["upstream", "fetch", "--url", "file:///nowhere"], 2, "git could not fetch"),
        (["nonsense"], 2, "invalid choice"),
        (["patches"], 2, "ACTION"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], code: int, message: str) -> None:
    done = run_package(*arguments, MEGATRON_LM_PATH="")
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line", ["plan --pp 2 --microbatches 4", "plot 1f1b --pp 2 --microbatches 4", "doctor --json"]
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
