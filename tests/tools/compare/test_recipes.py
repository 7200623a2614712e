"""Published recipes, scaled down: digests show no difference where there is none.

The trainings are those of `tests/runtime/test_recipes.py`, whose numbers are bit-identical.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.tools.compare.locate import locate
from megatron_ext.tracing.digest_files import VARIABLE
from tests.disaggregation.test_training import run_role
from tests.ranks import run_ranks
from tests.runtime import capture
from tests.runtime.test_recipes import by_training, words_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("schedule", "flags", "ours"), list(by_training()))
def test_published_recipes_raise_no_alarm(
    schedule: str, flags: str, ours: str, tmp_path: Path
) -> None:
    words = words_of(schedule, flags, ours)
    reference, candidate = tmp_path / "reference", tmp_path / "candidate"
    capture.train(4, words.reference, env={VARIABLE: str(reference)}, timeout_s=400)
    environment = {VARIABLE: str(candidate)}
    if schedule == "disaggregation":
        argv = words.candidate.split()
        run_ranks(8, run_role, argv, env=environment, timeout_s=400)
    else:
        capture.train(4, words.candidate, env=environment, timeout_s=400)
    difference = locate(reference, candidate)
    assert difference is None, difference.sentence()
