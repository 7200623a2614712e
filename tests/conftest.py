"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.config.active import clear_configuration
from tests.ranks import require_training

# A shell without job control starts what it runs in the background with SIGINT ignored, and so all
# processes of the tests would be, some of which are interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def megatron_lm_path() -> Path:
    """A Megatron-LM tree at the pinned tag; tests that need one are skipped without."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip(
            "needs a Megatron-LM tree: set MEGATRON_LM_PATH to a checkout of the pinned tag"
        )
    return Path(path)


@pytest.fixture(scope="session")
def a_training_loop() -> None:
    """Megatron's own loop, of a tree or the wheel; tests that train with it are skipped without."""
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
    """Leave no configuration to the next test of this process."""
    yield
    clear_configuration()
