"""The example script asks for what its comment says, and Llama 3 takes the flag."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron_ext.disaggregation.job import current, use
from megatron_ext.training.arguments import parse
from tests.examples.scripts import bash, dry_run, megatron_flags, value_of

SCRIPT = "examples/gpt/pretrain_gpt_fbd.sh"


@pytest.mark.parametrize(
    ("script", "flags", "tp", "processes"),
    [
        (SCRIPT, ["--mock-data"], 2, "6"),
        (SCRIPT, ["--tiny"], 2, "6"),
        ("examples/llama3/run.sh", ["--tiny", "--forward-backward-disaggregating"], 1, "4"),
    ],
)
def test_what_the_scripts_start(script: str, flags: list[str], tp: int, processes: str) -> None:
    words = dry_run(script, *flags)
    assert value_of(words, "--nproc-per-node") == processes
    given = megatron_flags(words)
    try:
        parse("gpt", given, {"WORLD_SIZE": processes})
        job = current()
        assert job is not None
        assert (job.ranks.tp, job.ranks.pp, job.ranks.dp) == (tp, 2, 1)
        assert job.ranks.merged == (script == SCRIPT)
    finally:
        use(None)


def test_the_first_word_is_the_number_of_the_machine() -> None:
    several: dict[str, Any] = {"NNODES": "2", "MASTER_ADDR": "node0", "NPROC": "6"}
    done = bash(SCRIPT, "1", "--dry-run", "--mock-data", **several)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.replace("\\\n", ""))
    assert value_of(words, "--node-rank") == "1"
    assert "--mock-data" in words
