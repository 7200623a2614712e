"""A trace that finds no room ends with a warning, and training continues."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tracing.recorder import Recorder
from tests.ranks import RankRun, _run_script, losses, require_training, start_ranks
from tests.runtime.capture import GPT, PP2
from tests.tools.trace.runs import Clock
from tests.tracing.test_recorder import HEADER

_ITERATIONS = 40
_FLAGS = f"{GPT}{PP2}--train-iters {_ITERATIONS} --log-interval {_ITERATIONS} "
_TRACE = "--trace --trace-interval 1 --trace-iterations 1 --trace-dir "
_ROOM_BYTES = 28 << 10


def train_in_room(room_bytes: int | None, argv: Sequence[str]) -> None:
    """Train with files that may have this size only, which stands for a full disk."""
    if room_bytes is None:
        _run_script("pretrain_gpt.py", argv)
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    # The log is a file too, and Megatron's list of arguments longer than the room.
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        _run_script("pretrain_gpt.py", argv)


def train(directory: Path | None, room_bytes: int | None = None) -> RankRun:
    require_training()
    flags = _FLAGS if directory is None else f"{_FLAGS}{_TRACE}{directory}"
    run = start_ranks(2, train_in_room, room_bytes, flags.split())
    assert run.exit_codes == [0, 0], run.describe()
    return run


def check_warnings(run: RankRun, directory: Path, reason: str) -> None:
    for log in run.logs:
        assert "Traceback" not in log
        [line] = [line for line in log.splitlines() if "cannot be written" in line]
        assert str(directory) in line
        assert reason in line
        assert "training continues" in line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_ROOM_BYTES}", "tmpfs", disk],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"this user may mount no tmpfs: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_training_goes_on_when_the_disk_of_the_trace_is_full(small_disk: Path) -> None:
    run = train(small_disk / "run")
    check_warnings(run, small_disk / "run", "No space left on device")
    assert losses(run.logs) == losses(train(None).logs)
    recorded = read_run(small_disk / "run")
    assert any(1 <= survey.num_iterations < _ITERATIONS for survey in recorded.surveys)


def test_training_goes_on_when_there_is_no_room_for_a_trace_at_all(
    small_disk: Path,
) -> None:
    with (
        (small_disk / "filler").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left"),
    ):
        file.writelines(bytes(1024) for _ in range(_ROOM_BYTES))
    check_warnings(
        train(small_disk / "run"), small_disk / "run", "No space left on device"
    )


def test_training_goes_on_when_a_trace_exceeds_what_a_file_may_have(
    tmp_path: Path,
) -> None:
    run = train(tmp_path / "run", _ROOM_BYTES)
    check_warnings(run, tmp_path / "run", "File too large")
    recorded = read_run(tmp_path / "run")
    assert all(1 <= survey.num_iterations < _ITERATIONS for survey in recorded.surveys)


def test_a_trace_that_ended_keeps_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(lambda: (tmp_path, HEADER, None), Clock())
    recorder.begin_iteration(1)
    assert recorder._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file.fileno())
    os.close(full)
    for _ in range(2):
        recorder.add("forward", recorder.stamp(), {"stage": 0})
        recorder.end_iteration()
        recorder.begin_iteration(1)
    recorder.add("optimizer", recorder.stamp(), {})
    assert not recorder.active
    assert not recorder._spans
    recorder.close()
    [record] = caplog.records
    assert (
        "benchmark-data-0-pipeline-0-tensor-0.json cannot be written: No space"
        in record.message
    )
