"""The commands `stop`, `status` and `logs` for a job, by its run id.

They read the plan that `launch` wrote on this machine; an agent on each host does the rest.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress
from dataclasses import replace

import psutil

from megatron_ext.errors import LaunchError, line_of
from megatron_ext.tools.launch import process, runs, slurm
from megatron_ext.tools.launch.plan import JobPlan
from megatron_ext.tools.launch.ssh import Ssh
from megatron_ext.tools.launch.supervise import Agents

__all__ = ["run"]


def _plan_of(found: runs.Json | None, run_id: str) -> JobPlan:
    root = runs.runs_root()
    if found is None:
        known = sorted(entry.parent.name for entry in root.glob("*/plan.json"))[-5:]
        latest = f"the latest are {', '.join(known)}" if known else "none was started from here"
        raise LaunchError(f"there is no run {run_id} in {root}; {latest}")
    try:
        return JobPlan.of_record(found)
    except (KeyError, TypeError):
        raise LaunchError(
            f"{root / run_id / 'plan.json'} is not of this version; launch the run again"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; return 1 if a host does not answer, or cannot do it."""
    run_id, command = runs.check_run_id(args.run_id), args.command
    # A job that waits in Slurm's queue has no plan yet, only the script of `launch --slurm`.
    is_submitted = (runs.runs_root() / f"slurm-{run_id}.sh").exists()
    found = runs.load(run_id, "plan")
    waits = found is None and is_submitted and command != "logs"
    if waits and (state := slurm.state(run_id)) is not None:
        text = f"Slurm's job {run_id}: {state}, nothing runs yet"
        if command == "stop":
            slurm.scancel(run_id)
            text = "Slurm's job is cancelled, before it started"
        print(text)
        return 0
    plan = _plan_of(found, run_id)
    launcher = process.recorded(runs.run_dir(run_id) / "launcher.json")
    wanted: dict[int, runs.Json] = {index: {} for index in range(len(plan.hosts))}
    if command == "stop":
        grace_s = plan.grace_s if args.grace is None else args.grace
        if is_submitted:
            slurm.end(run_id, 2 * grace_s + args.timeout)
            print(f"Slurm's job {run_id} has ended")
            return 0
        if launcher is not None:
            process.send(launcher, signal.SIGTERM)
            with suppress(psutil.TimeoutExpired):
                launcher.wait(grace_s + 5)
        # Also after an orderly end, to show that no process is left.
        wanted = {index: {"grace_s": grace_s} for index in wanted}
    elif command == "status":
        result = runs.load(run_id, "result")
        if launcher is not None:
            print("running")
        elif result is None:
            print("the launcher has ended without a result")
        elif result.get("exit_code") == 0:
            print("succeeded (exit code 0)")
        else:
            why = result.get("failure") or f"stopped by {result.get('stopped_by')}"
            print(f"failed (exit code {result.get('exit_code')}): {why}")
    else:
        rank, lines = args.rank, {"lines": args.lines}
        if rank is not None and not 0 <= rank < plan.world_size:
            raise LaunchError(f"--rank is {rank}; the job has ranks 0 to {plan.world_size - 1}")
        wanted = {
            index: {"local_rank": None if rank is None else rank - plan.first_rank(index), **lines}
            for index in wanted
            if rank is None or plan.first_rank(index) <= rank < plan.first_rank(index + 1)
        }
    if plan.slurm_job is not None:
        # What is left after a job are files, which its hosts share with this machine.
        here = slurm.state(plan.slurm_job) != "RUNNING"
        plan = replace(plan, hosts=tuple(replace(host, local=here) for host in plan.hosts))
    with Agents(plan, Ssh(args.ssh_cmd, slurm_job=plan.slurm_job)) as agents:
        answers = agents.ask(command, args.timeout, wanted)
    failed = False
    for index, answer in answers.items():
        host = plan.hosts[index].name
        if isinstance(answer, str):
            print(f"megatron-ext: error: {host}: {line_of(answer)}", file=sys.stderr)
            failed = True
        else:
            failed |= answer["failed"]
            print(f"{host}: {answer['text']}")
    return int(failed)
