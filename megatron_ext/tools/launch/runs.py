"""Runs by id: their files, the messages between launcher and agents, and their processes.

The launcher and an agent exchange lines that each contain a mark and a JSON object. Login scripts
and ssh may write to the same stream before the agent does, so lines without the mark are kept for
error messages.

A process is identified by its id *and* its start time, because the system reuses ids. psutil checks
both within one process, and `record` makes this possible across processes. A run's processes carry
the run id in their environment. Searching by process group would not find them, because torchrun
makes each rank a group leader; nor would searching descendants once the agent has died.
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
"""Precedes the rank number in every line that a rank prints."""
STOPPED = "megatron-ext stop"
"""The reason that an agent reports if `megatron-ext stop` stopped its job."""
KEEPER = "the keeper of the ranks"
"""The part that an agent reports as failed if the keeper was killed (`keeper.py`)."""
_MARK = b"\x1emegatron-ext "
# Environment variables of every process in a run: the run id and the host's index.
RUN_ID = "MEGATRON_EXT_RUN_ID"
NODE = "MEGATRON_EXT_NODE"


def encode(message: Json) -> bytes:
    """Return a message as one line."""
    # JSON escapes line breaks and all non-ASCII characters.
    text = json.dumps(message, separators=(",", ":"))
    return _MARK + text.encode() + b"\n"


def decode(line: bytes) -> Json | None:
    """Return the message at the end of a line, or None if the line contains no message."""
    # A login script may have printed text without a newline before the message.
    _, mark, text = line.partition(_MARK)
    with suppress(ValueError):
        message = json.loads(text)
        if mark and isinstance(message, dict):
            return message
    return None


def runs_root() -> Path:
    """Return this host's root folder for runs: `MEGATRON_EXT_RUNS`, or one in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    named = os.environ.get("MEGATRON_EXT_RUNS") or f"{state}/megatron_ext/runs"
    home = os.path.expanduser(named)  # noqa: PTH111 - Path.expanduser() raises for unknown users
    return Path(home).absolute()


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    # The random suffix distinguishes launches within the same second.
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def check_run_id(run_id: str) -> str:
    """Validate and return a run id from the user, such as `job` or, for a restart, `job-r1`.

    Raises:
        LaunchError: The run id is not valid.
    """
    # A restart appends `-rN`, even to an id of the maximum length.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(-r[0-9]+)?", run_id):
        raise LaunchError(
            f"{run_id!r} is not a run id; use up to 64 letters, digits, dots, dashes, underscores"
        )
    return run_id


def load(run_id: str, name: str) -> Json | None:
    """Return the `plan`, `launcher` or `result` of a run on this machine, or None if it has none.

    Raises:
        LaunchError: The file cannot be read, or other users could have written it.
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
        raise LaunchError(
            f"{path / name}.json was written by another version; delete it"
        )
    return content


def record() -> Json:
    """Return JSON data that identifies this process even after the system reuses its id."""
    pid = os.getpid()
    return {
        "pid": pid,
        "start": _start(pid),
        "machine": socket.gethostname(),
    }


def _start(pid: int) -> str:
    """Return when a process started: the boot id and the clock ticks since boot."""
    # Do not use psutil's create_time(), which changes when the host's clock is set. A
    # record may be from before a reboot or, on a shared disk, from another machine, so
    # include the boot id.
    boot_id_file = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id_file.read_text(encoding="ascii").strip()
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field, the name in parentheses, may contain spaces. `starttime` is field 22.
    _, _, fields_from_third = stat.rpartition(")")
    ticks = fields_from_third.split()[19]
    return f"{boot} {ticks}"


def recorded(entry: Any) -> Process | None:
    """Return the process for a `record`, or None if it has exited or the record is invalid.

    The record comes from a file, so it may be of any type.
    """
    try:
        process = Process(int(entry["pid"]))
        is_same = entry["start"] == _start(process.pid)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return None
    return process if is_same and _is_alive(process) else None


def _is_alive(process: Process) -> bool:
    with suppress(psutil.Error):
        # A zombie has exited, but its parent has not waited for it.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def marked(run_id: str, node: int) -> set[Process]:
    """Return a run's processes on this host."""
    processes = set()
    for process in psutil.process_iter():
        # The process may have exited already or belong to another user.
        with suppress(psutil.Error):
            # Several hosts may share one process table, for example as containers or in tests, so
            # also compare the host.
            environment = process.environ()
            is_of_run = environment.get(RUN_ID) == run_id
            is_of_host = environment.get(NODE) == str(node)
            if is_of_run and is_of_host:
                processes.add(process)
    return processes


def end(processes: Iterable[Process], timeout_s: float = 5.0) -> set[Process]:
    """Kill processes and return the survivors, such as processes blocked on a device."""
    remaining = set(filter(_is_alive, processes))
    # Kill all processes before waiting for any of them, because the rest could start new ones.
    for process in remaining:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    # Do not use psutil.wait_procs(), which would reap a child whose exit code its
    # `Popen` needs.
    deadline = time.monotonic() + timeout_s
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = set(filter(_is_alive, remaining))
    return remaining
