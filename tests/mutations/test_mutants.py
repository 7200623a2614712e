"""Every mutant of the runtime fails a quick test; so those tests can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mutations.run_mutant import ALL_MUTANTS, path_of

if TYPE_CHECKING:
    from tests.mutations.mutants import Mutant

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = path_of(mutant).read_text(encoding="utf-8")
    assert text.count(mutant.text) == 1, (
        f"{mutant.module} no longer has {mutant.text!r} once"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(len(ALL_MUTANTS)), ids=[mutant.name for mutant in ALL_MUTANTS]
)
def test_a_mutant_is_caught(number: int, tmp_path: Path) -> None:
    """Run from an empty folder: hypothesis remembers what failed, and that is of no use here."""
    command = [sys.executable, "-m", "tests.mutations.run_mutant", str(number)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**_environment(), "PYTHONPATH": str(_ROOT)},
        check=False,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, (
        run.stdout[-3000:] + run.stderr[-3000:]
    )


def _environment() -> dict[str, str]:
    import os

    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_CURRENT_TEST"
    }
