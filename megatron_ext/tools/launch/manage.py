"""Implements `stop`, `status` and `logs` for a job that `launch` started on this machine."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from megatron_ext.errors import LaunchError, line_of
from megatron_ext.tools.launch import runs, slurm
from megatron_ext.tools.launch.agents import Agents
from megatron_ext.tools.launch.display import say
from megatron_ext.tools.launch.plan import JobPlan


def manage(args: argparse.Namespace) -> int:
    """Run `stop`, `status` or `logs`; return 1 if a host does not answer or reports a failure.

    The commands read the plan that `launch` wrote on this machine and start an agent on each host
    to do the work.
    """
    run_id = runs.check_run_id(args.run_id)
    command = args.command
    plan = _reachable_plan(run_id, args)
    launcher_record = runs.load(run_id, "launcher")
    launcher = runs.recorded(launcher_record)
    if command != "stop":
        restarts = ", ".join(_restarts(run_id))
        if restarts:
            say(f"this was the first attempt; the job was restarted as {restarts}")
    timeout_s = args.timeout
    details: runs.Json = {}
    if command == "stop":
        if args.grace is not None:
            plan = replace(plan, grace_s=args.grace)
        timeout_s += plan.grace_s
        if launcher is not None:
            with suppress(psutil.Error):
                # The launcher shuts down the job cleanly and writes its result.
                launcher.terminate()
                launcher.wait(plan.grace_s + 5)
        # Ask the agents even if the launcher has stopped the job, because some
        # processes may be left over.
    elif command == "status":
        print(_state_of(run_id, launcher))
    else:
        plan, local_rank = _of_rank(plan, args.rank)
        details = {"lines": args.lines, "local_rank": local_rank}
    if plan.slurm_job is not None:
        # srun cannot start anything in a finished Slurm job. By then, only files are
        # left. The hosts share these files with this machine, so read them here.
        is_over = slurm.state(plan.slurm_job) != "RUNNING"
        hosts = tuple(replace(host, local=is_over) for host in plan.hosts)
        plan = replace(plan, hosts=hosts)
    with Agents(plan) as agents:
        answers = agents.ask(command, timeout_s, **details)
    if command == "stop" and plan.slurm_job:
        state = slurm.state(plan.slurm_job)
        if state != "RUNNING":
            # The allocation may end together with the launcher, which cuts off the hosts' answers.
            print(f"Slurm job {plan.slurm_job} has ended")
            return 0
    return _print_answers(plan, answers, is_output=command == "logs")


def _reachable_plan(run_id: str, args: argparse.Namespace) -> JobPlan:
    """Return a run's plan, with the programs for reaching hosts from this command line."""
    record = runs.load(run_id, "plan")
    if record is None and run_id.isdecimal():
        state = slurm.state(run_id)
        if state is not None:
            raise LaunchError(
                f"Slurm job {run_id} is {state} and has not started anything yet; wait for it, or "
                f"cancel it with `scancel {run_id}`"
            )
    plan = _plan_of(record, run_id)
    reached_by = plan.flags_to_reach()
    # Never run a program named in a file.
    plan = replace(plan, run_id=run_id, ssh=args.ssh_cmd, python=args.python)
    if reached_by != plan.flags_to_reach():
        flags = shlex.join(reached_by) or "the default ssh and Python"
        say(
            f"the job was launched with {line_of(flags)}; if hosts do not answer, use the same "
            f"flags here"
        )
    return plan


def _of_rank(plan: JobPlan, rank: int | None) -> tuple[JobPlan, int | None]:
    """Return the plan reduced to one rank's host and the local rank, or the whole plan and None."""
    if rank is None:
        return plan, None
    if not 0 <= rank < plan.num_started:
        raise LaunchError(
            f"--rank is {rank}; the job has ranks 0 to {plan.num_started - 1}"
        )
    index = plan.host_of(rank)
    local_rank = rank - plan.first_rank(index)
    host = plan.hosts[index]
    return replace(plan, hosts=(host,)), local_rank


def _print_answers(
    plan: JobPlan,
    answers: Sequence[runs.Json | str],
    *,
    is_output: bool,
) -> int:
    """Print the hosts' answers; return 1 if a host does not answer or reports a failure."""
    has_failed = False
    for host, answer in zip(plan.hosts, answers, strict=True):
        if isinstance(answer, str):
            print(
                f"megatron-ext: error: {host.name}: {line_of(answer)}", file=sys.stderr
            )
            has_failed = True
            continue
        has_failed |= answer["failed"]
        # Print the ranks' output unchanged, but escape our own text.
        text = answer["text"] if is_output else line_of(answer["text"])
        print(f"{host.name}: {text}")
    return int(has_failed)


def _plan_of(record: runs.Json | None, run_id: str) -> JobPlan:
    root = runs.runs_root()
    if record is None:
        run_ids = sorted(path.parent.name for path in root.glob("*/plan.json"))
        latest = "no run was started from here"
        if run_ids:
            latest = f"the latest are {', '.join(run_ids[-5:])}"
        raise LaunchError(f"there is no run {run_id} in {root}; {latest}")
    try:
        return JobPlan.of_record(record)
    except (KeyError, TypeError, ValueError):
        raise LaunchError(
            f"{root / run_id / 'plan.json'} was written by another version; launch the run again"
        ) from None


def _restarts(run_id: str) -> list[str]:
    """Return a run's restarts, in order (`attempts.with_restarts`)."""
    restarts: list[str] = []
    while True:
        number = len(restarts) + 1
        restart = f"{run_id}-r{number}"
        if runs.load(restart, "plan") is None:
            return restarts
        restarts.append(restart)


def _state_of(run_id: str, launcher: psutil.Process | None) -> str:
    """Return a description of how a run finished, or `running` if its launcher runs here."""
    if launcher is not None:
        return "running"
    result = runs.load(run_id, "result")
    if result is None:
        launcher_record = runs.load(run_id, "launcher") or {}
        machine = launcher_record.get("machine")
        if machine in (None, socket.gethostname()):
            return "the launcher has exited without a result"
        return line_of(f"no result yet; the launcher runs on {machine}")
    if result.get("exit_code") == 0:
        return "succeeded (exit code 0)"
    why = result.get("failure") or f"stopped by {result.get('stopped_by')}"
    text = f"failed (exit code {result.get('exit_code')}): {why}"
    if result.get("logs"):
        text += f"; {result['logs']}"
    return line_of(text)
