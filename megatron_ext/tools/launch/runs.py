"""Runs by their id: the files of a launched job's plan, result and logs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from megatron_ext import files
from megatron_ext.errors import LaunchError, reason_of

__all__ = [
    "check_run_id",
    "load_plan",
    "load_result",
    "new_run_id",
    "node_dir_name",
    "run_dir",
    "runs_root",
    "write_json",
]

_OPTIONAL = type(None)
_PLAN: dict[str, tuple[type, ...]] = {
    "run_id": (str,),
    "workdir": (str,),
    "python": (str,),
    "log_root": (str, _OPTIONAL),
    "grace_s": (int, float),
    "world_size": (int,),
    "nodes": (list,),
}
_NODE: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "port": (int, _OPTIONAL),
    "user": (str, _OPTIONAL),
    "nproc": (int,),
    "first_rank": (int,),
    "local": (bool,),
}
_RESULT: dict[str, tuple[type, ...]] = {
    "exit_code": (int,),
    "failure": (str, _OPTIONAL),
    "stopped_by": (str, _OPTIONAL),
}
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def runs_root() -> Path:
    """Return the folder of runs on this host: `MEGATRON_EXT_RUNS`, else below ~/.local/state."""
    named = os.environ.get("MEGATRON_EXT_RUNS")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "megatron_ext" / "runs"


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def check_run_id(run_id: str) -> str:
    """Check a run id that the user gave, and return it.

    Raises:
        LaunchError: It cannot be the name of a directory on every host.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise LaunchError(
            f"{run_id!r} is not a run id; use up to 64 letters, digits, dots, dashes, underscores"
        )
    return run_id


def run_dir(run_id: str) -> Path:
    """Return the directory of a run on the launcher's host."""
    return runs_root() / check_run_id(run_id)


def node_dir_name(node: int, host: str) -> str:
    """Return the directory of one host below that of the run: hosts may share a file system."""
    return f"{node:03d}-{re.sub(r'[^A-Za-z0-9._-]', '_', host)}"


def load_plan(run_id: str) -> dict[str, Any]:
    """Return what `launch` wrote about a run.

    Raises:
        LaunchError: The run does not exist on this machine.
    """
    path = run_dir(run_id) / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(entry.parent.name for entry in runs_root().glob("*/plan.json"))[-5:]
        raise LaunchError(
            f"there is no run {run_id} in {runs_root()}"
            + (f"; the latest are {', '.join(known)}" if known else "; none was started from here")
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read: {reason_of(error)}") from None
    if (
        not _has(plan, _PLAN)
        or plan["run_id"] != run_id
        or not all(_has(node, _NODE) for node in plan["nodes"])
    ):
        raise LaunchError(f"{path} is not a plan of this version; launch the run again")
    return dict(plan)


def load_result(run_id: str) -> dict[str, Any] | None:
    """Return how a run ended; None if it has not, as far as this machine knows.

    Raises:
        LaunchError: What `launch` wrote about it is damaged.
    """
    path = run_dir(run_id) / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read: {reason_of(error)}; delete it") from None
    if not _has(result, _RESULT):
        raise LaunchError(f"{path} is not a result of a run; delete it")
    return dict(result)


def _has(found: Any, wanted: dict[str, tuple[type, ...]]) -> bool:
    """Return whether JSON is an object with at least these values, of these types."""
    return isinstance(found, dict) and all(
        name in found and type(found[name]) in types and "\0" not in str(found[name])
        for name, types in wanted.items()
    )


def write_json(path: Path, value: object) -> None:
    """Replace a file by a JSON document."""
    files.write_text(path, json.dumps(value, indent=1) + "\n")
