"""Skips the checks without an NVIDIA GPU; under run.sh, skipped checks fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from .processes import CHECKS, TRANSFORMER_ENGINE, why_no_gpu

_UNDER_RUN_SH = CHECKS in os.environ

# On a GPU the planner forecasts only Transformer Engine's layers.
collect_ignore = [] if TRANSFORMER_ENGINE else ["test_planner.py"]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """The first NVIDIA GPU of this machine, or its stand-in."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(f"needs an NVIDIA GPU: {reason}")


@pytest.fixture(autouse=True)
def share_of_the_gpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Give a case marked `alone` the whole GPU if pytest-xdist workers share it."""
    with (tmp_path_factory.getbasetemp().parent / "gpu.lock").open("w") as lock:
        is_alone = request.node.get_closest_marker("alone") is not None
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skipped check fail under run.sh, because it has checked nothing."""
    report = yield
    if _UNDER_RUN_SH and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table of all checks with their results."""
    if not _UNDER_RUN_SH:
        return
    rows = [("check", "result", "found"), ("---", "---", "---")]
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" or outcome != "passed":
                # The report of a module that cannot be imported has no properties.
                properties = getattr(report, "user_properties", ())
                measured = "; ".join(f"{name}: {value}" for name, value in properties)
                rows.append(
                    (report.nodeid.removeprefix("tests/gpu/"), outcome, measured)
                )
    for row in rows:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
