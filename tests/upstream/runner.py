"""Runs upstream's unit tests on CPU ranks and compares the results with the expected counts.

    python -m tests.upstream.runner [PATTERN...]   # all, or the files whose path holds a pattern
    python -m tests.upstream.runner --list         # what runs, and what does not and why
    python -m tests.upstream.runner --markdown     # the same, for docs/reference/upstream-tests.md

The tests come from the Megatron-LM tree in MEGATRON_LM_PATH. At the pinned tag any difference from
`selection.py` is a failure: a test that fails, that passes although it is left out, that skips
itself, or that is missing. With a later release, only a failing test is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.upstream.releases import REFERENCES, written_version
from tests.ranks import start_ranks
from tests.upstream import listing, session
from tests.upstream.selection import suites_for
from tests.upstream.table import Suite, problems

_WORST_FIRST = ("failed", "passed", "skipped", "left out")


@dataclass(frozen=True)
class Result:
    """Outcome of a suite."""

    suite: Suite
    outcomes: dict[str, str]
    complaints: list[str]
    wall_s: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        """Whether every count is as expected."""
        return not self.complaints

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        told = ", ".join(
            f"{counts[name]} {name}" for name in _WORST_FIRST if counts[name]
        )
        state = "ok  " if self.ok else "FAIL"
        return (
            f"{state} {self.suite.file} on {self.suite.ranks}: {told or 'no test'} "
            f"({self.wall_s:.0f} s, {self.cpu_s:.0f} s of processor time)"
        )


def run_suite(suite: Suite, tree: Path) -> Result:
    """Run one file of upstream's tests on its ranks."""
    left_out = {group.reason: group.tests for group in suite.left_out}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_upstream_") as directory:
        run = start_ranks(
            suite.ranks,
            session.run,
            str(tree),
            suite.file,
            left_out,
            directory,
            timeout_s=suite.timeout_s,
        )
        reports = [_read(Path(directory), rank) for rank in range(suite.ranks)]
    outcomes, complaints = _merge(reports)
    if suite.counted:
        complaints += problems(suite.expected(), Counter(outcomes.values()))
    elif "passed" not in outcomes.values():
        complaints.append("no test passed")
    if any(code != 0 for code in run.exit_codes):
        complaints.append(run.describe())
    return Result(
        suite,
        outcomes,
        complaints,
        wall_s=time.monotonic() - start,
        cpu_s=sum(value for value in run.values if value is not None),
    )


def _read(directory: Path, rank: int) -> dict[str, tuple[str, str]]:
    """Return outcome and reason by test; for a test recorded twice, the worse outcome counts."""
    path = session.report_file(directory, rank)
    outcomes: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        note = json.loads(line)
        before = outcomes.get(note["test"], ("left out", ""))
        recorded = (before, (note["outcome"], note["reason"]))
        outcomes[note["test"]] = min(
            recorded, key=lambda end: _WORST_FIRST.index(end[0])
        )
    return outcomes


def _merge(
    reports: Sequence[dict[str, tuple[str, str]]],
) -> tuple[dict[str, str], list[str]]:
    """Merge the ranks' reports: a test passes if it passes on every rank that does not skip it."""
    outcomes: dict[str, str] = {}
    complaints = []
    for test in dict.fromkeys(test for report in reports for test in report):
        ends = [report.get(test, ("failed", "it did not end")) for report in reports]
        outcome, reason = min(ends, key=lambda end: _WORST_FIRST.index(end[0]))
        outcomes[test] = outcome
        if outcome == "failed":
            rank = next(rank for rank, end in enumerate(ends) if end[0] == "failed")
            complaints.append(f"{test} on rank {rank}:\n{reason}")
    return outcomes, complaints


def _tree() -> Path:
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named:
        sys.exit(
            "set MEGATRON_LM_PATH to a Megatron-LM tree at the pinned tag: its tests are run"
        )
    tree = Path(named).resolve()
    if not (tree / "tests" / "unit_tests").is_dir():
        sys.exit(
            f"MEGATRON_LM_PATH={named} has no tests/unit_tests; it needs the whole tree"
        )
    return tree


def is_pinned(tree: Path) -> bool:
    """Return whether a tree is the oldest release, whose tests are counted."""
    return (
        written_version(tree / "megatron" / "core")
        == REFERENCES[min(REFERENCES)].version
    )


def _run_all(patterns: Sequence[str]) -> int:
    tree = _tree()
    pinned = is_pinned(tree)
    results = []
    suites = [
        suite
        for suite in suites_for(pinned)
        if any(part in suite.file for part in patterns)
        and (pinned or (tree / "tests" / "unit_tests" / suite.file).exists())
    ]
    if not suites:
        sys.exit(f"no file matches {' '.join(patterns)}; see --list")
    for suite in suites:
        results.append(run_suite(suite, tree))
        print(results[-1], flush=True)
        for complaint in results[-1].complaints:
            print("    " + complaint.replace("\n", "\n    "), flush=True)
    counts = sum((Counter(result.outcomes.values()) for result in results), Counter())
    bad = [result.suite.file for result in results if not result.ok]
    told = ", ".join(f"{counts[name]} {name}" for name in _WORST_FIRST)
    print(f"{len(results)} files: {told}; {sum(r.wall_s for r in results):.0f} s")
    print("as expected" if not bad else f"not as expected: {', '.join(bad)}")
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run or list upstream's tests; return the exit code."""
    parser = argparse.ArgumentParser(
        description="run upstream's own unit tests on CPU ranks"
    )
    parser.add_argument(
        "patterns", nargs="*", help="parts of file paths; none means all files"
    )
    parser.add_argument(
        "--list", action="store_true", help="show what runs, and what does not"
    )
    parser.add_argument("--markdown", action="store_true", help="show that as Markdown")
    arguments = parser.parse_args(argv)
    if arguments.markdown or arguments.list:
        print(listing.markdown() if arguments.markdown else listing.text(), end="")
        return 0
    return _run_all(arguments.patterns or [""])


if __name__ == "__main__":
    sys.exit(main())
