"""The bound on how long torchrun may take to end its ranks, and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.commands import run_python

_RANKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    time.sleep(1.0)  # the other one ignores signals by now
    sys.exit(7)
time.sleep(100)
"""


def test_deaf_ranks_are_killed_after_the_grace_and_the_first_failure_is_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks.py").write_text(_RANKS)
    report = tmp_path / "failure.json"
    begin = time.monotonic()
    done = run_python(
        "-m", "megatron_ext.tools.launch.elastic", str(report), "0.5", "--standalone",
        "--nproc-per-node", "2", str(tmp_path / "ranks.py"),
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert json.loads(report.read_text()) == {"rank": 1, "exit_code": 7}
    assert time.monotonic() - begin < 30  # what torchrun alone waits
