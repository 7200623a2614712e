"""Implements `launch`, from flags to a finished job, and `stop`, `status` and `logs` for one."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_ext.config.command_line import read_command_line
from megatron_ext.config.flags import requested_flags
from megatron_ext.config.hosting import preflight
from megatron_ext.devices import count_devices, requested
from megatron_ext.errors import LaunchError, line_of
from megatron_ext.files import cannot_write
from megatron_ext.tools.launch import hostfile, runs, slurm
from megatron_ext.tools.launch.agent import interface_of
from megatron_ext.tools.launch.agents import Agents
from megatron_ext.tools.launch.display import Display, say
from megatron_ext.tools.launch.plan import FORWARDED, JobPlan, Parallel, flag_value
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.tools.launch.supervise import supervise
from megatron_ext.upstream import failure, parent
from megatron_ext.upstream.person_view import PersonView

if TYPE_CHECKING:
    from megatron_ext.tools.launch.failures import Failure, Outcome

# Of one machine or one process: a job that starts another must not pass on its own.
_NOT_FORWARDED = ("MEGATRON_EXT_RUNS", runs.RUN_ID, runs.NODE, parent.AGENT_PID, parent.SOCKETS)
_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    # Every rank would warn about missing kernels and deprecated calls in Megatron.
    "PYTHONWARNINGS": "ignore",
}
_LONGEST_PAUSE_S = 60.0


def hosts_of(
    args: argparse.Namespace, nproc: int | None = None, alone: int | None = None
) -> tuple[tuple[hostfile.Host, ...], str | None]:
    """Return the hosts that the flags name, and the Slurm job that they are of, if any.

    They start `nproc` processes each, or their slots; this machine alone has `alone` slots.
    """
    job = None
    if args.hostfile is not None:
        known = hostfile.read(args.hostfile)
    elif job := os.environ.get("SLURM_JOB_ID") or None:
        known = slurm.hosts()
    else:
        known = (hostfile.Host("localhost", slots=alone),)
    hosts = (
        replace(
            host,
            slots=nproc or host.slots,
            number=number,
            local=job is None and _is_this_machine(host.name),
        )
        for number, host in enumerate(hostfile.select(known, args.include, args.exclude))
    )
    return tuple(hosts), job


def _is_this_machine(name: str) -> bool:
    """Return whether a name or an address is this machine's, without resolving any."""
    # A resolver may hang, and may send a public name of this machine elsewhere.
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(ValueError):  # it is no address
        return ip_address(name).is_loopback or interface_of(name) is not None
    return False


def _shown_ranks(text: str, world_size: int) -> list[int]:
    if text == "all":
        return list(range(world_size))
    ranks = set()
    for word in text.split(","):
        rank = world_size - 1 if word == "last" else int(word) if word.isdecimal() else -1
        if not 0 <= rank < world_size:
            raise LaunchError(
                f"--show names {word!r}; use all, or ranks from 0 to {world_size - 1} and last"
            )
        ranks.add(rank)
    return sorted(ranks)


