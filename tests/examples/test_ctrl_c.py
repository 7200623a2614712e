"""Ctrl-C in the scripts of the examples: one line, exit code 130, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import REPO

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
run_command "$2/log.txt" "$PYTHON" -c "$3" || status=$?
say "interrupted at iteration 3"
exit "$status"
"""
DATA = 'apart "$PYTHON" -c "${3/stop)/signal.SIG_DFL)}"'


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (TRAINING, "interrupted at iteration 3"),
        (DATA, "interrupted; run again to go on"),
    ],
    ids=["training", "data"],
)
def test_one_line_at_every_stage(stage: str, line: str, tmp_path: Path) -> None:
    script = f'set -euo pipefail\nsource "$1/examples/common.sh"\nPYTHON={sys.executable}\n{stage}'
    with subprocess.Popen(
        ["bash", "-c", script, "run.sh", str(REPO), str(tmp_path), PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        assert "begins" in run.stdout.readline()
        os.killpg(run.pid, signal.SIGINT)
        assert run.stdout.read() == f"run.sh: {line}\n"  # ends when the last process has ended
        assert run.wait(60) == 130
