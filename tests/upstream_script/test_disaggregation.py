"""Upstream's unmodified script trains with two roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RanksFailed, losses

from .runs import GPT, run, save_start, step_losses

pytestmark = pytest.mark.usefixtures("megatron_lm_path")

FBD = "--forward-backward-disaggregating "
PP2 = "--pipeline-model-parallel-size 2 "
EVALUATED = GPT.replace("--eval-iters 0", "--eval-iters 1").replace(
    "--eval-interval 10", "--eval-interval 2"
)


def log_of(num_ranks: int, flags: str) -> tuple[str, list[str]]:
    """Return the log of the process that logs, and those of all."""
    ended = run(num_ranks, flags)
    if any(ended.exit_codes):
        raise RanksFailed(ended.describe())
    return ended.logs[-1], ended.logs


def results(log: str) -> tuple[list[float], list[str]]:
    validation = [line for line in log.splitlines() if "validation loss at" in line]
    return step_losses(losses(log)), validation


def test_plain(tmp_path: Path) -> None:
    """Losses of steps and evaluations are those of one role; a checkpoint resumes without roles."""
    start = save_start(tmp_path / "start", EVALUATED)
    theirs, _ = log_of(2, start + PP2)
    saving = f"--save {tmp_path / 'two'} --save-interval 3 --exit-interval 3 "
    ours, all_logs = log_of(4, start + PP2 + FBD + saving)
    steps, evaluations = results(theirs)
    assert results(ours) == (steps[:3], evaluations[:1])
    assert "saving checkpoint" not in all_logs[0]
    resumed, _ = log_of(2, f"{EVALUATED}{PP2}--load {tmp_path / 'two'} ")
    assert losses(resumed)[0] == pytest.approx(steps[3], abs=1e-6)
    back, _ = log_of(4, f"{EVALUATED}{PP2}{FBD}--load {tmp_path / 'two'} ")
    assert results(back) == results(resumed)


def test_merged(tmp_path: Path) -> None:
    tp2 = "--tensor-model-parallel-size 2 --sequence-parallel "
    start = save_start(tmp_path, EVALUATED)
    theirs, _ = log_of(4, start + PP2 + tp2)
    ours, _ = log_of(6, start + PP2 + tp2 + FBD + "--ignore-forward-tensor-parallel ")
    assert results(ours)[0] == pytest.approx(results(theirs)[0], abs=1e-5)
    assert len(results(ours)[1]) == len(results(theirs)[1]) == 4
