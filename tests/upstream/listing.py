"""Lists which of upstream's tests run, as text and as docs/reference/upstream-tests.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tests.upstream.excluded import EXCLUDED, REASONS
from tests.upstream.selection import SUITES
from tests.upstream.table import AREAS, Excluded, Suite, area

_HEAD = """\
# Upstream's own unit tests on the CPU

<!-- Generated: python -m tests.upstream.runner --markdown > docs/reference/upstream-tests.md -->

If the package is imported without any of its flags, Megatron-LM must behave as without the package.
Megatron-LM's unmodified unit tests check this at the pinned tag. `bash tests/upstream/run.sh` runs
the tests that can run on CPU ranks with gloo, from the tree that `MEGATRON_LM_PATH` names. Each
file runs in separate processes under a time limit. Any difference from these counts is a failure.
With the tree of a later release, only failing tests are failures, because its files contain
different numbers of tests.

A test is *left out* if its file runs but the test cannot pass. A file is *excluded* if none of its
tests can pass. Tests are counted with their parameters. For excluded files, test functions are
counted instead, because most of these files cannot be imported.
"""


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _areas() -> list[list[str]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for suite in SUITES:
        counts[area(suite.file)] += suite.expected()
    for file in {suite.file for suite in SUITES}:
        counts[area(file)]["run"] += 1
    for entry in EXCLUDED:
        counts[area(entry.file)]["excluded"] += 1
    head = [
        "area",
        "files run",
        "tests passed",
        "skipped",
        "left out",
        "files excluded",
    ]
    names = [*AREAS, *sorted(set(counts) - set(AREAS))]
    total = sum(counts.values(), Counter[str]())
    return [
        head,
        *([name, *_cells(counts[name])] for name in names),
        ["all", *_cells(total)],
    ]


def _cells(counts: Counter[str]) -> list[str]:
    return [
        str(counts[name])
        for name in ("run", "passed", "skipped", "left out", "excluded")
    ]


def _reasons() -> list[list[str]]:
    tests = Counter[str]()
    files = Counter[str]()
    for suite in SUITES:
        for group in suite.left_out:
            tests[group.reason] += group.count
    functions = Counter[str]()
    for entry in EXCLUDED:
        files[entry.reason] += 1
        functions[entry.reason] += entry.functions
    rows = [["reason", "tests left out", "files excluded (test functions)", "why"]]
    for name, why in REASONS.items():
        excluded = f"{files[name]} ({functions[name]})" if files[name] else "0"
        rows.append([name, str(tests[name]), excluded, why])
    return rows


def _suite_row(suite: Suite) -> list[str]:
    left_out = ", ".join(f"{group.count} {group.reason}" for group in suite.left_out)
    return [
        suite.file,
        str(suite.ranks),
        str(suite.passed),
        str(suite.skipped),
        left_out or "0",
    ]


def _suites() -> list[list[str]]:
    head = ["file", "ranks", "passed", "skipped", "left out"]
    return [head, *(_suite_row(suite) for suite in SUITES)]


def _excluded(entries: Iterable[Excluded]) -> list[list[str]]:
    rows = [["file", "test functions", "reason"]]
    rows += [[entry.file, str(entry.functions), entry.reason] for entry in entries]
    return rows


def text() -> str:
    """Return the listing for a terminal."""
    parts = (
        ("By area", _areas()),
        ("Run", _suites()),
        ("Excluded", _excluded(EXCLUDED)),
        ("Reasons", _reasons()),
    )
    return "\n\n".join(f"{title}\n{_columns(rows)}" for title, rows in parts) + "\n"


def markdown() -> str:
    """Return docs/reference/upstream-tests.md."""
    parts = (
        ("By area", _areas()),
        ("Reasons", _reasons()),
        ("Files that run", _suites()),
        ("Files that are excluded", _excluded(EXCLUDED)),
    )
    return _HEAD + "".join(f"\n## {title}\n\n{_table(rows)}\n" for title, rows in parts)
