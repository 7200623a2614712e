"""The commands `stop`, `status`, `logs` and `collect` for a job, by its run id.

They read the plan that `launch` wrote on this machine, and query an agent on each host.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import files
from megatron_ext.errors import LaunchError, line_of
from megatron_ext.tools.launch import process, protocol, runs, slurm
from megatron_ext.tools.launch.connection import Connection, ConnectionLost
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.ssh import Ssh, explain

if TYPE_CHECKING:
    from psutil import Process

__all__ = ["COMMANDS"]

_POLL_S = 0.1
_PATTERNS = ("benchmark/*", "benchmark/*/*")


class _Run:
    """A run that was launched from this machine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.plan = runs.load_plan(args.run_id)
        self.nodes: list[dict[str, Any]] = self.plan["nodes"]
        self._ssh = Ssh.parse(args.ssh_cmd)
        job = self.plan.get("slurm_job")
        if job is not None:
            # What is left after a job are files, which its hosts share with this machine.
            self._ssh, running = slurm.Srun(job=job), slurm.state(job) == "RUNNING"
            self.nodes = [{**node, "local": not running} for node in self.nodes]
        self._timeout_s: float = args.timeout

    def launcher(self) -> Process | None:
        """The launcher's process, if it still runs."""
        return process.recorded(runs.run_dir(self.plan["run_id"]) / "launcher.json")

    def request(self, index: int, op: str, **values: Any) -> protocol.Message:
        """A request about this run to an agent on one of its hosts."""
        return {
            "op": op,
            "protocol": protocol.VERSION,
            "run_id": self.plan["run_id"],
            "node": index,
            "host": self.nodes[index]["host"],
            "workdir": self.plan["workdir"],
            "log_root": self.plan["log_root"],
            **values,
        }

    def on_all(self, ask: Callable[[int, Connection], Awaitable[Any]]) -> list[Any | LaunchError]:
        """Connect to all hosts at once; return the result of `ask`, or the error, for each."""

        async def one(index: int) -> Any:
            node = self.nodes[index]
            host = Host(node["host"], port=node["port"], user=node["user"])
            connection = None
            try:
                connection = await Connection.to(
                    host, local=node["local"], python=self.plan["python"], ssh=self._ssh
                )
                return await asyncio.wait_for(ask(index, connection), self._timeout_s)
            except asyncio.TimeoutError:
                return LaunchError(f"{host.name}: no answer within {self._timeout_s:g} s")
            except LaunchError as error:
                return LaunchError(f"{host.name}: {error}")
            except ConnectionLost as error:
                if connection is None:
                    return LaunchError(f"{host.name}: {error}")
                why = explain(host.name, connection.exit_code, list(connection.noise))
                return LaunchError(f"{host.name}: {why}")
            finally:
                if connection is not None:
                    await connection.close()

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(one(index) for index in range(len(self.nodes))))

        return asyncio.run(everywhere())

    def ask_all(self, op: str, **values: Any) -> list[Any]:
        """Send one request to every host; return the answers."""

        async def ask(index: int, connection: Connection) -> Any:
            await connection.send(self.request(index, op, **values))
            return (await connection.receive())[0]

        return self.on_all(ask)


def _print_all(answers: list[Any], text: Callable[[int, Any], str]) -> int:
    """Print the lines of each host; return 1 if one did not answer."""
    failed = 0
    for index, answer in enumerate(answers):
        if isinstance(answer, LaunchError):
            print(f"megatron-ext: error: {line_of(answer)}", file=sys.stderr)
            failed = 1
        else:
            print(text(index, answer))
    return failed


def _stop(args: argparse.Namespace) -> int:
    if _waits(args.run_id):
        slurm.cancel(args.run_id)
        print("Slurm's job is cancelled, before it started")
        return 0
    run = _Run(args)
    grace_s = run.plan["grace_s"] if args.grace is None else args.grace
    if _submitted(args.run_id):
        slurm.end(args.run_id, 2 * grace_s + args.timeout)
        print(f"Slurm's job {args.run_id} has ended")
        return 0
    launcher = run.launcher()
    if launcher is not None:
        process.send(launcher, signal.SIGTERM)
        deadline = time.monotonic() + grace_s + 5
        while process.alive(launcher) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    # Also after an orderly end, to show that no process is left.
    answers = run.ask_all("stop", grace_s=grace_s)

    def text(index: int, answer: dict[str, Any]) -> str:
        host = run.nodes[index]["host"]
        if answer["stuck"]:
            return f"{host}: processes {answer['stuck']} cannot be killed (they wait for a device)"
        if answer["agent"] or answer["killed"]:
            return f"{host}: stopped ({answer['killed']} processes killed after the grace)"
        return f"{host}: nothing runs"

    code = _print_all(answers, text)
    if any(not isinstance(answer, LaunchError) and answer["stuck"] for answer in answers):
        return 1
    return code