def launch(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `launch`; `words` are the command line as typed, for a batch job that runs it later."""
    command: list[str] = args.command_words
    command = command[1:] if command[:1] == ["--"] else command
    _check(args, command)
    try:
        workdir = str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError("the work directory was removed; change to one that exists") from None
    if args.slurm is not None and not os.environ.get("SLURM_JOB_ID"):
        # Slurm starts the same line again, inside an allocation.
        if args.hostfile is not None:
            raise LaunchError("--slurm and --hostfile are both given; Slurm chooses the hosts")
        own = [
            word for word in words[: -len(args.command_words)] if word not in ("--dry-run", "--")
        ]
        submission = slurm.submission(
            args.slurm, [*slurm.without_values(own), "--", *command], workdir
        )
        if args.dry_run:
            print(shlex.join(submission))
        else:
            print(slurm.run(*submission, environment=dict(args.env)).strip())
        return 0
    if args.slurm is not None:
        say(f"inside of Slurm's job {os.environ['SLURM_JOB_ID']}: --slurm submits no other")
    # Agents get no flags; by the variable they too count no devices.
    on_cpu = {"MEGATRON_EXT_DEVICE": "cpu"} if requested(command) == "cpu" else {}
    own_env = {**on_cpu, **dict(args.env)}
    environ = {**os.environ, **own_env}
    flags = [*requested_flags(environ), *command]
    alone = count_devices(environ=environ) or Parallel.of(flags).smallest_job
    hosts, slurm_job = hosts_of(args, 1 if args.per_node else args.nproc, alone)
    run_id = runs.check_run_id(args.run_id) if args.run_id else runs.new_run_id()
    if slurm_job is not None and not args.run_id:
        # `status`, `logs` and `stop` take the job's id, for the first run in it.
        run_id = f"{slurm_job}-{run_id}" if runs.load(slurm_job, "plan") else slurm_job
    shown = {} if args.raw else {"MEGATRON_EXT_STEP_BUBBLE": "1"}  # of `tracing/scalars.py`
    # Logins on the hosts know nothing of what was exported here.
    exported = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and name not in _NOT_FORWARDED
    }
    plan = JobPlan(
        run_id=run_id,
        hosts=hosts,
        command=tuple(command),
        workdir=workdir,
        python=args.python,
        env={**_DEFAULTS, **shown, **exported, **own_env},
        master_port=args.master_port,
        num_microbatches=args.num_microbatches,
        allow_uneven=args.allow_uneven,
        per_node=args.per_node,
        log_root=args.log_dir,
        grace_s=args.grace,
        ssh=args.ssh_cmd,
        slurm_job=slurm_job,
    )
    plan.check()
    used = len(hosts) - args.spares
    if used < 1:
        raise LaunchError(
            f"--spares is {args.spares} of {len(hosts)} hosts; at least one has to be in use"
        )
    plan = replace(plan, hosts=hosts[:used])
    open_hosts = [host.name for host in plan.hosts if not host.slots]
    if not open_hosts:  # what is wrong here is reported before any host is contacted
        complete = plan.completed()
        _shown_ranks(args.show, complete.world_size)
    if not args.dry_run:
        if not args.per_node and all(host.local for host in hosts):
            read_command_line(plan.command)  # before the ranks import torch for the same answer
        return _with_restarts(plan, hosts, args)
    if open_hosts:
        raise LaunchError(
            f"--dry-run contacts no host, so it cannot count devices of {', '.join(open_hosts)}; "
            f"give slots=N in the hostfile, or --nproc N"
        )
    print(complete.dry_run(), end="")
    return 0 if plan.per_node or _says_flags_work(complete, command) else 2


def _says_flags_work(plan: JobPlan, command: Sequence[str]) -> bool:
    """Print what a training changes and refuses; return whether it takes its flags."""
    device = requested(command)
    if device == "auto" and all(host.local for host in plan.hosts) and count_devices() == 0:
        device = "cpu"
    answer = preflight(plan.command, world_size=plan.world_size, device=device)
    for line in (*answer.changes, *answer.notices, *answer.unknown_flags()):
        say(line)
    for refusal in answer.refusals:
        say(f"error: {refusal}")
    return answer.accepted


def _check(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Refuse a command and flags that cannot go together, whatever the hosts."""
    if not command:
        raise LaunchError(
            "nothing to run; name a script after --, as in `-- pretrain_gpt.py --num-layers 8`"
        )
    if not args.per_node and not command[0].endswith(".py"):
        raise LaunchError(
            f"{command[0]} is not a Python script; torchrun needs one (SCRIPT.py), or run any "
            f"command once on each host with --per-node"
        )
    if args.per_node and args.num_microbatches is not None:
        raise LaunchError(
            "--num-microbatches adds a flag of training, which --per-node does not start; leave "
            "one of the two out"
        )
    if args.spares and not args.max_restarts:
        raise LaunchError(
            f"--spares {args.spares} without restarts leaves hosts idle for the whole run; add "
            f"--max-restarts 3, or leave it out"
        )


def _with_restarts(
    plan: JobPlan, hosts: tuple[hostfile.Host, ...], args: argparse.Namespace
) -> int:
    """Run a job until it succeeds, is stopped, or has used up its restarts; return its exit code.

    Every attempt is a run of its own, with preflight, logs and a result: ID, ID-r1, ID-r2. The
    script resumes from its last whole checkpoint: Megatron records a checkpoint's iteration only
    after it has written all of it. Of the hosts, those beyond the plan's are spare.
    """
    if args.max_restarts and flag_value(plan.command, "--load") is None:
        say("warning: without --save and --load, a restart begins with the first iteration")
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) == signal.SIG_DFL:  # while no job runs: connections are closed
            signal.signal(each, lambda number, _: sys.exit(128 + number))
    failed_at: list[float] = []
    number, run_id, current = 0, plan.run_id, plan
    while True:
        outcome, current = _attempt(current, args)
        now = time.monotonic()
        failed_at = [at for at in failed_at if now - at < args.restart_window]
        is_wanted = outcome.failure is not None and outcome.stopped_by is None
        if not is_wanted or len(failed_at) >= args.max_restarts:
            return outcome.code
        failed_at.append(now)
        number += 1
        # Longer each time: a file server or a switch that fails takes a while to come back.
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (len(failed_at) - 1))
        say(
            f"restart {len(failed_at)} of {args.max_restarts} in {pause_s:g} s, because of "
            f"{outcome.failure}"
        )
        time.sleep(pause_s)
        # A job never shrinks: fewer replicas would be another batch.
        count, ranks = len(current.hosts), current.world_size
        counted = {host.number: host.slots for host in current.hosts}
        hosts = tuple(
            replace(one, slots=one.slots or counted.get(one.number) or current.hosts[0].slots)
            for one in hosts
        )
        # Of all hosts, also of those lost before: one that was rebooted may be back, and one whose
        # network was away may still run its part of the attempt.
        with Agents(replace(current, hosts=hosts)) as agents:
            answers = agents.ask("stop", args.preflight_timeout + plan.grace_s)
        problems = {each: [text] for each, text in enumerate(answers) if isinstance(text, str)}
        plan = replace(plan, run_id=f"{run_id}-r{number}")
        there = [host for host in hosts if host.number not in problems]
        with Agents(replace(plan, hosts=tuple(there))) as agents:
            for host, found in zip(there, agents.look(args.preflight_timeout), strict=True):
                problems[host.number] = found["problems"]
        for host in hosts:
            for text in problems[host.number]:
                say(f"{host.name}: {text}")
        able = [host for host in hosts if not problems[host.number]]
        current = replace(plan, hosts=tuple(able[:count]))
        if current.world_size != ranks:
            raise LaunchError(
                f"the job needs {count} hosts with {ranks} ranks, and {len(able)} of {len(hosts)} "
                f"can take part; mend them, or give more spare hosts (--spares)"
            )


