"""Ranks that run different versions of this package."""

from __future__ import annotations

import os

from tests.ranks import _run_script, start_ranks
from tests.training.helpers import MOCK

_FLAGS = f"{MOCK}--pipeline-schedule 1f1b --pipeline-transport shm "


def train() -> None:
    """Train with a version of one's own on the last rank."""
    from megatron_ext.transport import address

    if os.environ["RANK"] == "2":
        address.__version__ = "0.0.1"
    flags = f"{_FLAGS}--pipeline-model-parallel-size 3 --num-layers 3"
    _run_script("pretrain_gpt.py", flags.split())


def test_each_rank_names_the_one_with_another_version() -> None:
    """Rank 0 does not meet it; it hears from rank 1 why that one has ended."""
    run = start_ranks(3, train)
    assert run.exit_codes == [1, 1, 1], run.describe()
    for log in run.logs:
        assert "Traceback" not in log
        [line] = [line for line in log.splitlines() if "megatron_ext: error:" in line]
        assert "0.0.1" in line
        assert "install one version on all hosts" in line
