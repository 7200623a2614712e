"""tests/gpu/run.sh, the script for a machine with a GPU, on the emulated device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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
    assert (
        "lacks torch and megatron and pytest and pytest_timeout; activate"
        in done.stderr
    )


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_what_is_skipped_fails() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu/test_transport.py",
            "-p",
            "no:cacheprovider",
        ],
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


# -- compare.sh, with stand-ins for Python and for the program of MPS ------------------------------

_DAEMON = """#!/bin/bash
if [[ $1 == -d ]]; then
    sleep 600 >/dev/null 2>&1 &
    echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    echo $! >"$RECORDS/daemon"
else
    cat >"$RECORDS/order"
    kill "$(cat "$RECORDS/daemon")"
fi
"""
_PYTHON = """#!/bin/bash
[[ $1 == -c ]] && exit 1 # there is no Transformer Engine
env >"$RECORDS/environment"
printf '%s\\n' "$@" >"$RECORDS/words"
echo "$BASHPID" >"$RECORDS/comparison"
exec sleep "$DURATION_S"
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def start_comparison(records: Path, duration_s: str) -> subprocess.Popen[str]:
    write_program(records / "nvidia-cuda-mps-control", _DAEMON)
    write_program(records / "python", _PYTHON)
    environment = {
        **os.environ,
        CHECKS: "cuda",
        "PYTHON": str(records / "python"),
        "PATH": f"{records}:{os.environ['PATH']}",
        "RECORDS": str(records),
        "DURATION_S": duration_s,
    }
    return subprocess.Popen(
        ["bash", str(ROOT / "tests" / "gpu" / "compare.sh")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def assert_nothing_is_left(records: Path) -> None:
    environment = (records / "environment").read_text()
    pipe = re.search(
        r"^CUDA_MPS_PIPE_DIRECTORY=(/tmp/megatron-ext-gpu\.\w+)/pipe$",
        environment,
        re.M,
    )
    assert pipe is not None
    assert not Path(pipe[1]).exists()
    assert (records / "order").read_text() == "quit -t 5\n"
    for process in ("daemon", "comparison"):
        pid = int((records / process).read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_ranks_get_a_quarter_of_the_gpu_each(tmp_path: Path) -> None:
    script = start_comparison(tmp_path, "0")
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 0, output
    environment = (tmp_path / "environment").read_text().splitlines()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in environment
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:5] == ["-m", "megatron_ext", "compare", "--nproc", "4"]
    reference = words[words.index("--reference") + 1]
    assert reference == "--pipeline-transport shm"
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_comparison_that_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = start_comparison(tmp_path, "600")
    deadline = time.monotonic() + 30
    while not (tmp_path / "comparison").exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.05)
    script.send_signal(number)
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 128 + number, output
    assert_nothing_is_left(tmp_path)


@pytest.mark.skipif(
    Path("/usr/bin/nvidia-cuda-mps-control").exists(),
    reason="this machine has the program",
)
def test_without_the_daemons_program_nothing_is_measured() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu" / "compare.sh")],
        capture_output=True,
        text=True,
        env={**os.environ, CHECKS: "cuda", "PYTHON": "/bin/false"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "measures nothing: nvidia-cuda-mps-control" in done.stdout


@pytest.mark.parametrize(
    ("started_by", "local_rank"), [("torchrun", "0"), ("hand", "3")]
)
def test_each_rank_of_torchrun_gets_the_first_gpu(
    started_by: str, local_rank: str
) -> None:
    environment = {
        **os.environ,
        "LOCAL_RANK": "3",
        "PYTHONPATH": str(ROOT / "tests/gpu/first_gpu"),
    }
    environment.pop("TORCHELASTIC_RUN_ID", None)
    if started_by == "torchrun":
        environment["TORCHELASTIC_RUN_ID"] = "run"
    program = "import os; print(os.environ['LOCAL_RANK'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == local_rank


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.usefixtures("emulated_musa", "a_training_loop")
def test_the_comparison_ends_with_its_table_on_the_emulated_device() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu" / "compare.sh")],
        capture_output=True,
        text=True,
        env={**os.environ, CHECKS: "emulated", "PYTHON": sys.executable},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for schedule in ("zb-h1", "zb-v"):
        label = f"{schedule} --pipeline-transport shm"
        [row] = re.findall(rf"^{label} +\d.*", done.stdout, re.M)
        assert "bit-equal" in row, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1900)  # six minutes alone, and other tests run beside it
@pytest.mark.usefixtures("emulated_musa")
def test_all_checks_run_on_the_emulated_device() -> None:
    done = run_script("--emulated", "-n", "2", timeout_s=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| test_")]
    assert all(row.split(" | ")[1] == "passed" for row in rows)
    assert sum("GB/s" in row for row in rows) == 2
    assert (
        sum("gradients of the first step equal in all bits" in row for row in rows)
        == 15
    )
