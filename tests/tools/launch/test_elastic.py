"""The bound on how long torchrun may take to end its ranks."""

from __future__ import annotations

from tests.commands import run_python

_PROGRAM = """
import os, signal, subprocess, sys, threading
from megatron_ext.tools.launch.elastic import _bounded_end
from megatron_ext.tools.launch import process

killed = threading.Event()
process.end = lambda found: killed.set()
with _bounded_end(0.05 if sys.argv[1] == "inside" else 60.0):
    if sys.argv[1] == "inside":
        os.kill(os.getpid(), 0)
        assert threading.active_count() == 1, "to ask whether a process lives is no signal"
        os.kill(os.getpid(), signal.SIGCONT)
        assert killed.wait(60), "nothing was killed after the grace"
    elif sys.argv[1] == "ended":
        os.kill(os.getpid(), signal.SIGCONT)
        [timer] = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
if sys.argv[1] == "ended":
    timer.join(60)
    assert not timer.is_alive(), "the timer is still to kill"
    assert not killed.is_set()
for timer in threading.enumerate()[1:]:
    timer.join(60)
os.kill(os.getpid(), signal.SIGCONT)
assert threading.active_count() == 1, "the hook still acts"
"""


def test_what_is_left_is_killed_after_the_grace() -> None:
    done = run_python("-c", _PROGRAM, "inside")
    assert done.returncode == 0, done.stderr


def test_nothing_is_killed_once_torchrun_has_ended() -> None:
    for moment in ("ended", "outside"):
        done = run_python("-c", _PROGRAM, moment)
        assert done.returncode == 0, done.stderr
