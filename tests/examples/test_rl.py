"""The program that compares log-probabilities under two pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .scripts import REPO

PROGRAM = REPO / "examples" / "rl" / "log_probabilities.py"


def _shown(program: Path, *words: str) -> list[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    done = subprocess.run(
        [*launcher, str(program), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_EXT_DEVICE": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_training_has_the_log_probabilities_of_the_reference(schedule: str) -> None:
    _, different, ratios = _shown(PROGRAM, schedule)
    assert different == "different bits: 0"
    assert ratios == "ratios: 1.0 to 1.0, KL divergence: 0.0"


@pytest.mark.slow
def test_it_shows_a_difference(tmp_path: Path) -> None:
    """As another order of sums makes it: here the dtype of the softmax."""
    text, softmax = PROGRAM.read_text(), "logits.log_softmax(-1)"
    assert softmax in text
    other = "(logits.double() if trains else logits).log_softmax(-1).float()"
    program = tmp_path / "rounded.py"
    program.write_text(text.replace(softmax, other))
    _, different, _ = _shown(program)
    assert different != "different bits: 0"