def _attempt(plan: JobPlan, args: argparse.Namespace) -> tuple[Outcome, JobPlan]:
    """Run a job once, and return how it ended with its plan, which knows all numbers."""
    directory = runs.runs_root() / plan.run_id
    with ExitStack() as open_here:
        agents = open_here.enter_context(Agents(plan))
        found = agents.look(args.preflight_timeout)

        def lines_of(level: str) -> list[str]:
            pairs = zip(plan.hosts, found, strict=True)
            return [f"{host.name}: {text}" for host, each in pairs for text in each[level]]

        if problems := lines_of("problems"):
            raise LaunchError("\n".join(problems))
        plan = plan.completed([each["devices"] for each in found])
        show = _shown_ranks(args.show, plan.world_size)
        # Before the start: `stop` finds even a job whose launcher dies now.
        try:
            folder = open_here.enter_context(
                RunFolder.open(runs.runs_root(), plan.run_id, create=True)
            )
            if folder.exists("plan.json"):
                raise LaunchError(f"there is a run {plan.run_id} already; give another --run-id")
            folder.write_json("plan.json", plan.record())
            folder.write_json("launcher.json", runs.record())
            log = open_here.enter_context(folder.create("output.log"))
        except OSError as error:
            remedy = "make room, or set MEGATRON_EXT_RUNS to another directory"
            raise LaunchError(cannot_write(directory, error, remedy)) from None
        log_path = directory / "output.log"
        for warning in lines_of("warnings"):
            say(f"warning: {warning}")
        say(f"run {plan.run_id}: {plan.summary()}")
        is_megatrons = Path(plan.command[0]).name.startswith("pretrain_")
        raw = args.raw or not is_megatrons or not {"-h", "--help"}.isdisjoint(plan.command)
        if not raw:
            show = list(range(plan.world_size)) if len(plan.hosts) == 1 else show
            whose = "the ranks" if len(show) == plan.world_size else f"ranks {args.show}"
            say(f"everything {whose} print: {log_path}")
        view = None if raw else PersonView()
        with closing(Display(sys.stdout.buffer, log, view)) as display:
            outcome = supervise(agents, plan, found, display, show)
        # The view has what matters of a rank that it was shown, and the file all of it.
        is_seen = view is not None and outcome.failed_rank in show
        logs = f"everything: {log_path}"
        if outcome.failure is not None and not is_seen:
            logs = _logs_of(plan, outcome.failure)
        elif raw:
            logs = _logs_of(plan)
        result = {
            "exit_code": outcome.code,
            "failure": None if outcome.failure is None else str(outcome.failure),
            "stopped_by": outcome.stopped_by,
            "logs": logs,
        }
        try:
            folder.write_json("result.json", result)
        except OSError as error:
            say(f"warning: {directory / 'result.json'} cannot be written: {error.strerror}")
    if display.left_out:
        say(f"{display.left_out} lines were not shown, because the output was blocked")
    if outcome.failure is not None:
        _say_failure(outcome.failure, logs, view, is_seen=is_seen)
    elif outcome.stopped_by == "SIGINT" and (display.iteration or not raw):
        saved = [flag_value(plan.command, flag) for flag in ("--save", "--load")]
        when = f"at iteration {display.iteration}; {failure.to_resume(*saved)}"
        if not display.iteration:
            when = "before the first logged iteration"
        say(f"interrupted {when}; {logs}")
    elif outcome.stopped_by is not None:
        say(f"stopped by {outcome.stopped_by}; {logs}")
    else:
        say(f"run {plan.run_id} succeeded; {logs}")
    return outcome, plan


