"""Lines that a run adds to Megatron's own, and its end at Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.ports import free_port
from tests.upstream_script.runs import GPT

pytestmark = pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)

FLAGS = GPT + "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
_LACKS = re.compile(r"\w*Warning: (.*(?:Apex|pin_memory|transformer-engine).*)")


OWN_PROGRAM = """
import runpy, sys
import megatron_ext
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = f"{sys.path[0]}/pretrain_gpt.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RUNNER = ("-m", "megatron_ext", "pretrain_gpt.py")


def start(
    flags: str, output: Path, program: tuple[str, ...] = RUNNER
) -> list[subprocess.Popen[bytes]]:
    """Start two ranks as a launcher does; both write to one file."""
    port = str(free_port())
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    with output.open("wb") as log:
        return [
            subprocess.Popen(
                [sys.executable, *program, *flags.split()],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **world,
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "MASTER_PORT": port,
                    "MEGATRON_EXT_DEVICE": "cpu",
                    "PYTHONUNBUFFERED": "1",
                },
            )
            for rank in ("0", "1")
        ]


def test_a_run_adds_few_lines_and_a_lack_of_the_cpu_is_shown_once(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.txt"
    for rank in start(FLAGS, log):
        assert rank.wait(timeout=150) == 0, log.read_text()
    lines = log.read_text().splitlines()
    steps = [line for line in lines if " iteration " in line and " lm loss: " in line]
    assert len(steps) == 5
    before = lines[: lines.index(steps[0])]
    ours = [line for line in before if line.startswith("megatron_ext")]
    assert len(ours) == (2 if upstream.find_tree() is None else 1), ours
    assert ours[-1].startswith(
        "megatron_ext: pipeline schedule: zb-v chunks=2 on 2 ranks"
    )
    assert not any("redirects" in line or "BERT" in line for line in before)
    lacks = Counter(found[1] for line in lines if (found := _LACKS.search(line)))
    assert set(lacks.values()) <= {1}, lacks


def test_a_program_that_imports_us_adds_as_few(
    tmp_path: Path, megatron_lm_path: Path
) -> None:
    log = tmp_path / "log.txt"
    for rank in start(FLAGS, log, ("-c", OWN_PROGRAM, str(megatron_lm_path))):
        assert rank.wait(timeout=150) == 0, log.read_text()
    lines = log.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if " lm loss: " in line)
    [ours] = [line for line in lines[:first] if ":megatron_ext" in line]
    assert "pipeline schedule: zb-v chunks=2 on 2 ranks" in ours
    lacks = Counter(found[1] for line in lines if (found := _LACKS.search(line)))
    assert lacks, "this machine lacks what most CPUs lack"
    assert set(lacks.values()) == {1}, lacks


def test_an_interrupted_training_says_how_to_go_on(tmp_path: Path) -> None:
    log, saved = tmp_path / "log.txt", tmp_path / "saved"
    flags = (
        f"{FLAGS}--train-iters 100000 --save {saved} --load {saved} --save-interval 4 "
    )
    ranks = start(flags, log)
    try:
        for _ in range(1500):
            if (saved / "latest_checkpointed_iteration.txt").exists():
                break
            assert all(rank.poll() is None for rank in ranks), log.read_text()
            time.sleep(0.1)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        assert [rank.wait(timeout=60) for rank in ranks] == [130, 130], log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    text = log.read_text()
    [line] = re.findall(r"^megatron_ext: interrupted .*", text, re.MULTILINE)
    numbers = re.fullmatch(
        r"megatron_ext: interrupted at iteration (\d+); checkpoint (\d+); run again to resume",
        line,
    )
    assert numbers is not None, line
    assert int(numbers[1]) >= int(numbers[2]), line
    assert "Traceback" not in text
    assert "error:" not in text
