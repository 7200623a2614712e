"""Operations of an agent on a job that another agent runs or ran on the same host.

They stop it, report its state, show the end of its logs, or pack its files. Each finds the job
through the file that its agent wrote, and acts only on processes that this file and the job's mark
identify.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from megatron_ext.tools.launch import process
from megatron_ext.tools.launch.runs import node_dir_name, runs_root
from megatron_ext.tools.launch.tail import last_lines, rank_pattern

if TYPE_CHECKING:
    from psutil import Process

__all__ = ["answer", "forget", "log_dir", "running_agent"]

_POLL_S = 0.1
_BLOCK_BYTES = 1 << 18

Reply = Callable[..., None]


def log_dir(request: dict[str, Any]) -> Path:
    """Return the directory of a job on this host."""
    root = Path(request["log_root"]) if request["log_root"] else runs_root()
    run_id: str = request["run_id"]
    return root / run_id / node_dir_name(request["node"], request["host"])


def forget(directory: Path) -> None:
    """Remove only the files of a job that was cancelled before it started."""
    with suppress(OSError):
        (directory / "agent.json").unlink(missing_ok=True)
        directory.rmdir()
        directory.parent.rmdir()


def running_agent(directory: Path) -> Process | None:
    """Return the agent that runs the job of a directory, or None if it has exited."""
    return process.recorded(directory / "agent.json")


def answer(request: dict[str, Any], reply: Reply) -> None:
    """Execute the request and reply once, or in several pieces that end with `done`."""
    operations = {"stop": _stop, "status": _status, "tail": _tail, "pack": _pack}
    operations[request["op"]](request, log_dir(request), reply)


def _stop(request: dict[str, Any], directory: Path, reply: Reply) -> None:
    agent = running_agent(directory)
    if agent is not None:
        process.send(agent, signal.SIGTERM)
        deadline = time.monotonic() + request["grace_s"]
        while process.alive(agent) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if process.alive(agent):
            process.send(agent, signal.SIGKILL)
    left = process.marked(request["run_id"], request["node"])
    stuck = process.end(left)
    reply({"kind": "stopped", "agent": agent is not None, "killed": len(left),
           "stuck": sorted(p.pid for p in stuck)})  # fmt: skip


def _status(request: dict[str, Any], directory: Path, reply: Reply) -> None:
    ended = None
    with suppress(OSError, ValueError):
        ended = json.loads((directory / "ended.json").read_text(encoding="utf-8"))
    reply({
        "kind": "status",
        "known": directory.is_dir(),
        "agent": running_agent(directory) is not None,
        "processes": len(process.marked(request["run_id"], request["node"])),
        "ended": ended,
    })  # fmt: skip


def _log_files(directory: Path, local_rank: int | None) -> Iterator[Path]:
    if local_rank is None:
        yield from (directory / name for name in ("output.log", "torchrun.log"))
        return
    for stream in ("stdout", "stderr"):
        yield from directory.glob(rank_pattern(local_rank, stream))


def _tail(request: dict[str, Any], directory: Path, reply: Reply) -> None:
    files = [
        {"path": str(path), "lines": last_lines(path, request["lines"])}
        for path in _log_files(directory, request["local_rank"])
        if path.is_file()
    ]
    reply({"kind": "tail", "files": files})


class _Pieces:
    """A file for `tarfile` to write to, which sends what is written."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def write(self, data: bytes) -> int:
        self._reply({"kind": "data"}, bytes(data))
        return len(data)


def _pack(request: dict[str, Any], directory: Path, reply: Reply) -> None:
    """Send the directory of the job, and what matches the patterns below its work directory."""
    import tarfile

    workdir = Path(request["workdir"])
    files = {path: Path("logs") / path.relative_to(directory) for path in _files_below(directory)}
    for pattern in request["patterns"]:
        for path in workdir.glob(pattern):
            if path.is_file():
                files[path] = Path("files") / path.relative_to(workdir)
    stream = cast("BinaryIO", _Pieces(reply))
    with tarfile.open(fileobj=stream, mode="w|gz", bufsize=_BLOCK_BYTES) as archive:
        for path, name in sorted(files.items()):
            with suppress(FileNotFoundError):  # gone since it was listed
                archive.add(path, name.as_posix(), recursive=False)
    reply({"kind": "done", "files": len(files)})


def _files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder) / name for name in names if (Path(folder) / name).is_file())
