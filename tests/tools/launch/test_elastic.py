"""The bound on how long torchrun may take to end its ranks, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.launcher import api as launcher

from tests.commands import run_python

_RANKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    time.sleep(1.0)  # the other one ignores signals by now
    sys.exit(7)
for _ in range(100):
    print("beats", flush=True)
    time.sleep(1.0)
"""


def test_deaf_ranks_are_killed_after_the_grace_and_the_first_failure_is_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks.py").write_text(_RANKS)
    report = tmp_path / "failure.json"
    done = run_python(
        "-m", "megatron_ext.tools.launch.elastic", str(report), "0.5", "--standalone",
        "--nproc-per-node", "2", str(tmp_path / "ranks.py"),
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert json.loads(report.read_text()) == {
        "stopped": [],
        "rank": 1,
        "local_rank": 1,
        "exit_code": 7,
    }
    assert 0 < done.stdout.count("beats") < 20, (
        "torchrun alone lets it live for 30 seconds"
    )


_WITNESS = """
import os, signal, time
from pathlib import Path
from megatron_ext.errors import PeerDied
from megatron_ext.upstream.error_file import WholeErrorFile
met = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent / "met"
if os.environ["RANK"] == "0":
    met.touch()
    os._exit(7)
while os.environ["RANK"] == "2" and not met.exists():
    time.sleep(0.01)
if os.environ["RANK"] == "2":
    time.sleep(0.4)  # notices the loss only now
    WholeErrorFile().record_exception(PeerDied("rank 0 died"))
signal.pause()
"""


def test_a_rank_may_report_a_loss_before_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(_WITNESS)
    done = run_python(
        "-m", "megatron_ext.tools.launch.elastic", str(tmp_path / "failure.json"), "5",
        "--standalone", "--nproc-per-node", "3", "--log-dir", str(tmp_path / "logs"),
        str(tmp_path / "ranks.py"),
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    [report] = tmp_path.glob("logs/*/attempt_0/*/error.json")
    assert report.parent.name == "2"


def test_torchrun_gives_a_rank_that_saves_the_whole_grace(tmp_path: Path) -> None:
    config = launcher.LaunchConfig
    if not hasattr(config, "shutdown_timeout"):
        pytest.skip("before PyTorch 2.12 torchrun gives 30 s")
    (tmp_path / "rank.py").write_text(
        f"import {config.__module__} as api\nprint(api.LaunchConfig(1, 1, 1).shutdown_timeout)"
    )
    done = run_python(
        "-m",
        "megatron_ext.tools.launch.elastic",
        "report",
        "99.5",
        str(tmp_path / "rank.py"),
    )
    assert done.stdout == "100\n", done.stderr
