"""Processes of a job: who they are, and how to end all of them and nothing else.

A process is known by its id *and* its start time, because ids are used again. Those of a job are
the descendants of its agent, and whoever carries the mark that the agent put into the environment:
torchrun makes each rank the leader of a process group of its own, so killing groups would leave
ranks behind, and a process that was orphaned is in no tree. Linux only (`/proc`, `prctl`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

__all__ = [
    "AGENT_PID",
    "NODE",
    "RUN_ID",
    "Process",
    "adopt_orphans",
    "descendants",
    "die_with_parent",
    "end",
    "find",
    "marked",
]

RUN_ID = "MEGATRON_EXT_RUN_ID"
"""Environment variable of every process of a job: which one."""
NODE = "MEGATRON_EXT_NODE"
"""Environment variable of every process of a job: the rank of its host."""
AGENT_PID = "MEGATRON_EXT_AGENT_PID"
"""Environment variable of every process of a job: the agent that it must not outlive."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


class Process(NamedTuple):
    """A process, whatever happens to its id later."""

    pid: int
    start: int
    """When it started, in clock ticks after the system did."""

    def alive(self) -> bool:
        """Whether it still runs (one that ended and was not waited for does not)."""
        state = _stat(self.pid)
        return state is not None and state.start == self.start and state.state not in "ZX"

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.alive():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


class _Stat(NamedTuple):
    parent: int
    start: int
    state: str


def _stat(pid: int) -> _Stat | None:
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    # The name of the program, in brackets, may hold blanks and brackets itself.
    fields = text.rpartition(b")")[2].split()
    return _Stat(parent=int(fields[1]), start=int(fields[19]), state=fields[0].decode())


def _read(path: str) -> bytes:
    """Return a file of `/proc`; nothing if the process ended, or is not ours.

    A host has many processes, and all are looked at: `Path` would take most of the time.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - hot
            return file.read()
    except OSError:
        return b""


def find(pid: int) -> Process | None:
    """Return the process that has an id now, or None."""
    state = _stat(pid)
    return None if state is None else Process(pid, state.start)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - hot


def descendants(root: int) -> set[Process]:
    """Return all processes below one, that one left out."""
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for pid in _pids():
        state = _stat(pid)
        if state is not None and state.state not in "ZX":
            children.setdefault(state.parent, []).append(pid)
            starts[pid] = state.start
    found: set[Process] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found.add(Process(pid, starts[pid]))
            waiting.append(pid)
    return found


def marked(run_id: str, node: int, since: int = 0) -> set[Process]:
    """Return the processes that carry the mark of one job on one host.

    Args:
        run_id: The job.
        node: The rank of the host.
        since: None that started before this, in clock ticks, is looked at.
    """
    marks = {f"{RUN_ID}={run_id}".encode(), f"{NODE}={node}".encode()}
    found = set()
    for pid in _pids():
        process = find(pid)
        if process is None or process.start < since:
            continue
        environment = _read(f"/proc/{pid}/environ")
        if marks <= set(environment.split(b"\0")) and process.alive():
            found.add(process)
    return found


def end(processes: Iterable[Process], *, timeout_s: float = 5.0) -> set[Process]:
    """Kill processes and wait until they are gone.

    Returns:
        Those that are still there after the time, as a process in an uninterruptible wait is.
    """
    left = {process for process in processes if process.alive()}
    for process in left:
        process.signal(signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = {process for process in left if process.alive()}
    return left


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, so that none leaves the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(agent_pid: int | None = None) -> None:
    """Be killed as soon as the parent of this process ends, however it ends.

    Called first thing in torchrun's process and in each rank of a launched job; elsewhere it does
    nothing. A parent that ended before this call is noticed: the chain from here up to the job's
    agent must be unbroken.

    Args:
        agent_pid: The agent; by default the one that the environment names, if any.
    """
    if agent_pid is None:
        agent_pid = int(os.environ.get(AGENT_PID, "0"))
    if agent_pid == 0:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = os.getppid()
    while pid not in (agent_pid, 0):
        state = _stat(pid)
        pid = 0 if state is None else state.parent
    if pid != agent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
