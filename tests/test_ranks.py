"""The multi-rank harness itself: results, errors, time-outs, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.ranks import RanksFailed, _waiting_for_others, losses, run_ranks, start_ranks

ROOT = Path(__file__).parents[1]


def _sum_of_ranks(offset: int) -> int:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    value = torch.tensor(distributed.get_rank() + offset)
    distributed.all_reduce(value)
    return int(value)


def _fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise RuntimeError("this rank fails on purpose")
    time.sleep(60)


def _sleep_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)


def _exit_with(code: int) -> None:
    raise SystemExit(code)


def _environment(name: str) -> str | None:
    return os.environ.get(name)


def test_every_rank_returns_its_value() -> None:
    assert run_ranks(4, _sum_of_ranks, 1) == [10, 10, 10, 10]


def test_a_run_that_is_cut_off_leaves_no_answer_for_the_next() -> None:
    """As the time-out of a test cuts it off: by an exception in a signal's handler."""

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, cut_off)
    me = threading.main_thread().ident
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(me, signal.SIGUSR2))
    try:
        assert run_ranks(1, _environment, "RANK") == ["0"]  # a server is there
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, _sleep_on, 1)
        assert run_ranks(2, _environment, "RANK") == ["0", "1"]
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR2, before)


def test_the_first_failing_rank_is_named_and_the_others_are_stopped() -> None:
    begin = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 1 failed first.*this rank fails on purpose"
    ):
        run_ranks(3, _fail_on, 1)
    assert time.monotonic() - begin < 50


def test_a_hang_is_ended_and_shows_where_the_rank_stood() -> None:
    run = start_ranks(2, _sleep_on, 1, timeout_s=6)
    assert run.timed_out
    assert run.exit_codes == [0, None]
    assert "_sleep_on" in run.logs[1]


def _leave_a_process_behind() -> int:
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def test_nothing_that_a_rank_started_outlives_the_run() -> None:
    for pid in run_ranks(2, _leave_a_process_behind):
        assert not Path(f"/proc/{pid}").exists()


def test_exit_codes_are_kept() -> None:
    assert start_ranks(2, _exit_with, 2).exit_codes == [2, 2]


def test_environment_reaches_the_ranks() -> None:
    assert run_ranks(1, _environment, "WORLD_SIZE", env={"WORLD_SIZE": "7"}) == ["7"]


def test_losses_are_read_from_upstreams_log_line() -> None:
    line = " iteration       10/      20 | learning rate: 1.0E-03 | lm loss: 5.545E+00 | x: 1 |"
    assert losses([line, line.replace("5.545E+00", "nan")])[0] == 5.545


def test_runs_of_several_sessions_share_the_cores(tmp_path: Path) -> None:
    """Two of one rank run side by side, and one of all cores after both.

    They share a file of their own. A test on another worker may hold a core of this session's.
    """
    num_cores = os.cpu_count() or 1
    if num_cores < 2:
        pytest.skip("this machine has one core")
    code = """
import sys
from pathlib import Path
from tests.ranks import _turn
with _turn(int(sys.argv[1]), Path(sys.argv[2])):
    print(flush=True)
    input()
"""
    cores = tmp_path / "cores"
    cores.touch()

    def turn(num_ranks: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(num_ranks), str(cores)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        )

    def end(turn: subprocess.Popen[str]) -> None:
        assert turn.communicate("\n", timeout=100)[0] == ""

    with contextlib.ExitStack() as stack:
        narrow = [turn(1), turn(1)]
        for one in narrow:
            assert one.stdout.readline() == "\n"
        wide = turn(num_cores)
        end(narrow[0])
        assert not select.select([wide.stdout], [], [], 0.5)[0]
        end(narrow[1])
        assert wide.stdout.readline() == "\n"
        end(wide)


def test_waiting_for_other_tests_is_none_of_a_tests_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_s: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getitimer", lambda _: (5.0, 0.0))
        patched.setattr(signal, "setitimer", lambda _, seconds: set_s.append(seconds))
        with _waiting_for_others():
            [while_waiting_s] = set_s
    assert while_waiting_s > 1000
    assert set_s[1:] == [5.0]
