"""The shape of the selection: which of upstream's tests run, and which do not and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

AREAS = (
    "pipeline_parallel",
    "tensor_parallel",
    "distributed",
    "dist_checkpointing",
    "transformer",
)
"""Directories of upstream's `tests/unit_tests` that this package is most concerned with."""


@dataclass(frozen=True)
class LeftOut:
    """Tests of a file that runs which cannot pass on CPU ranks.

    Attributes:
        reason: A key of `excluded.REASONS`.
        count: How many tests these are, with their parameters.
        tests: Regular expressions that match their names in full.
    """

    reason: str
    count: int
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """A file of upstream's tests, run on a number of ranks; all others must pass.

    Attributes:
        file: Relative to `tests/unit_tests` of the tree.
        ranks: Processes.
        passed: How many tests pass.
        skipped: How many skip themselves.
        left_out: What is not run.
        timeout_s: When the run is killed.
        quick: Whether our own test suite runs it, too.
        counted: Whether the numbers above are those of the tree; otherwise only failures count.
    """

    file: str
    ranks: int
    passed: int
    skipped: int = 0
    left_out: tuple[LeftOut, ...] = ()
    timeout_s: float = 240
    quick: bool = False
    counted: bool = True

    def expected(self) -> Counter[str]:
        """Return how many tests end how."""
        counts = Counter(passed=self.passed, skipped=self.skipped)
        counts["left out"] = sum(group.count for group in self.left_out)
        return +counts


@dataclass(frozen=True)
class Excluded:
    """A file of upstream's tests that is not run at all.

    Attributes:
        file: Relative to `tests/unit_tests` of the tree.
        reason: A key of `excluded.REASONS`.
        functions: How many test functions it has (most cannot even be imported, so that their
            parameters are unknown).
    """

    file: str
    reason: str
    functions: int


def area(file: str) -> str:
    """Return the directory below `tests/unit_tests` that a file is in, or `top level`."""
    return file.partition("/")[0] if "/" in file else "top level"


def problems(expected: Counter[str], actual: Counter[str]) -> list[str]:
    """Say how the counts of a run differ from what they should be."""
    return [
        f"{expected[outcome]} {outcome} expected, {actual[outcome]} found"
        for outcome in sorted(expected | actual)
        if expected[outcome] != actual[outcome]
    ]
