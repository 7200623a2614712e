"""Runs by their id: where a launched job keeps its plan, its result and its logs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from megatron_ext import files
from megatron_ext.errors import LaunchError

__all__ = [
    "check_run_id",
    "load_plan",
    "new_run_id",
    "node_dir_name",
    "run_dir",
    "runs_root",
    "write_json",
]

_PLAN_KEYS = {"run_id", "workdir", "python", "log_root", "grace_s", "world_size", "nodes"}
_NODE_KEYS = {"host", "port", "user", "nproc", "first_rank", "local"}
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def runs_root() -> Path:
    """Return where runs are kept on this host: `MEGATRON_EXT_RUNS`, else below ~/.local/state."""
    named = os.environ.get("MEGATRON_EXT_RUNS")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "megatron_ext" / "runs"


def new_run_id() -> str:
    """Return an id that sorts by time and that no other job has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def check_run_id(run_id: str) -> str:
    """Return a run id that the user gave.

    Raises:
        LaunchError: It cannot be one: it becomes a directory's name on every host.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise LaunchError(
            f"{run_id!r} is no run id; letters, digits, dots, dashes and underscores are, up to 64"
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
        LaunchError: There is no such run on this machine.
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
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from None
    nodes = plan.get("nodes") if isinstance(plan, dict) and plan.keys() >= _PLAN_KEYS else None
    if not isinstance(nodes, list) or not all(
        isinstance(node, dict) and node.keys() >= _NODE_KEYS for node in nodes
    ):
        raise LaunchError(f"{path} is no plan of a run; launch of this version has to write it")
    return dict(plan)


def write_json(path: Path, value: object) -> None:
    """Replace a file by a JSON document."""
    files.write_text(path, json.dumps(value, indent=1) + "\n")