def _logs_of(plan: JobPlan, failure: Failure | None = None) -> str:
    """Say how to see what the ranks have printed, or the failed one, and where that lies."""
    words = ["megatron-ext", "logs", plan.run_id, *plan.flags_to_reach()]
    if failure is not None and failure.rank is not None:
        words += ["--rank", str(failure.rank)]
    place = ""
    if failure is not None and failure.log is not None:
        place = f" ({failure.host}:{failure.log})"
    return f"logs: {shlex.join(words)}{place}"


def _say_failure(failure: Failure, logs: str, view: PersonView | None, *, is_seen: bool) -> None:
    """Show the last output of what failed, unless the view did, and then the cause."""
    reason = str(failure)
    lines = [line for line in failure.tail if line.strip()]
    for line in lines[-1:] if is_seen else lines:
        is_repeated = view is not None and view.has_shown(line)
        if not is_repeated and line not in reason:
            say(f"| {line}")
    say(f"failed first: {line_of(reason)}; {logs}")


def _plan_of(found: runs.Json | None, run_id: str) -> JobPlan:
    root = runs.runs_root()
    if found is None:
        known = sorted(entry.parent.name for entry in root.glob("*/plan.json"))[-5:]
        latest = f"the latest are {', '.join(known)}" if known else "none was started from here"
        raise LaunchError(f"there is no run {run_id} in {root}; {latest}")
    try:
        return JobPlan.of_record(found)
    except (KeyError, TypeError, ValueError):
        raise LaunchError(
            f"{root / run_id / 'plan.json'} is not of this version; launch the run again"
        ) from None


def _attempts(run_id: str) -> list[str]:
    """Return the runs that started a run again, in order (`_with_restarts`)."""
    found: list[str] = []
    while runs.load(name := f"{run_id}-r{len(found) + 1}", "plan") is not None:
        found.append(name)
    return found


