"""Skips the checks where there is no NVIDIA GPU, saying so."""

import pytest

from .processes import why_no_gpu


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """The first NVIDIA GPU of this machine."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(f"needs an NVIDIA GPU: {reason}")
