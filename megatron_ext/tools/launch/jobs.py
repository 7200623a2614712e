"""The commands `stop`, `status` and `logs` for a job, by its run id.

They read the plan that `launch` wrote on this machine, and query an agent on each host.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from megatron_ext.errors import LaunchError, line_of
from megatron_ext.tools.launch import process, runs, slurm
from megatron_ext.tools.launch.plan import Plan
from megatron_ext.tools.launch.ssh import Ssh
from megatron_ext.tools.launch.supervise import Agents

__all__ = ["run"]


def _plan_of(run_id: str) -> Plan:
    """Return the plan of a run that was launched from this machine."""
    found, root = runs.load(run_id, "plan"), runs.runs_root()
    if found is None:
        known = sorted(entry.parent.name for entry in root.glob("*/plan.json"))[-5:]
        latest = f"the latest are {', '.join(known)}" if known else "none was started from here"
        raise LaunchError(f"there is no run {run_id} in {root}; {latest}")
    with suppress(KeyError, TypeError):
        plan = Plan.of_record(found)
        if plan.run_id == run_id:
            return plan
    raise LaunchError(f"{root / run_id / 'plan.json'} is not of this version; launch the run again")


def _ask_hosts(
    plan: Plan, args: argparse.Namespace, requests: dict[int, Any], text: Callable[[Any], str]
) -> int:
    """Print what each host answers to its request; return 1 if one does not answer."""
    ssh = Ssh.parse(args.ssh_cmd)
    if (job := plan.slurm_job) is not None:
        # What is left after a job are files, which its hosts share with this machine.
        ssh, here = slurm.Srun(job=job), slurm.state(job) != "RUNNING"
        plan = replace(plan, nodes=tuple(replace(node, local=here) for node in plan.nodes))
    with Agents(plan, ssh) as agents:
        answers = agents.ask(requests, args.timeout)
    for index, answer in answers.items():
        host = agents.names[index]
        if isinstance(answer, str):
            print(f"megatron-ext: error: {host}: {line_of(answer)}", file=sys.stderr)
        elif line := text(answer):
            print(f"{host}: {line}")
    return int(any(isinstance(answer, str) for answer in answers.values()))


def _stop(plan: Plan, args: argparse.Namespace) -> int:
    grace_s = plan.grace_s if args.grace is None else args.grace
    launcher = process.recorded(runs.run_dir(plan.run_id) / "launcher.json")
    if launcher is not None:
        process.send(launcher, signal.SIGTERM)
        with suppress(psutil.TimeoutExpired):
            launcher.wait(grace_s + 5)
    stuck: list[int] = []

    def text(answer: Any) -> str:
        stuck.extend(answer["stuck"])
        if answer["stuck"]:
            return f"processes {answer['stuck']} cannot be killed (they wait for a device)"
        killed = f"stopped ({answer['killed']} processes killed after the grace)"
        return killed if answer["agent"] or answer["killed"] else "nothing runs"

    # Also after an orderly end, to show that no process is left.
    requests = {i: plan.request(i, "stop") | {"grace_s": grace_s} for i in range(len(plan.nodes))}
    failed = _ask_hosts(plan, args, requests, text)
    return int(bool(failed or stuck))


def _status(plan: Plan, args: argparse.Namespace) -> int:
    result = runs.load(plan.run_id, "result")
    if process.recorded(runs.run_dir(plan.run_id) / "launcher.json") is not None:
        print("running")
    elif result is None:
        print("the launcher has ended without a result")
    elif result.get("exit_code") == 0:
        print("succeeded (exit code 0)")
    else:
        why = result.get("failure") or f"stopped by {result.get('stopped_by')}"
        print(f"failed (exit code {result.get('exit_code')}): {why}")

    def text(answer: Any) -> str:
        ended = answer["ended"]
        if answer["log_dir"] is None:
            return "has no record of this run"
        state = "running, " if answer["agent"] else ""
        if ended:
            why = f" ({ended['stopped']})" if ended["stopped"] else ""
            state = f"ended with {ended['code']}{why}, "
        return f"{state}{answer['processes'] or 'no'} processes, logs in {answer['log_dir']}"

    requests = {index: plan.request(index, "status") for index in range(len(plan.nodes))}
    return _ask_hosts(plan, args, requests, text)


def _logs(plan: Plan, args: argparse.Namespace) -> int:
    if args.rank is not None and not 0 <= args.rank < plan.world_size:
        raise LaunchError(f"--rank is {args.rank}; the job has ranks 0 to {plan.world_size - 1}")
    requests = {}
    for index, node in enumerate(plan.nodes):
        local = None if args.rank is None else args.rank - plan.first_rank(index)
        if local is None or 0 <= local < node.nproc:
            wanted = {"local_rank": local, "lines": args.lines}
            requests[index] = plan.request(index, "logs") | wanted

    def text(answer: Any) -> str:
        return "\n".join(
            line for path in answer["files"] for line in (path, *answer["files"][path])
        )

    return _ask_hosts(plan, args, requests, text)


def run(args: argparse.Namespace) -> int:
    """Run one of the commands.

    Raises:
        LaunchError: There is no such run, or a record of it is damaged.
    """
    job = runs.check_run_id(args.run_id)
    is_submitted = (runs.runs_root() / f"slurm-{job}.sh").exists()  # by `launch --slurm`
    if is_submitted and runs.load(job, "plan") is None and (state := slurm.state(job)) is not None:
        if args.command == "stop":
            slurm.scancel(job)
            print("Slurm's job is cancelled, before it started")
            return 0
        if args.command == "status":
            print(f"Slurm's job {job}: {state}, nothing runs yet")
            return 0
    plan = _plan_of(job)
    if is_submitted and args.command == "stop":
        grace_s = plan.grace_s if args.grace is None else args.grace
        slurm.end(job, 2 * grace_s + args.timeout)
        print(f"Slurm's job {job} has ended")
        return 0
    return {"stop": _stop, "status": _status, "logs": _logs}[args.command](plan, args)
