"""Identifies the processes of a job, and ends exactly those.

A process is identified by its id *and* its start time, because the system reuses ids; psutil
handles that within one process, `record` between several. The processes of a job are the
descendants of its agent, and all that carry the mark which the agent put into the environment:
torchrun makes each rank the leader of its own process group, so killing groups would leave ranks
behind, and an orphaned process is in no tree.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from psutil import Process

# Environment variables of every process of a job: its run id, and the rank of its host.
RUN_ID = "MEGATRON_EXT_RUN_ID"
NODE = "MEGATRON_EXT_NODE"
# Start times count from the start of the system, which clocks correct by a second.
_SAME_START_S = 2.0


def record() -> dict[str, Any]:
    """Return what identifies this process whatever happens to its id later, as JSON can hold it."""
    return {"pid": Process().pid, "start": Process().create_time()}


def recorded(path: Path) -> Process | None:
    """Return the process whose `record` a file holds, or None if there is none or it has ended."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        process = Process(int(entry["pid"]))
        same = abs(process.create_time() - float(entry["start"])) < _SAME_START_S
    except (OSError, ValueError, KeyError, TypeError, RecursionError, psutil.Error):
        return None
    return process if same and _alive(process) else None


def _alive(process: Process) -> bool:
    with suppress(psutil.Error):  # one that has ended and was not waited for is a zombie
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def send(process: Process, number: int) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(psutil.Error):
        process.send_signal(number)


def descendants(root: int) -> set[Process]:
    """Return all descendants of a process."""
    with suppress(psutil.Error):
        return set(filter(_alive, Process(root).children(recursive=True)))
    return set()


def marked(run_id: str, node: int, since: float = 0.0) -> set[Process]:
    """Return the processes of a job on a host that started after a time, in seconds since 1970."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended meanwhile, or is not ours
            if process.create_time() + _SAME_START_S >= since:
                environment = process.environ()
                if (environment.get(RUN_ID), environment.get(NODE)) == (run_id, str(node)):
                    found.add(process)
    return set(filter(_alive, found))


def end(processes: Iterable[Process], timeout_s: float = 5.0) -> set[Process]:
    """Kill processes; return those that remain, such as processes that wait for a device."""
    left = set(filter(_alive, processes))
    for process in left:  # all before any is awaited: a parent could start new ones meanwhile
        send(process, signal.SIGKILL)
    # Not psutil.wait_procs(): it would take a child's exit code from the `Popen` that waits for it.
    deadline = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = set(filter(_alive, left))
    return left