def _state_of(run_id: str, launcher: psutil.Process | None) -> str:
    """Return how a run ended, or that it has not; `launcher` is its process, if that runs here."""
    if launcher is not None:
        return "running"
    result = runs.load(run_id, "result")
    if result is None:
        machine = (runs.load(run_id, "launcher") or {}).get("machine")
        if machine in (None, socket.gethostname()):
            return "the launcher has ended without a result"
        return line_of(f"there is no result yet; the launcher is on {machine}")
    if result.get("exit_code") == 0:
        return "succeeded (exit code 0)"
    why = result.get("failure") or f"stopped by {result.get('stopped_by')}"
    logs = f"; {result['logs']}" if result.get("logs") else ""
    return line_of(f"failed (exit code {result.get('exit_code')}): {why}{logs}")


def manage(args: argparse.Namespace) -> int:
    """Run `stop`, `status` or `logs`; return 1 if a host does not answer, or cannot do it.

    They read the plan that `launch` wrote on this machine; an agent on each host does the rest.
    """
    run_id, command = runs.check_run_id(args.run_id), args.command
    found = runs.load(run_id, "plan")
    if found is None and run_id.isdecimal() and (state := slurm.state(run_id)) is not None:
        raise LaunchError(
            f"Slurm's job {run_id} is {state} and has started nothing yet; wait for it, or end it "
            f"with `scancel {run_id}`"
        )
    plan = _plan_of(found, run_id)
    reached_by = plan.flags_to_reach()
    # No program is taken from a file, whoever wrote it.
    plan = replace(plan, run_id=run_id, ssh=args.ssh_cmd, python=args.python)
    if reached_by != plan.flags_to_reach():
        say(
            f"its launch had {line_of(shlex.join(reached_by) or 'the default ssh and Python')}; if "
            f"hosts do not answer, give the same here"
        )
    launcher = runs.recorded(runs.load(run_id, "launcher"))
    timeout_s, more = args.timeout, runs.Json()
    if command != "stop" and (again := _attempts(run_id)):
        say(f"this was its first attempt; it was started again as {', '.join(again)}")
    if command == "stop":
        plan = replace(plan, grace_s=plan.grace_s if args.grace is None else args.grace)
        timeout_s += plan.grace_s
        if launcher is not None:
            with suppress(psutil.Error):
                launcher.terminate()
                launcher.wait(plan.grace_s + 5)
        # The agents are asked also after an orderly end, to show that no process is left.
    elif command == "status":
        print(_state_of(run_id, launcher))
    else:
        more = {"lines": args.lines, "local_rank": None}
        if (rank := args.rank) is not None:
            if not 0 <= rank < plan.world_size:
                raise LaunchError(f"--rank is {rank}; the job has ranks 0 to {plan.world_size - 1}")
            index = plan.host_of(rank)
            more["local_rank"] = rank - plan.first_rank(index)
            plan = replace(plan, hosts=plan.hosts[index : index + 1])
    if plan.slurm_job is not None:
        # What is left after a job are files, which its hosts share with this machine.
        here = slurm.state(plan.slurm_job) != "RUNNING"
        plan = replace(plan, hosts=tuple(replace(host, local=here) for host in plan.hosts))
    with Agents(plan) as agents:
        answers = agents.ask(command, timeout_s, **more)
    if command == "stop" and plan.slurm_job and slurm.state(plan.slurm_job) != "RUNNING":
        # Its end with the launcher's may have cut the answers off.
        print(f"Slurm's job {plan.slurm_job} has ended")
        return 0
    failed = False
    for host, answer in zip(plan.hosts, answers, strict=True):
        if isinstance(answer, str):
            print(f"megatron-ext: error: {host.name}: {line_of(answer)}", file=sys.stderr)
            failed = True
        else:
            failed |= answer["failed"]
            # What ranks print to their logs is theirs; all else is words of ours.
            text = answer["text"] if command == "logs" else line_of(answer["text"])
            print(f"{host.name}: {text}")
    return int(failed)
