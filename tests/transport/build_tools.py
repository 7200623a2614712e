"""Builds packages offline, with cmake and related tools next to a Python that is not on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    ),
}
GENERATOR = ["-G", "Ninja"] if shutil.which("ninja", path=ENVIRONMENT["PATH"]) else []

needs_cmake = pytest.mark.skipif(
    not shutil.which("cmake", path=ENVIRONMENT["PATH"]),
    reason="cmake is neither on PATH nor installed next to this Python (pip install cmake)",
)


def build_wheel(
    source: Path, out: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run pip on a directory or sdist, offline, with the build tools installed here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
    ]
    command += ["--no-index", "--no-cache-dir", "--wheel-dir", str(out), str(source)]
    inherited = {
        k: v for k, v in ENVIRONMENT.items() if k != "MEGATRON_EXT_REQUIRE_NATIVE"
    }
    return subprocess.run(
        command,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def build_sdist(out: Path, repository: Path = REPOSITORY) -> Path:
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=repository, check=True, timeout=60
    )
    [sdist] = out.iterdir()
    return sdist
