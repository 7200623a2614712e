"""Checkpoints are those of an ordinary job: either kind of job goes on where the other ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import losses, run_script
from tests.runtime import capture
from tests.runtime.capture import GPT, PP2
from tests.scalars import written_scalars

from .test_training import FBD, train

EVALUATING = "--eval-iters 2 --eval-interval 1 "
MERGED = FBD + "--ignore-forward-tensor-parallel --tensor-model-parallel-size 2 "


@pytest.mark.slow
def test_steps_by_turns(tmp_path: Path) -> None:
    """Step 1 and 3 with two roles, 2 without; the loss of each step is that of one plain run."""
    flags = GPT + PP2
    whole = capture.train(2, flags)
    saving = f"{flags}--save {tmp_path} --save-interval 1 --exit-interval 1 "
    loading = f"{saving}--load {tmp_path} "
    first, _ = train(4, saving + FBD)
    second = capture.train(2, loading)
    third, _ = train(4, loading + FBD)
    assert [*first.losses, *second.losses, *third.losses] == whole.losses
    assert third.parameters == whole.parameters


@pytest.mark.parametrize(("num_ranks", "roles"), [(4, FBD), (6, MERGED)])
def test_evaluation_is_that_of_an_ordinary_job(
    num_ranks: int, roles: str, tmp_path: Path
) -> None:
    """Forward ranks evaluate, with the weights of the step; backward ranks log and write it."""
    flags = GPT.replace("--eval-iters 0", EVALUATING) + PP2
    shards = "--tensor-model-parallel-size 2 " if roles == MERGED else ""
    writing = f"{roles}--tensorboard-dir {tmp_path} --log-world-size-to-tensorboard "
    found = run_script(num_ranks, "pretrain_gpt.py", (flags + writing).split())
    expected = run_script(
        2 * num_ranks // 4 if not shards else 4,
        "pretrain_gpt.py",
        (flags + shards).split(),
    )
    ours, theirs = (_validation(logs) for logs in (found, expected))
    assert len(theirs) == 5
    assert ours == pytest.approx(theirs, abs=0 if roles == FBD else 1e-5)
    assert losses(found) == pytest.approx(
        losses(expected), abs=0 if roles == FBD else 1e-5
    )
    written = written_scalars(tmp_path)
    assert {value for _, value in written["world-size"]} == {num_ranks}, "of both roles"
    # The second line of a log is the mean of two steps.
    assert [value for _, value in written["lm loss"]][::2] == pytest.approx(
        losses(found)[::2], abs=1e-6
    )
    assert [value for _, value in written["lm loss validation"]] == pytest.approx(
        ours, abs=1e-6
    )


def _validation(logs: list[str]) -> list[float]:
    lines = [
        line
        for log in logs
        for line in log.splitlines()
        if "validation loss at" in line
    ]
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines]
