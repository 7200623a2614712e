"""Fixtures for the tests of the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.patches.registry import Registry

from .made_up import SOURCE


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An importable package with a defining module and one that copies its names."""
    name = "fake_upstream"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "core.py").write_text(SOURCE)
    (folder / "user.py").write_text(
        "from fake_upstream.core import add as plus, Box, LIMIT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture
def registry() -> Iterator[Registry]:
    empty_registry = Registry()
    yield empty_registry
    empty_registry.deactivate()