def _submitted(run_id: str) -> bool:
    """Whether a run is a job that `launch --slurm` submitted."""
    return (runs.runs_root() / f"slurm-{runs.check_run_id(run_id)}.sh").exists()


def _waits(run_id: str) -> bool:
    """Whether a run is a job that Slurm has not started."""
    started = (runs.run_dir(run_id) / "plan.json").exists()
    return _submitted(run_id) and not started and slurm.state(run_id) is not None


def _status(args: argparse.Namespace) -> int:
    if _waits(args.run_id):
        print(f"Slurm's job {args.run_id}: {slurm.state(args.run_id)}, nothing runs yet")
        return 0
    run = _Run(args)
    print(f"launcher: {'runs' if run.launcher() else 'ended'}")
    outcome = runs.load_result(args.run_id)
    if outcome is not None:
        why = outcome["failure"] or outcome["stopped_by"] or "ended well"
        print(f"result: exit code {outcome['exit_code']}: {why}")

    def text(index: int, answer: dict[str, Any]) -> str:
        host = run.nodes[index]["host"]
        if not answer["known"]:
            return f"{host}: has no record of this run"
        state = f"{host}: agent {'runs' if answer['agent'] else 'gone'}, "
        state += f"{answer['processes']} processes"
        ended = answer["ended"]
        if ended:
            state += f", ended with {ended['code']}"
            state += f" ({ended['stopped']})" if ended["stopped"] else ""
        return state

    return _print_all(run.ask_all("status"), text)


def _logs(args: argparse.Namespace) -> int:
    run = _Run(args)
    if args.rank is not None and not 0 <= args.rank < run.plan["world_size"]:
        raise LaunchError(f"--rank is {args.rank}; the job has ranks 0 to "
                          f"{run.plan['world_size'] - 1}")  # fmt: skip

    def local_rank(index: int) -> int | None:
        node = run.nodes[index]
        return None if args.rank is None else args.rank - node["first_rank"]

    async def ask(index: int, connection: Connection) -> Any:
        local = local_rank(index)
        if local is not None and not 0 <= local < run.nodes[index]["nproc"]:
            return {"files": []}
        request = run.request(index, "tail", local_rank=local, lines=args.lines)
        await connection.send(request)
        return (await connection.receive())[0]

    def text(index: int, answer: dict[str, Any]) -> str:
        host = run.nodes[index]["host"]
        parts = ["\n".join([f"# {host}:{f['path']}", *f["lines"]]) for f in answer["files"]]
        return "\n".join(parts)

    return _print_all(run.on_all(ask), text)


def _collect(args: argparse.Namespace) -> int:
    run = _Run(args)
    target: Path = args.to or Path(f"collected-{args.run_id}")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{target} cannot be made: {error.strerror}; give another --to") from None

    async def ask(index: int, connection: Connection) -> Any:
        await connection.send(run.request(index, "pack", patterns=_PATTERNS))
        path = target / f"{runs.node_dir_name(index, run.nodes[index]['host'])}.tar.gz"
        try:
            with files.replacing(path) as scratch, scratch.open("wb") as file:
                while True:
                    message, data = await connection.receive()
                    if message["kind"] == "done":
                        break
                    file.write(data)
        except OSError as error:
            remedy = "make room, or give another --to"
            raise LaunchError(files.cannot_write(path, error, remedy)) from None
        return {"path": path, "files": message["files"]}

    def text(index: int, answer: dict[str, Any]) -> str:
        return f"{run.nodes[index]['host']}: {answer['files']} files in {answer['path']}"

    return _print_all(run.on_all(ask), text)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "stop": _stop,
    "status": _status,
    "logs": _logs,
    "collect": _collect,
}
"""Subcommand -> what runs it; each returns an exit code."""
