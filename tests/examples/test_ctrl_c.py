"""Signals to the examples: one line, the exit code of the signal, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.examples.scripts import LLAMA3, REPO

# As torchrun does, it ends with a traceback, whether Ctrl-C or the script stops it.
PROGRAM = """
import signal, sys, time
def stop(*_):
    raise RuntimeError("stopped")
signal.signal(signal.SIGTERM, stop)
print("megatron_ext: begins", flush=True)
time.sleep(60)
"""
TRAINING = """
PYTHON=$4
run_command "$2/log.txt" "$PYTHON" -c "$3" || status=$?
say "interrupted at iteration 3"
exit "$status"
"""
DATA = 'PYTHON=$4; apart "$PYTHON" -c "${3/stop)/signal.SIG_DFL)}"'


@contextmanager
def started(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a script of ours in bash until its program has started."""
    arguments = [str(REPO), str(folder), PROGRAM, sys.executable]
    with subprocess.Popen(
        ["bash", "-c", f"set -euo pipefail\n{script}", "run.sh", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        assert "begins" in run.stdout.readline()
        yield run


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (TRAINING, "interrupted at iteration 3"),
        (DATA, "interrupted; run again to continue"),
    ],
    ids=["training", "data"],
)
def test_one_line_at_every_stage(stage: str, line: str, tmp_path: Path) -> None:
    script = f'source "$1/examples/common.sh"\n{stage}'
    with started(script, tmp_path) as run:
        assert run.stdout is not None
        os.killpg(run.pid, signal.SIGINT)
        assert (
            run.stdout.read() == f"run.sh: {line}\n"
        )  # ends when the last process has ended
        assert run.wait(60) == 130


ENDING = """
PYTHON=$4 OUT=$2 FLAGS=(--save "$2/kept" --load "$2/kept") EXTRA=()
run_command "$OUT/log.txt" "$PYTHON" -c "$3" || explain_failure $?
"""


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGHUP"])
def test_another_signal_is_named(signal_name: str, tmp_path: Path) -> None:
    script = f'HERE="$1/examples/llama3"\nsource "$1/examples/train.sh"\n{ENDING}'
    signal_number = signal.Signals[signal_name]
    with started(script, tmp_path) as run:
        assert run.stdout is not None
        run.send_signal(signal_number)  # to the script alone, as `kill` does
        last_line = run.stdout.read().splitlines()[-1]
        assert run.wait(60) == 128 + signal_number
    assert last_line == (
        f"run.sh: stopped by {signal_name} before the first logged iteration; "
        "checkpoint none; run again to resume"
    )


SAVING = """
import os, signal, sys, time
def save(*_):
    time.sleep(1)
    open("saved-" + os.environ["RANK"], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
open("ready-" + os.environ["RANK"], "w").close()
while not (os.path.exists("ready-0") and os.path.exists("ready-1")):
    time.sleep(0.05)  # the test interrupts the job at the first of these lines
print(" iteration 3/ 9 | lm loss: 4.855E+00 |", flush=True)
time.sleep(60)
"""


def test_a_job_on_hosts_has_its_grace(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SAVING)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [
        "--tiny",
        "--mock-data",
        "--hostfile",
        "hosts",
        "--out",
        str(tmp_path / "out"),
    ]
    own = {"VIRTUAL_ENV": sys.prefix, "MEGATRON_EXT_RUNS": str(tmp_path / "runs")}
    with subprocess.Popen(
        ["bash", str(REPO / LLAMA3), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MEGATRON_EXT_DEVICE": "cpu", **own},
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("iteration 3/9"):
                break
        os.killpg(run.pid, signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(60) == 130, rest
    assert "megatron-ext: SIGTERM: stopping the job; repeat to kill it" in rest
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}, (
        rest
    )
    assert rest.endswith(
        "run.sh: interrupted at iteration 3; checkpoint none; run again to resume\n"
    )
