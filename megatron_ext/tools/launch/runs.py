"""Runs by their id: where their files lie on each machine, and the messages about them.

Launcher and agent write lines to each other, a mark and a JSON object. Login scripts and ssh may
write to the same stream before the agent does: lines without the mark are kept for error messages.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from megatron_ext import files
from megatron_ext.errors import LaunchError, reason_of

Json = dict[str, Any]
_MARK = b"\x1emegatron-ext "


def encode(message: Json) -> bytes:
    """Return a message as a line."""
    return _MARK + json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Json | None:
    """Return the message that a line is, or None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line.removeprefix(_MARK))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def runs_root() -> Path:
    """Return the folder of runs on this host: `MEGATRON_EXT_RUNS`, else below ~/.local/state."""
    named = os.environ.get("MEGATRON_EXT_RUNS")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "megatron_ext" / "runs"


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    # Two launches of one second differ in the rest.
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def check_run_id(run_id: str) -> str:
    """Return a run id that the user gave."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", run_id):
        raise LaunchError(
            f"{run_id!r} is not a run id; use up to 64 letters, digits, dots, dashes, underscores"
        )
    return run_id


def write_json(path: Path, value: object) -> None:
    """Replace a file by a JSON document."""
    files.write_text(path, json.dumps(value, indent=1) + "\n")


def load(run_id: str, name: str) -> Json | None:
    """Return the `plan` or the `result` of a run on this machine; None if there is no such file."""
    path = runs_root() / check_run_id(run_id) / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read: {reason_of(error)}; delete it") from None
    if not isinstance(found, dict | None):
        raise LaunchError(f"{path} is not of this version; delete it")
    return found
