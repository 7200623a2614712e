"""Upstream's own tests: a quick part of them is run here, all by `tests/upstream/run.sh`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.upstream import listing, runner
from tests.upstream.excluded import EXCLUDED, REASONS
from tests.upstream.selection import SUITES, suites_for
from tests.upstream.table import LeftOut, Suite, problems

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs/reference/upstream-tests.md"

_TESTS = """
import os

import pytest
from tests.unit_tests import helper


def test_passes():
    assert helper.VALUE == 1


def test_skips():
    pytest.skip("here")


@pytest.mark.parametrize("number", [1, 2])
def test_left_out(number):
    assert False


def test_fails_on_the_second_rank():
    assert os.environ["RANK"] == "0"
"""


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A tree with one file of tests, laid out as upstream's."""
    unit_tests = tmp_path / "tree" / "tests" / "unit_tests"
    unit_tests.mkdir(parents=True)
    (tmp_path / "tree" / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '-x'\n"
    )
    for package in (unit_tests.parent, unit_tests):
        (package / "__init__.py").touch()
    (unit_tests / "helper.py").write_text("VALUE = 1\n")
    (unit_tests / "test_small.py").write_text(_TESTS)
    return tmp_path / "tree"


@pytest.mark.tree
@pytest.mark.parametrize("file", [suite.file for suite in SUITES if suite.quick])
def test_quick_part_passes(file: str, megatron_lm_path: Path) -> None:
    [suite] = (
        suite
        for suite in suites_for(runner.is_pinned(megatron_lm_path))
        if suite.quick and suite.file == file
    )
    result = runner.run_suite(suite, megatron_lm_path)
    assert result.ok, "\n".join(result.complaints)


@pytest.mark.tree
def test_every_file_is_run_or_excluded(megatron_lm_path: Path) -> None:
    if not runner.is_pinned(megatron_lm_path):
        pytest.skip(
            "the files are those of the pinned tag, and MEGATRON_LM_PATH is of another one"
        )
    unit_tests = megatron_lm_path / "tests" / "unit_tests"
    there = {
        str(path.relative_to(unit_tests)) for path in unit_tests.rglob("test_*.py")
    }
    assert {entry.file for entry in (*SUITES, *EXCLUDED)} == there


def test_no_file_is_both_run_and_excluded() -> None:
    assert {suite.file for suite in SUITES} & {
        entry.file for entry in EXCLUDED
    } == set()


def test_every_reason_is_explained_and_used() -> None:
    used = {group.reason for suite in SUITES for group in suite.left_out}
    assert used | {entry.reason for entry in EXCLUDED} == set(REASONS)


def test_document_is_current() -> None:
    assert _DOCUMENT.read_text() == listing.markdown()


def test_counts_that_differ_are_problems() -> None:
    assert problems(
        Counter(passed=3, skipped=1), Counter(passed=2, failed=1, skipped=1)
    ) == [
        "0 failed expected, 1 found",
        "3 passed expected, 2 found",
    ]


def test_a_failure_on_one_rank_is_told(small_tree: Path) -> None:
    left_out = (LeftOut("te", 2, (r"test_left_out.*",)),)
    suite = Suite("test_small.py", ranks=2, passed=2, skipped=1, left_out=left_out)
    result = runner.run_suite(suite, small_tree)
    assert result.outcomes == {
        "test_left_out[1]": "left out",
        "test_left_out[2]": "left out",
        "test_passes": "passed",
        "test_skips": "skipped",
        "test_fails_on_the_second_rank": "failed",
    }
    told = "\n".join(result.complaints)
    assert "test_fails_on_the_second_rank on rank 1" in told
    assert "2 passed expected, 1 found" in told
    assert str(result).startswith(
        "FAIL test_small.py on 2: 1 failed, 1 passed, 1 skipped"
    )


def test_what_is_as_expected_is_ok(small_tree: Path) -> None:
    left_out = (LeftOut("te", 3, (r"test_left_out.*", r"test_fails.*")),)
    suite = Suite("test_small.py", ranks=2, passed=1, skipped=1, left_out=left_out)
    result = runner.run_suite(suite, small_tree)
    assert result.ok, "\n".join(result.complaints)


def test_the_tree_is_not_written_to(small_tree: Path) -> None:
    before = sorted(small_tree.rglob("*"))
    runner.run_suite(Suite("test_small.py", ranks=1, passed=1), small_tree)
    assert sorted(small_tree.rglob("*")) == before


def test_a_run_that_hangs_is_killed_and_told(small_tree: Path) -> None:
    path = small_tree / "tests" / "unit_tests" / "test_small.py"
    path.write_text("import time\n\ndef test_hangs():\n    time.sleep(600)\n")
    result = runner.run_suite(
        Suite("test_small.py", ranks=1, passed=1, timeout_s=10), small_tree
    )
    assert not result.ok
    assert "did not end in time" in result.complaints[-1]
    assert "test_hangs" in result.complaints[-1]
