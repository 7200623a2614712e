"""Runs by their id: where their files are stored, messages about them, and their processes.

Launcher and agent exchange lines, each with a mark and a JSON object. Login scripts and ssh may
write to the same stream before the agent does: lines without the mark are kept for error messages.

A process is identified by its id *and* its start time, because the system reuses ids; psutil does
that within one process, `record` across processes. The processes of a run carry its mark in their
environment: torchrun makes each rank the leader of a process group, so killing groups would leave
ranks behind, and if the agent has died, its orphans are not among our descendants.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from psutil import Process

from megatron_ext.errors import LaunchError, reason_of
from megatron_ext.tools.launch.run_folder import RunFolder

Json = dict[str, Any]
RANK_MARK = b"\x1e"
"""Precedes the rank in each line of a rank's output."""
STOPPED = "megatron-ext stop"
"""Why an agent stopped its job, if the user did not do so through the launcher."""
_MARK = b"\x1emegatron-ext "
# Environment variables of every process of a run: its id, and the index of its host.
RUN_ID = "MEGATRON_EXT_RUN_ID"
NODE = "MEGATRON_EXT_NODE"


def encode(message: Json) -> bytes:
    """Return a message as a line."""
    return _MARK + json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Json | None:
    """Return the message at the end of a line, or None for any other line."""
    # A login script may have printed text before it, without ending the line.
    _, mark, text = line.partition(_MARK)
    with suppress(ValueError):
        message = json.loads(text)
        return message if mark and isinstance(message, dict) else None
    return None


def runs_root() -> Path:
    """Return the folder of runs on this host: `MEGATRON_EXT_RUNS`, or in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    named = os.environ.get("MEGATRON_EXT_RUNS") or f"{state}/megatron_ext/runs"
    home = os.path.expanduser(named)  # noqa: PTH111 - Path.expanduser() raises for unknown users
    return Path(home).absolute()


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    # Two launches within one second differ in the random suffix.
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def check_run_id(run_id: str) -> str:
    """Return the user's run id, which may be that of a restart.

    Raises:
        LaunchError: It is not a valid run id.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(-r[0-9]+)?", run_id):
        raise LaunchError(
            f"{run_id!r} is not a run id; use up to 64 letters, digits, dots, dashes, underscores"
        )
    return run_id


def load(run_id: str, name: str) -> Json | None:
    """Return the `plan`, `launcher` or `result` of a run on this machine.

    None if it does not exist.

    Raises:
        LaunchError: It cannot be read, or others could have written it.
    """
    path = runs_root() / check_run_id(run_id)
    try:
        with RunFolder.open(runs_root(), run_id) as folder:
            content = folder.read_json(f"{name}.json")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read: {reason_of(error)}; delete it"
        ) from None
    if not isinstance(content, dict | None):
        raise LaunchError(f"{path / name}.json is not of this version; delete it")
    return content


def record() -> Json:
    """Return JSON data that identifies this process even if its id is reused later."""
    return {
        "pid": os.getpid(),
        "start": _start(os.getpid()),
        "machine": socket.gethostname(),
    }


def _start(pid: int) -> str:
    """Return when a process started: the system's boot, and the ticks since then."""
    # Don't use psutil's create_time(), which changes when the clock of the host is set.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    ticks = (
        Path(f"/proc/{pid}/stat")
        .read_text(errors="replace")
        .rpartition(")")[2]
        .split()[19]
    )
    return f"{boot} {ticks}"


def recorded(entry: Any) -> Process | None:
    """Return the process of a `record`, or None if it has ended or the record is invalid.

    The entry comes from a file, and may be of any type.
    """
    try:
        process = Process(int(entry["pid"]))
        is_same = entry["start"] == _start(process.pid)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return None
    return process if is_same and _is_alive(process) else None


def _is_alive(process: Process) -> bool:
    with suppress(
        psutil.Error
    ):  # a process that has ended but was not waited for is a zombie
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def marked(run_id: str, node: int) -> set[Process]:
    """Return the processes of a run on a host."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(
            psutil.Error
        ):  # it has already exited, or belongs to another user
            environment = process.environ()
            if (environment.get(RUN_ID), environment.get(NODE)) == (run_id, str(node)):
                processes.add(process)
    return processes


def end(processes: Iterable[Process], timeout_s: float = 5.0) -> set[Process]:
    """Kill processes and return the survivors, such as processes blocked on a device."""
    remaining = set(filter(_is_alive, processes))
    # Kill all before waiting for any, since a parent could start new ones
    for process in remaining:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    # Don't use psutil.wait_procs(), which would take a child's exit code from the `Popen` that
    # waits for it.
    deadline = time.monotonic() + timeout_s
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = set(filter(_is_alive, remaining))
    return remaining
