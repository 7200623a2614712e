"""Ties processes to the one that started them, by the kernel: a job to its agent. Linux only."""

from __future__ import annotations

import multiprocessing
import os
import signal

AGENT_PID = "MEGATRON_EXT_AGENT_PID"
"""Environment variable of every process of a job: the agent that it must not outlive."""

SOCKETS = "MEGATRON_EXT_SOCKETS"
"""Environment variable of every process of a job: the agent's folder for sockets of workers."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Adopt all orphaned descendants, so that none leaves the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(agent_pid: int | None = None) -> None:
    """Have the kernel kill this process as soon as its parent ends, for whatever reason.

    torchrun's process and each rank of a launched job call this first; elsewhere it does nothing.

    Args:
        agent_pid: The agent; by default the one named in the environment, if any.
    """
    if agent_pid is None:
        agent_pid = int(os.environ.get(AGENT_PID, "0"))
    if agent_pid == 0:
        return
    import psutil

    # SIGKILL: a rank may be inside of a collective, deaf to signals that Python handles. The kernel
    # clears the setting in children, so each process needs its own call.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call: the chain up to the agent must be unbroken.
    if agent_pid not in [parent.pid for parent in psutil.Process().parents()]:
        os.kill(os.getpid(), signal.SIGKILL)


def use_sockets_folder() -> None:
    """Let this rank and its workers put their sockets into the agent's folder, if there is one.

    Each worker of a DataLoader makes a folder `pymp-*` for the socket that it sends tensors by, and
    removes it when it ends by itself. A job that fails ends its workers by signals.
    """
    if folder := os.environ.get(SOCKETS):
        # Where `multiprocessing.util.get_temp_dir` keeps it; child processes inherit the setting.
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def die_with_caller(pid: int) -> None:
    """Have the kernel kill this process, which `pid` has forked, as soon as that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    # Python has no prctl; libc is loaded already.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
