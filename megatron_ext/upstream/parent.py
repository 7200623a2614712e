"""Makes the kernel kill a process when its parent exits, and a job when its agent exits (Linux)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path

AGENT_PID = "MEGATRON_EXT_AGENT_PID"
"""Environment variable in every process of a job: id of the agent that it must not outlive."""

SOCKETS = "MEGATRON_EXT_SOCKETS"
"""Environment variable in every process of a job: the agent's folder for worker sockets."""

HOSTED_STORES = "MEGATRON_EXT_HOSTED_STORES"
"""Environment variable for ranks: "1" if the launcher hosts the stores, so that no rank has to."""

HOST_ADDRESS = "MEGATRON_EXT_HOST_ADDRESS"
"""Environment variable for ranks that may be lost: the address at which other hosts reach the
rank's host."""

STARTED_RANK = "MEGATRON_EXT_STARTED_RANK"
"""Environment variable for ranks that may be lost: the process's global rank when it started. A
restart within the processes changes RANK, which is `None` for reserve ranks."""

RANKS_MET = "MEGATRON_EXT_RANKS_MET"
"""Environment variable for ranks in a job that survives lost ranks: path of a file that exists once
all ranks have found each other."""

IN_RESERVE = "MEGATRON_EXT_IN_RESERVE"
"""Environment variable for ranks that may be lost: path of a file that exists while the rank is in
reserve."""

# Options of prctl(2), from linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of all orphaned descendants, so that none leaves the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(agent_pid: int | None = None) -> None:
    """Make the kernel kill this process as soon as its parent exits, for any reason.

    torchrun's process and each rank of a launched job call this first. Without an agent, it does
    nothing.

    Args:
        agent_pid: Process id of the agent. If None, it is read from the environment, if set there.
    """
    if agent_pid is None:
        agent_pid = int(os.environ.get(AGENT_PID, "0"))
    if agent_pid == 0:
        return
    import psutil

    # Use SIGKILL: a rank inside a collective does not respond to signals that Python handles.
    # The kernel clears the setting in children, so each process must call this itself.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have exited before the call, in which case no signal follows. Check
    # that the agent is still among the ancestors.
    ancestors = psutil.Process().parents()
    ancestor_pids = [ancestor.pid for ancestor in ancestors]
    if agent_pid not in ancestor_pids:
        os.kill(os.getpid(), signal.SIGKILL)


def stores_are_hosted() -> bool:
    """Return whether the launcher hosts the stores through which the ranks find each other."""
    return os.environ.get(HOSTED_STORES) == "1"


def note_ranks_met() -> None:
    """Signal to the launcher that all ranks have met: from now on the job survives a lost rank."""
    if path := os.environ.get(RANKS_MET):
        Path(path).touch()


def note_reserve(*, is_in_reserve: bool) -> None:
    """Tell the launcher whether this rank is in reserve, so that no other rank waits for it."""
    path = os.environ.get(IN_RESERVE)
    if not path:
        return
    # If the disk is full, the launcher may blame the wrong rank, but the job continues.
    with suppress(OSError):
        if is_in_reserve:
            Path(path).touch()
        else:
            Path(path).unlink(missing_ok=True)


def use_sockets_folder() -> None:
    """Make this rank and its workers create their sockets in the agent's folder, if it exists.

    Each DataLoader worker creates a folder `pymp-*` for the socket through which it sends tensors,
    and removes the folder when it exits normally. A failing job kills its workers with signals, so
    their folders remain. The agent removes its own folder.
    """
    if folder := os.environ.get(SOCKETS):
        # `multiprocessing.util.get_temp_dir` reads the folder here; child processes inherit the
        # setting.
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def die_with_caller(pid: int) -> None:
    """Make the kernel kill this process as soon as its parent `pid` exits."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent exited before the call, the kernel sends nothing.
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    # Python has no prctl, but libc is already loaded.
    libc = ctypes.CDLL(None, use_errno=True)
    # The function is variadic, so without `c_ulong` ctypes would pass an int.
    status = libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0)
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
