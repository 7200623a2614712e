"""tests/gpu/run.sh, the script for a machine with a GPU, on the emulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.processes import CHECKS, why_no_gpu

ROOT = Path(__file__).parents[1]


def run_script(
    *arguments: str, timeout_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu" / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, **env},
        timeout=timeout_s,
        check=False,
    )


def test_a_folder_without_wheels_is_an_error(tmp_path: Path) -> None:
    done = run_script("--wheels", str(tmp_path))
    assert done.returncode == 2
    assert f"there is no wheel in {tmp_path}" in done.stderr


def test_a_python_that_lacks_what_it_needs_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python3"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -ISc "$2"\n')
    bare.chmod(0o755)
    done = run_script(PYTHON="", VIRTUAL_ENV=str(tmp_path))
    assert done.returncode == 1
    assert "lacks torch and megatron and pytest and pytest_timeout; activate" in done.stderr


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_what_is_skipped_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/test_transport.py", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, CHECKS: "cuda"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "was skipped" in done.stdout
    assert "skipped," not in done.stdout.splitlines()[-1]
    assert "test_transport.py::test_how_fast_it_is[ipc] | " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1900)  # six minutes alone, and other tests run beside it
@pytest.mark.usefixtures("emulated_musa")
def test_all_checks_run_on_the_emulated_device() -> None:
    done = run_script("--emulated", "-n", "2", timeout_s=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| test_")]
    assert all(row.split(" | ")[1] == "passed" for row in rows)
    assert sum("GB/s" in row for row in rows) == 2
    assert sum("gradients of the first step equal in all bits" in row for row in rows) == 15
