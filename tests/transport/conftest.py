"""Provides the native core to its tests."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native module; if it should have been built, its absence is a failure and not a skip."""
    try:
        return require_native()
    except TransportError as error:
        if os.environ.get("MEGATRON_EXT_REQUIRE_NATIVE"):
            raise
        pytest.skip(str(error))
