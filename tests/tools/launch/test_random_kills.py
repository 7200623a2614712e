"""Ranks killed at random moments of a step, of saving and of evaluation.

The job starts again, and its losses are those of a job that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import require_training
from tests.tools.launch.cluster import rank_of
from tests.tools.launch.test_cluster import LLAMA

_LAST = 12
_SAVES = 3  # iterations from one checkpoint to the next
_EVALUATES = 4
_TIMEOUT_S = 250
_LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: (\S+)")


@contextmanager
def _job(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A training job of two stages on this machine that restarts once."""
    directory.mkdir(exist_ok=True)
    (directory / "hosts").write_text("localhost slots=2\n")
    flags = (
        f"{LLAMA} --train-iters {_LAST} --eval-iters 2 --eval-interval {_EVALUATES} --use-dpp "
        f"--microbatch-rng --save {directory}/saved --load {directory}/saved "
        f"--save-interval {_SAVES}"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(directory / "hosts"),
         "--max-restarts", "1", "--num-microbatches", "4", "--raw", "--",
         "pretrain_gpt.py", *flags.split()],
        env={**os.environ, "MEGATRON_EXT_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
             "MEGATRON_EXT_RUNS": str(directory / "runs")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.terminate()
        job.communicate(timeout=60)


def _told(text: str) -> dict[str, str]:
    """Return the losses of all attempts, by iteration.

    Left out is the second one of each attempt: as upstream, its line averages the first two steps.
    """
    told = {}
    for attempt in re.split(r"restart \d+ of", text):
        trained = _LOSS.findall(attempt)
        told |= {f"iteration {n}": loss for n, loss in trained[:1] + trained[2:]}
        told |= {f"evaluation {n}": loss for n, loss in _VALIDATION.findall(attempt)}
    return told


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    require_training()
    with _job(tmp_path_factory.mktemp("undisturbed") / "job") as job:
        text, _ = job.communicate(timeout=_TIMEOUT_S)
    assert job.returncode == 0, text
    told = _told(text)
    assert len(told) == _LAST - 1 + _LAST // _EVALUATES, text
    return told


def _until_line(job: subprocess.Popen[str], iteration: int) -> str:
    """Read the job's output until it has told the loss of an iteration."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if (found := _LOSS.search(line)) and int(found[1]) == iteration:
            return "".join(lines)
    raise AssertionError("".join(lines))


def _until_saving(directory: Path, iteration: int) -> None:
    """Wait until a checkpoint has begun."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (directory / f"saved/iter_{iteration:07d}").exists():
        assert time.monotonic() < deadline, f"no checkpoint of iteration {iteration}"
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("moment", "iteration"),
    [("step", 4), ("step", 8), ("saving", 6), ("evaluation", 8)],
)
def test_losses_after_a_kill_are_those_of_an_undisturbed_job(
    tmp_path: Path, undisturbed: dict[str, str], moment: str, iteration: int, rank: int
) -> None:
    chance = random.Random(f"{moment} {iteration} {rank}")
    with _job(tmp_path / "job") as job:
        text = _until_line(job, iteration - (moment == "saving"))
        victim = rank_of(job.pid, rank)
        if moment == "saving":
            _until_saving(tmp_path / "job", iteration)
        time.sleep(chance.uniform(0, 0.05))
        victim.send_signal(signal.SIGKILL)
        assert job.stdout is not None
        text += job.stdout.read()  # what was read ahead for the lines before too
        assert job.wait(_TIMEOUT_S) == 0, text
    assert "restart 1 of 1 in 1 s, because of localhost: rank" in text
    told = _told(text)
    shared = told.keys() & undisturbed.keys()
    assert len(shared) >= len(undisturbed) - 1, text
    assert {key: told[key] for key in shared} == {
        key: undisturbed[key] for key in shared
    }, text
