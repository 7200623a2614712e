"""The classes of the selection: which of upstream's tests run, and why others do not."""

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
"""Directories in upstream's `tests/unit_tests` that are most relevant to this package."""


@dataclass(frozen=True)
class LeftOut:
    """Tests that cannot pass on CPU ranks, in a file that is run.

    Attributes:
        reason: A key of `excluded.REASONS`.
        count: Number of these tests, counting parameters.
        tests: Regular expressions that match their names in full.
    """

    reason: str
    count: int
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """A file of upstream's tests; all tests that are not left out must pass.

    Attributes:
        file: Relative to `tests/unit_tests` of the tree.
        ranks: Processes.
        passed: How many tests pass.
        skipped: How many skip themselves.
        left_out: Tests that are not run.
        timeout_s: Time after which the run is killed.
        quick: Whether our test suite also runs it.
        counted: Whether the numbers above apply to the tree; otherwise only failures count.
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
        """Return the expected number of tests per outcome."""
        counts = Counter(passed=self.passed, skipped=self.skipped)
        counts["left out"] = sum(group.count for group in self.left_out)
        return +counts


@dataclass(frozen=True)
class Excluded:
    """A file of upstream's tests that is not run.

    Attributes:
        file: Relative to `tests/unit_tests` of the tree.
        reason: A key of `excluded.REASONS`.
        functions: Number of test functions in it (most files cannot even be imported, so their
            parameters are unknown).
    """

    file: str
    reason: str
    functions: int


def area(file: str) -> str:
    """Return the directory under `tests/unit_tests` that contains a file, or `top level`."""
    return file.partition("/")[0] if "/" in file else "top level"


def problems(expected: Counter[str], actual: Counter[str]) -> list[str]:
    """Describe how the counts of a run differ from the expected ones."""
    return [
        f"{expected[outcome]} {outcome} expected, {actual[outcome]} found"
        for outcome in sorted(expected | actual)
        if expected[outcome] != actual[outcome]
    ]
