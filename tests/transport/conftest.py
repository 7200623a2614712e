"""The native core, for its tests."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native module; where it had to be built, its absence is a failure and not a skip."""
    try:
        return require_native()
    except TransportError as error:
        if os.environ.get("MEGATRON_EXT_REQUIRE_NATIVE"):
            raise
        pytest.skip(str(error))
