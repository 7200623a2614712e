"""Calls in forked processes: their errors reach the caller, and nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

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


def test_the_first_that_has_a_result_is_not_waited_with() -> None:
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
        with pytest.raises(MegatronExtError, match=r"died \(exit code -9\).*--fix pp=8"):
            caller.result()
        with pytest.raises(MegatronExtError, match="exit code -9"):
            caller.begin(signal.SIGKILL)
    assert not multiprocessing.active_children()


def test_ctrl_c_reaches_the_first_process_alone() -> None:
    """A terminal sends it to all of them."""
    with callers(_quotient, 2) as [caller, _]:
        caller.begin(1, 1)
        pid, _ = caller.result()
        os.kill(pid, signal.SIGINT)
        caller.begin(1, 2)
        assert caller.result() == (pid, 0.5)
