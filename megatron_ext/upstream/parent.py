"""Ties processes to their parent, a job to its agent, through the kernel. Linux only."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

AGENT_PID = "MEGATRON_EXT_AGENT_PID"
"""Environment variable of every process of a job: the agent that it must not outlive."""

SOCKETS = "MEGATRON_EXT_SOCKETS"
"""Environment variable of every process of a job: the agent's folder for sockets of workers."""

HOSTED_STORES = "MEGATRON_EXT_HOSTED_STORES"
"""Environment variable of ranks whose launcher hosts the stores, so that no rank has to."""

HOST_ADDRESS = "MEGATRON_EXT_HOST_ADDRESS"
"""Environment variable of ranks that may be lost: the address at which other hosts reach theirs."""

RANKS_MET = "MEGATRON_EXT_RANKS_MET"
"""Environment variable of ranks that may be lost: the file that says that all of them have met."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Adopt all orphaned descendants, so that none leaves the process tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(agent_pid: int | None = None) -> None:
    """Make the kernel kill this process as soon as its parent ends, for any reason.

    torchrun's process and each rank of a launched job call this first; elsewhere it does nothing.

    Args:
        agent_pid: The agent. None: the one in the environment, if any.
    """
    if agent_pid is None:
        agent_pid = int(os.environ.get(AGENT_PID, "0"))
    if agent_pid == 0:
        return
    import psutil

    # Use SIGKILL: a rank inside of a collective does not respond to signals that Python handles.
    # The kernel clears the setting in children, so each process must call this itself.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call, so check that the chain up to the agent is
    # unbroken.
    if agent_pid not in [parent.pid for parent in psutil.Process().parents()]:
        os.kill(os.getpid(), signal.SIGKILL)


def stores_are_hosted() -> bool:
    """Return whether the launcher hosts the stores in which this rank meets the others."""
    return os.environ.get(HOSTED_STORES) == "1"


def note_ranks_met() -> None:
    """Tell the launcher that all ranks have met, so that one of them may be lost from here on."""
    if path := os.environ.get(RANKS_MET):
        Path(path).touch()


def use_sockets_folder() -> None:
    """Make this rank and its workers create their sockets in the agent's folder, if it exists.

    Each DataLoader worker creates a folder `pymp-*` for the socket through which it sends tensors,
    and removes it when it ends normally. A job that fails ends its workers with signals, so they
    leave it behind.
    """
    if folder := os.environ.get(SOCKETS):
        # `multiprocessing.util.get_temp_dir` reads the folder here; child processes inherit the
        # setting.
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def die_with_caller(pid: int) -> None:
    """Make the kernel kill this process, which `pid` has forked, as soon as that process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # the caller has already ended
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    # Python has no prctl, but libc is already loaded.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
