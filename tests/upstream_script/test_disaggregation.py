"""Upstream's unmodified script trains with two roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RanksFailed, losses
from tests.scalars import written_scalars

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
    timing = f"--tensorboard-dir {tmp_path / 'board'} --log-timers-to-tensorboard "
    timing += "--timing-log-level 2 --timing-log-option all "
    ours, all_logs = log_of(4, start + PP2 + FBD + saving + timing)
    steps, evaluations = results(theirs)
    assert results(ours) == (steps[:3], evaluations[:1])
    assert "saving checkpoint" not in all_logs[0]
    assert "times across ranks" in ours
    assert not any("times across ranks" in log for log in all_logs[::2]), (
        "forward ranks are silent"
    )
    check_timers(written_scalars(tmp_path / "board"), steps[:3])
    resumed, _ = log_of(2, f"{EVALUATED}{PP2}--load {tmp_path / 'two'} ")
    assert losses(resumed)[0] == pytest.approx(steps[3], abs=1e-6)
    back, _ = log_of(4, f"{EVALUATED}{PP2}{FBD}--load {tmp_path / 'two'} ")
    assert results(back) == results(resumed)


def check_timers(
    written: dict[str, list[tuple[int, float]]], steps: list[float]
) -> None:
    """Log of the last backward rank: losses, and times of what backward ranks do."""
    assert [value for _, value in written["lm loss"]] == pytest.approx(steps, abs=1e-5)
    assert [step for step, _ in written["lm loss validation"]] == [2]
    for timer in (
        "forward-backward",
        "forward-compute",
        "backward-compute",
        "optimizer",
    ):
        times = written[f"{timer}-time"]
        assert [step for step, _ in times] == [1, 2, 3]
        assert all(seconds > 0 for _, seconds in times)


def test_a_loss_that_is_no_number_ends_the_job(tmp_path: Path) -> None:
    """No role runs the step again, which upstream does, to wait for the other for ever."""
    ended = run(
        4, GPT + PP2 + FBD + "--lr 1e30 --min-lr 1e30 --lr-decay-style constant "
    )
    assert all(ended.exit_codes), ended.describe()
    assert "Unexpected result nan" in ended.logs[-1]


@pytest.mark.slow
def test_merged(tmp_path: Path) -> None:
    tp2 = "--tensor-model-parallel-size 2 --sequence-parallel "
    start = save_start(tmp_path, EVALUATED)
    theirs, _ = log_of(4, start + PP2 + tp2)
    ours, _ = log_of(6, start + PP2 + tp2 + FBD + "--ignore-forward-tensor-parallel ")
    assert results(ours)[0] == pytest.approx(results(theirs)[0], abs=1e-5)
    assert len(results(ours)[1]) == len(results(theirs)[1]) == 4
