"""Faults that change numbers and raise nothing are detected, and located to layer and action."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.located import MUTANT_SETTINGS, mutants, no_fault, run, summary
from tests.mutations.mutants import MUTANTS
from tests.mutations.silent_faults import FAULTS, SETTINGS

_QUICK = ("swapped gradients", "a W that is skipped", "a term of one loss is lost")


@pytest.mark.short_s(20)
def test_some_faults_are_located(tmp_path: Path) -> None:
    outcomes = run([fault for fault in FAULTS if fault.name in _QUICK], tmp_path)
    assert len(outcomes) == len(_QUICK)
    assert all(outcome.is_located for outcome in outcomes), [o.line() for o in outcomes]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_faults_are_detected_and_nine_of_ten_located(tmp_path: Path) -> None:
    outcomes = run(FAULTS, tmp_path)
    lines = "\n".join([*(outcome.line() for outcome in outcomes), summary(outcomes)])
    assert len(outcomes) == len(FAULTS) > 48
    assert all(outcome.is_detected for outcome in outcomes), lines
    assert sum(outcome.is_located for outcome in outcomes) >= 0.9 * len(outcomes), lines


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_mutant_changes_numbers_unseen(tmp_path: Path) -> None:
    """Some raise errors in a training, and some change none of its numbers."""
    outcomes = run(mutants(), tmp_path)
    lines = "\n".join([*(outcome.line() for outcome in outcomes), summary(outcomes)])
    assert len(outcomes) == len(MUTANTS) * len(MUTANT_SETTINGS)
    assert any(outcome.changes_weights for outcome in outcomes), lines
    # A setting that `configure` rejects would train no mutant at all.
    trained = {outcome.fault.setting for outcome in outcomes if not outcome.error}
    assert trained == set(MUTANT_SETTINGS), lines
    assert not any(outcome.is_missed for outcome in outcomes), lines


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_a_fault_nothing_differs(tmp_path: Path) -> None:
    outcomes = run([no_fault(setting) for setting in SETTINGS], tmp_path)
    assert not any(outcome.is_detected or outcome.error for outcome in outcomes), (
        "\n".join(outcome.line() for outcome in outcomes)
    )
