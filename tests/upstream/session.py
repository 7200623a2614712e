"""One pytest session of upstream's tests, as run on every rank.

`run` is called in a process forked from the rank server, in which the patches are already active.
Upstream's tests import each other as `tests.unit_tests...`, so in this process their `tests`
package replaces ours. Their `conftest.py` files are not used, because the first one downloads data
to `/opt/data`. `_Fixtures` provides the fixtures that the tests need from them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_COLLECTIVE_TIMEOUT_S = 60
"""A rank that waits longer for a failed rank fails its test, so that the next test can run."""

_REASON_CHARACTERS = 2000


def report_file(directory: Path, rank: int) -> Path:
    """Return the file in which a rank writes a JSON line for each finished test."""
    return directory / f"rank{rank}.jsonl"


def run(
    tree: str, file: str, left_out: Mapping[str, Sequence[str]], directory: str
) -> float:
    """Run one file of upstream's tests on this rank.

    Args:
        tree: A Megatron-LM tree; it is only read.
        file: The file, relative to `tests/unit_tests` of the tree.
        left_out: Regular expressions on test names (without the file), by the name of the reason.
        directory: Directory for the report and for files of the tests; all ranks share it.

    Returns:
        The processor time used, in seconds.
    """
    rank = int(os.environ["RANK"])
    _make_room(tree)
    _arm_spawned_processes()
    _serve_tcp_rendezvous()
    _limit_collectives()
    _answer_te_version()
    _allow_no_learning_rate()
    sys.dont_write_bytecode = True
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "26.01")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # If unset, upstream assumes the oldest NVIDIA container, for which it skips tests.
    os.environ["NVIDIA_PYTORCH_VERSION"] = "26.01"
    base = Path(directory)
    options = [
        "--noconftest", "-c", f"{tree}/pyproject.toml", "--rootdir", tree,
        "-o", "addopts=", "-p", "pytest_mock", "-p", "no:cacheprovider",
        "-p", "no:unraisableexception",  # its garbage collections take longer than most tests
        "--basetemp", f"{base}/rank{rank}", "-v", "-s", "--tb=short",
    ]  # fmt: skip
    with report_file(base, rank).open("w", buffering=1) as report:
        plugins = [_Report(report, left_out), _Fixtures(base)]
        pytest.main([*options, f"{tree}/tests/unit_tests/{file}"], plugins=plugins)
    return time.process_time()


def _make_room(tree: str) -> None:
    """Make `tests` upstream's package; the import hooks keep the installed `megatron.core`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path.insert(0, tree)


def _arm_spawned_processes() -> None:
    """Make a spawned process import this package, as when a training script is spawned.

    A spawned process imports its parent's main module, which does not exist here, so name this one.
    """
    sys.modules["__main__"].__spec__ = find_spec("megatron_ext.version")


def _serve_tcp_rendezvous() -> None:
    """Serve `tcp://`, which upstream's tests use, from files like `env://`, to avoid ports."""
    import torch.distributed  # noqa: F401

    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["tcp"] = handlers["env"]


def _limit_collectives() -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT_S)


def _answer_te_version() -> None:
    """Make upstream's check of Transformer Engine's version return False if it is missing.

    Upstream's function would compare with None, and its tests call it at import for their skips.
    """
    from megatron.core import utils

    if find_spec("transformer_engine") is None:
        utils.is_te_min_version = lambda *_args, **_kwargs: False


def _allow_no_learning_rate() -> None:
    """Make torch's Adam accept `lr=None`, as TE's and Apex's do: many upstream tests pass it."""
    import torch

    for adam in (torch.optim.Adam, torch.optim.AdamW):
        adam.__init__ = _with_learning_rate(adam.__init__)


def _with_learning_rate(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(
        self: Any, params: Any, lr: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, params, 0.0 if lr is None else lr, *args, **kwargs)

    return initialize


class _Fixtures:
    """Fixtures that upstream's `conftest.py` files give to its tests."""

    def __init__(self, base: Path) -> None:
        self._shared = base / "dist_ckpt"

    @pytest.fixture(autouse=True)
    def _reset_env_vars(self) -> Iterator[None]:
        before = dict(os.environ)
        yield
        os.environ.clear()
        os.environ.update(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Drop objects built by a test, which pytest would keep, with process-group threads."""
        yield
        vars(getattr(item, "instance", None) or SimpleNamespace()).clear()

    @pytest.fixture(scope="session")
    def tmp_path_dist_ckpt(self) -> Path:
        """Return a directory that all ranks share."""
        self._shared.mkdir(exist_ok=True)
        return self._shared

    @pytest.fixture(scope="class")
    def tmp_dir_per_class(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("data")

    @pytest.fixture(scope="session", autouse=True)
    def _default_checkpoint_strategy(self) -> Iterator[None]:
        """Save as `torch_dist` by default, and without the optional storage client."""
        from unittest import mock

        from megatron.core.msc_utils import MultiStorageClientFeature

        MultiStorageClientFeature.disable()
        if find_spec("megatron.core.dist_checkpointing.strategies.base") is None:
            yield  # the default in later releases
            return
        from megatron.core.dist_checkpointing.strategies.base import (
            StrategyAction,
            get_default_strategy,
        )

        with mock.patch(
            "megatron.core.dist_checkpointing.serialization.get_default_save_sharded_strategy",
            side_effect=lambda: get_default_strategy(
                StrategyAction.SAVE_SHARDED, "torch_dist", 1
            ),
        ):
            yield

    @pytest.fixture(scope="session", autouse=True)
    def _end_together(self) -> Iterator[None]:
        yield
        from torch import distributed

        if distributed.is_initialized():
            distributed.barrier()


class _Report:
    """Deselects the left-out tests, and records the outcome of all others."""

    def __init__(self, stream: Any, left_out: Mapping[str, Sequence[str]]) -> None:
        self._stream = stream
        self._left_out = [
            (reason, re.compile(pattern))
            for reason, patterns in left_out.items()
            for pattern in patterns
        ]

    def _note(self, test: str, outcome: str, reason: str) -> None:
        line = {
            "test": test,
            "outcome": outcome,
            "reason": reason[-_REASON_CHARACTERS:],
        }
        self._stream.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        selected = []
        for item in items:
            reason = self._why_left_out(_name(item.nodeid))
            if reason is None:
                selected.append(item)
            else:
                self._note(_name(item.nodeid), "left out", reason)
        items[:] = selected

    def _why_left_out(self, test: str) -> str | None:
        return next((reason for reason, p in self._left_out if p.fullmatch(test)), None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note("(collection)", "failed", str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(_name(report.nodeid), "failed", str(report.longrepr))
        elif report.skipped:
            where = report.longrepr
            reason = where[2] if isinstance(where, tuple) else str(where)
            self._note(_name(report.nodeid), "skipped", reason)
        elif report.when == "call":
            self._note(_name(report.nodeid), "passed", "")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid
