"""The training steps of RL frameworks, of their own code, under our schedules.

Each needs a checkout of the framework, given by a variable, and an environment that can import it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.hosts import rl_runs
from tests.ranks import run_ranks

FRAMEWORKS = {
    "SLIME_PATH": rl_runs.slime,
    "NEMO_RL_PATH": rl_runs.nemo_rl,
    "VERL_PATH": rl_runs.verl,
}


@pytest.mark.parametrize("variable", FRAMEWORKS)
def test_a_training_step_has_the_losses_and_weights_of_megatrons_own(
    variable: str,
) -> None:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no checkout")
    step: Any = FRAMEWORKS[variable]
    stock = run_ranks(4, step, path, None, timeout_s=280)
    ours = run_ranks(4, step, path, "zb-h1", timeout_s=280)
    losses, _, _ = stock[-1]
    print("Megatron's own:", losses)
    print("ours:          ", ours[-1][0])
    assert [run[:2] for run in ours] == [run[:2] for run in stock]
    assert len({str(loss) for loss in losses}) == 3, "nothing was trained"
    assert [run[2] for run in ours] == [3] * 4
    assert [run[2] for run in stock] == [0] * 4
