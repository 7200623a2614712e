"""Finds cmake and its companions, which pip puts next to a Python that is not on PATH."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}
GENERATOR = ["-G", "Ninja"] if shutil.which("ninja", path=ENVIRONMENT["PATH"]) else []

needs_cmake = pytest.mark.skipif(
    not shutil.which("cmake", path=ENVIRONMENT["PATH"]),
    reason="cmake is neither on PATH nor installed next to this Python (pip install cmake)",
)
