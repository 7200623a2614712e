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


def test_the_error_names_the_rank_with_another_version() -> None:
    """Rank 0 does not meet it; it hears from rank 1 why that one has ended."""
    run = start_ranks(3, train)
    assert run.exit_codes == [1, 1, 1], run.describe()
    text = "\n".join(run.logs)
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "megatron_ext: error:" in line]
    assert len(lines) >= 2, (
        text
    )  # ranks that hear the same of each other report it once
    for line in lines:
        assert "0.0.1 (" in line
        assert "install the same version on all hosts" in line
