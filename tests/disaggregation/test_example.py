"""The example script starts what its comment promises, and Llama 3 takes the flag."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config import active
from megatron_ext.config.active import clear_configuration
from tests.examples.scripts import bash, dry_run, make_data, megatron_flags, value_of
from tests.ranks import losses, parse, run_script

SCRIPT = "examples/gpt/pretrain_gpt_fbd.sh"


@pytest.mark.parametrize(
    ("script", "flags", "tp", "processes"),
    [
        (SCRIPT, ["--mock-data"], 2, "6"),
        (SCRIPT, ["--tiny"], 2, "6"),
        (
            "examples/llama3/run.sh",
            ["--tiny", "--forward-backward-disaggregating"],
            1,
            "4",
        ),
    ],
)
def test_what_the_scripts_start(
    script: str, flags: list[str], tp: int, processes: str
) -> None:
    words = dry_run(script, *flags)
    assert value_of(words, "--nproc-per-node") == processes
    given = megatron_flags(words)
    try:
        parse("gpt", given, {"WORLD_SIZE": processes})
        job = active.job()
        assert job is not None
        assert (job.ranks.tp, job.ranks.pp, job.ranks.dp) == (tp, 2, 1)
        assert job.ranks.merged == (script == SCRIPT)
    finally:
        clear_configuration()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "processes"),
    [
        (SCRIPT, [], 6),
        pytest.param(
            "examples/llama3/run.sh",
            ["--forward-backward-disaggregating"],
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_scripts_train(
    script: str, flags: list[str], processes: int, tmp_path: Path
) -> None:
    make_data("python_reference")
    few = "--train-iters=3 --log-interval=1 --eval-iters=1 --num-workers=0".split()
    words = dry_run(script, *flags, "--tiny", "--out", str(tmp_path), *few)
    logs = run_script(processes, "pretrain_gpt.py", megatron_flags(words))
    found = losses(logs)
    assert len(found) == 3
    assert found[-1] < found[0]


def test_the_first_word_is_the_number_of_the_machine() -> None:
    several: dict[str, Any] = {"NNODES": "2", "MASTER_ADDR": "node0", "NPROC": "6"}
    done = bash(SCRIPT, "1", "--dry-run", "--mock-data", **several)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.replace("\\\n", ""))
    assert value_of(words, "--node-rank") == "1"
    assert "--mock-data" in words
