"""Fixtures for the tests of Megatron-Bridge."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.rank_server import PRELOAD

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def bridge_loaded() -> Iterator[None]:
    """Import Bridge once and not in each rank, because importing takes a minute."""
    before = os.environ.get(PRELOAD)
    os.environ[PRELOAD] = "tests.hosts.bridge_loaded"
    yield
    if before is None:
        del os.environ[PRELOAD]
