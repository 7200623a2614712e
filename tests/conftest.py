"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.active import clear_configuration
from tests import tiers
from tests.ranks import require_training

# A shell without job control starts background processes with SIGINT ignored. The tests' processes
# would inherit that, but some of them are interrupted on purpose.
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ModuleNotFoundError):  # optional for the tests on a GPU and in hosts
    from hypothesis import HealthCheck, settings

    # A slow example is not a failure, because other work may be running on the machine.
    settings.register_profile(
        "shared machine",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.load_profile("shared machine")


_LEFT: Counter[str] = Counter()
"""Tests that the short tier left out, by folder, from the last worker: all workers collect the
same."""
_ALL = [0]
_SECONDS: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--short", action="store_true", help="the short tier (tests/tiers.py)"
    )
    parser.addoption(
        "--short-s", type=float, default=tiers.SHORT_S, help="seconds of one test in it"
    )
    parser.addoption(
        "--measure", action="store_true", help="renew tests/durations.json"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--short"):
        left_out_items = tiers.left_out(items, config.getoption("--short-s"))
        _ALL[0] = len(items)
        _LEFT.update(
            Path(item.nodeid.partition("::")[0]).parts[1] for item in left_out_items
        )
        items[:] = [item for item in items if item not in set(left_out_items)]
        config.hook.pytest_deselected(items=left_out_items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # set in xdist workers
    if output is not None:
        output["left_out"], output["all_cases"] = dict(_LEFT), _ALL[0]
    elif session.config.getoption("--measure"):
        tiers.write(_SECONDS, short=session.config.getoption("--short"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if output.get("all_cases"):
        _LEFT.clear()
        _LEFT.update(output["left_out"])
        _ALL[0] = output["all_cases"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--short") and _ALL[0]:
        terminalreporter.write_line(tiers.summary(_LEFT, _ALL[0]))


@pytest.fixture(scope="session")
def megatron_lm_path() -> Path:
    """A Megatron-LM tree at the pinned tag; tests that need one are skipped if it is missing."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip(
            "needs a Megatron-LM tree: set MEGATRON_LM_PATH to a checkout of the pinned tag"
        )
    return Path(path)


@pytest.fixture(scope="session")
def a_training_loop() -> None:
    """Megatron's training loop, from a tree or the wheel; without it, tests that need it skip."""
    require_training()


@pytest.fixture(scope="session")
def emulated_musa() -> None:
    """The emulated MUSA device (`tests.fake_musa`), built; tests that need it are skipped without a
    compiler."""
    from tests.fake_musa import build

    try:
        build.library()
    except build.NoCompiler as error:
        pytest.skip(f"the emulated MUSA device cannot be built: {error}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's cache (a fetched tree there would change what runs)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _own_configuration() -> Iterator[None]:
    """Leave no configuration to the next test in this process."""
    yield
    clear_configuration()
