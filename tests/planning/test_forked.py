"""Calls in forked processes: their errors reach the caller, and nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_ext.errors import MegatronExtError
from megatron_ext.planning.forked import callers, ended


def _quotient(one: int, two: int) -> tuple[int, float]:
    return os.getpid(), one / two


def test_each_caller_has_a_process_and_one_alone_has_this_one() -> None:
    with callers(_quotient, 3) as all_of_them:
        for number, caller in enumerate(all_of_them):
            caller.begin(number, 2)
        found = dict(caller.result() for caller in all_of_them)
        assert sorted(found.values()) == [0.0, 0.5, 1.0]
        assert os.getpid() not in found
    assert not multiprocessing.active_children()
    with callers(_quotient, 1) as [caller]:
        caller.begin(3, 2)
        assert ended([caller]) == [caller]
        assert caller.result() == (os.getpid(), 1.5)


def test_a_short_call_does_not_wait_for_a_long_one() -> None:
    with callers(time.sleep, 2) as [slow, fast]:
        slow.begin(60)
        fast.begin(0)
        assert ended([slow, fast]) == [fast]
    assert not multiprocessing.active_children()


def test_an_error_of_the_function_is_raised_and_does_not_end_its_process() -> None:
    with callers(_quotient, 2) as [caller, _]:
        caller.begin(1, 0)
        with pytest.raises(ZeroDivisionError):
            caller.result()
        caller.begin(1, 1)
        assert caller.result()[1] == 1.0


def test_a_process_that_dies_is_an_error_with_a_remedy() -> None:
    """As when memory runs out."""
    with callers(signal.raise_signal, 2) as [caller, _]:
        caller.begin(signal.SIGKILL)
        with pytest.raises(
            MegatronExtError, match=r"died \(exit code -9\).*--fix pp=8"
        ):
            caller.result()
        with pytest.raises(MegatronExtError, match="exit code -9"):
            caller.begin(signal.SIGKILL)
    assert not multiprocessing.active_children()


def test_ctrl_c_is_left_to_the_parent() -> None:
    """A terminal sends it to its children, too."""
    with callers(_quotient, 2) as [caller, _]:
        caller.begin(1, 1)
        pid, _ = caller.result()
        os.kill(pid, signal.SIGINT)
        caller.begin(1, 2)
        assert caller.result() == (pid, 0.5)


def test_processes_end_with_a_parent_that_is_killed() -> None:
    """Also within a call."""
    code = (
        "import os, time; from megatron_ext.planning.forked import callers\n"
        "def call(sleep_s): time.sleep(sleep_s); return os.getpid()\n"
        "with callers(call, 3) as all_of_them:\n"
        "    [caller.begin(0) for caller in all_of_them]\n"
        "    pids = [caller.result() for caller in all_of_them]\n"
        "    all_of_them[0].begin(60)\n"
        "    print(*pids, flush=True)\n"
        "    time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(left) == 3
    parent.kill()
    assert parent.communicate(timeout=30) == ("", None)
    assert not psutil.wait_procs(left, timeout=30)[1]
