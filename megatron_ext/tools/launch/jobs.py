"""Implements `launch`: turns flags into a job plan and prints or runs it."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.config.command_line import read_command_line
from megatron_ext.config.flags import requested_flags
from megatron_ext.config.hosting import preflight
from megatron_ext.devices import count_devices, name_by_driver, requested
from megatron_ext.errors import LaunchError
from megatron_ext.planning.hardware import kind_of
from megatron_ext.tools.launch import hostfile, runs, slurm
from megatron_ext.tools.launch.attempts import shown_ranks, with_restarts
from megatron_ext.tools.launch.display import say
from megatron_ext.tools.launch.fitness import interface_of
from megatron_ext.tools.launch.plan import FORWARDED, JobPlan, Parallel, flag_value
from megatron_ext.upstream import parent
from megatron_ext.upstream.flag_list import megatron_flags
from megatron_ext.upstream.scripts import find_script

if TYPE_CHECKING:
    from megatron_ext.config.refusals import Preflight

# Variables that apply only to one machine or process, so they must not be forwarded if a job
# launches another job.
_NOT_FORWARDED = (
    "MEGATRON_EXT_RUNS",
    runs.RUN_ID,
    runs.NODE,
    parent.AGENT_PID,
    parent.SOCKETS,
    parent.STARTED_RANK,
)
_FSDP = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")


def default_variables(flags: Sequence[str]) -> dict[str, str]:
    """Return the default environment variables for a job with these flags."""
    variables = {
        # torchrun would set the same value, but with a warning.
        "OMP_NUM_THREADS": "1",
        # Without this, every rank prints warnings about missing kernels and deprecated calls in
        # Megatron.
        "PYTHONWARNINGS": "ignore",
    }
    # Megatron rejects a value of 1 with FSDP, so keep CUDA's default of 8.
    if not any(flag in flags for flag in _FSDP):
        # On GPUs before Blackwell, Megatron requires a value of 1 for tensor and
        # context parallelism, except if the experts' communication overlaps: a single
        # hardware queue would serialize the two passes.
        overlaps_experts = "--overlap-moe-expert-parallel-comm" in flags
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if overlaps_experts else "1"
    return variables


def launch(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `launch`; `words` is the command line as typed, which a batch job runs again later."""
    command: list[str] = args.command_words
    if command[:1] == ["--"]:
        command = command[1:]
    _check(args, command)
    try:
        workdir = str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError(
            "the work directory was removed; change to one that exists"
        ) from None
    if args.slurm is not None and not is_inside_allocation():
        num_command_words = len(args.command_words)
        options = words[:-num_command_words]
        submit(args, options, command, workdir)
        return 0
    if args.slurm is not None:
        say(
            f"already inside Slurm job {os.environ['SLURM_JOB_ID']}: --slurm has no effect"
        )
    # The hosts are known from here on.
    plan = planned(args, command, workdir)
    plan.check()
    hosts = plan.hosts
    # The last hosts are spares. With --keep-going, all of their ranks are reserve ranks.
    num_used = len(hosts) - args.spares
    if num_used < 1:
        raise LaunchError(
            f"--spares is {args.spares} of {len(hosts)} hosts; keep at least one in use"
        )
    if plan.reserve is None:
        plan = replace(plan, hosts=hosts[:num_used])
    elif len(hosts) > 1 and flag_value(command, "--node-ips") is not None:
        raise LaunchError(
            "--keep-going cannot be combined with --node-ips, because ranks may move to other "
            "hosts; remove --node-ips, and set addresses with addr= and rdma= in the hostfile"
        )
    uncounted = [host.name for host in plan.hosts if not host.slots]
    if not uncounted:
        # Report mistakes in the flags before contacting any host.
        complete = plan.completed()
        shown_ranks(args.show, complete)
    # Other hosts may have a different version of Megatron, so their ranks check the command.
    if not args.per_node and all(host.local for host in hosts):
        check_command_here(plan.command)
    if not args.dry_run:
        return with_restarts(plan, hosts, args)
    if uncounted:
        raise LaunchError(
            f"--dry-run contacts no hosts and cannot count the devices of {', '.join(uncounted)}; "
            f"set slots=N in the hostfile, or --nproc N"
        )
    return _dry_run(complete)


def check_command_here(command: Sequence[str]) -> None:
    """Reject a script or flags that this machine's Megatron lacks, before ranks import torch."""
    # On a machine without Megatron's training loop, the list is empty and nothing can be checked.
    if megatron_flags():
        find_script(command[0])
        read_command_line(command)


def _dry_run(plan: JobPlan) -> int:
    """Print the command for each host and the preflight result for the training flags."""
    print(plan.dry_run(), end="")
    if plan.per_node:
        return 0
    answer = preflight_of(plan)
    remarks = [*answer.changes, *answer.notices, *answer.unknown_flags()]
    for line in remarks:
        say(line)
    for refusal in answer.refusals:
        say(f"error: {refusal}")
    return 0 if answer.accepted else 2


def is_inside_allocation() -> bool:
    """Return whether this process runs inside a Slurm allocation."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def preflight_of(plan: JobPlan) -> Preflight:
    """Return the preflight report for a plan's training flags and number of ranks."""
    device = requested(plan.command)
    device_kind = None
    # Look for devices only if no other host runs ranks.
    if all(host.local for host in plan.hosts):
        device_kind = kind_of(name_by_driver() or "")
        if device == "auto" and count_devices() == 0:
            device = "cpu"
    return preflight(
        plan.command,
        world_size=plan.world_size,
        device=device,
        device_kind=device_kind,
    )


def submit(
    args: argparse.Namespace,
    words: Sequence[str],
    command: Sequence[str],
    workdir: str,
) -> None:
    """Submit a job to Slurm, which runs the same command line again inside an allocation."""
    if args.hostfile is not None:
        raise LaunchError(
            "--slurm and --hostfile are both given, but Slurm chooses the hosts; remove "
            "--hostfile"
        )
    options = [word for word in words if word not in ("--dry-run", "--")]
    line = [*slurm.without_values(options), "--", *command]
    submission = slurm.submission(args.slurm, line, workdir)
    if args.dry_run:
        print(shlex.join(submission))
    else:
        output = slurm.run(*submission, environment=dict(args.env))
        print(output.strip())


def planned(
    args: argparse.Namespace,
    command: Sequence[str],
    workdir: str,
) -> JobPlan:
    """Return the job's plan with all hosts, including spares."""
    job_env = dict(args.env)
    if requested(command) == "cpu":
        # Agents do not see the flags, so use this variable to stop them from counting
        # devices.
        job_env = {"MEGATRON_EXT_DEVICE": "cpu", **job_env}
    environ = {**os.environ, **job_env}
    # MEGATRON_EXT_FLAGS may change the number of ranks that a replica needs.
    flags = [*requested_flags(environ), *command]
    # On a single machine without devices, start as many processes as the flags require.
    alone = count_devices(environ=environ) or Parallel.of(flags).smallest_job
    nproc = 1 if args.per_node else args.nproc
    hosts, slurm_job = hosts_of(args, nproc, alone)
    if args.run_id:
        run_id = runs.check_run_id(args.run_id)
    elif slurm_job is None:
        run_id = runs.new_run_id()
    elif runs.load(slurm_job, "plan"):
        # An earlier launch in the same allocation already uses the plain id.
        run_id = f"{slurm_job}-{runs.new_run_id()}"
    else:
        # Name the first run after the Slurm job, so that `status`, `logs` and `stop` accept the job
        # id.
        run_id = slurm_job
    env = default_variables(flags)
    if not args.raw:
        env["MEGATRON_EXT_STEP_BUBBLE"] = "1"  # read by `tracing/scalars.py`
    for name, value in os.environ.items():
        # Login shells on the hosts lack the variables that were exported here.
        if name.startswith(FORWARDED) and name not in _NOT_FORWARDED:
            env[name] = value
    return JobPlan(
        run_id=run_id,
        hosts=hosts,
        command=tuple(command),
        workdir=workdir,
        python=args.python,
        env={**env, **job_env},
        master_port=args.master_port,
        num_microbatches=args.num_microbatches,
        reserve=_reserve(args),
        num_reserve_hosts=args.spares if args.keep_going else 0,
        allow_uneven=args.allow_uneven,
        per_node=args.per_node,
        log_root=args.log_dir,
        grace_s=args.grace,
        ssh=args.ssh_cmd,
        slurm_job=slurm_job,
    )


def _check(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Reject an invalid combination of command and flags, regardless of the hosts."""
    if not command:
        raise LaunchError(
            "nothing to run; name a script after --, as in `-- pretrain_gpt.py --num-layers 8`"
        )
    if not args.per_node and not command[0].endswith(".py"):
        raise LaunchError(
            f"{command[0]} is not a Python script; give torchrun a SCRIPT.py, or use --per-node to "
            f"run any command once on each host"
        )
    if args.per_node and args.num_microbatches is not None:
        raise LaunchError(
            "--num-microbatches sets a training flag, but --per-node starts no training; "
            "remove one of the two"
        )
    if args.reserve is not None and not args.keep_going:
        raise LaunchError(
            f"--reserve {args.reserve} has no effect without --keep-going; add --keep-going, or "
            "remove --reserve"
        )
    if args.keep_going:
        _check_keep_going(args, command)
    if args.spares and not args.max_restarts and not args.keep_going:
        raise LaunchError(
            f"--spares {args.spares} without restarts leaves hosts idle for the whole run; add "
            f"--max-restarts 3 or --keep-going, or remove --spares"
        )


def _reserve(args: argparse.Namespace) -> int | None:
    """Return the number of reserve ranks on training hosts, or None without --keep-going."""
    if not args.keep_going:
        return None
    if args.reserve is not None:
        return int(args.reserve)
    return 0 if args.spares else 1  # ranks on spare hosts are reserve ranks


def _check_keep_going(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Reject jobs that cannot continue after losing a rank."""
    if args.per_node:
        raise LaunchError(
            "--keep-going replaces lost ranks, but --per-node starts a command without ranks; "
            "remove one of the two"
        )
    if "--forward-backward-disaggregating" in command:
        raise LaunchError(
            "--keep-going does not support --forward-backward-disaggregating: a reserve rank "
            "cannot take over a role; use --max-restarts 3 instead of --keep-going"
        )
    has_load = flag_value(command, "--load") is not None
    has_save = flag_value(command, "--save") is not None
    if not has_load or not has_save:
        raise LaunchError(
            "--keep-going needs --save DIR --load DIR, so that the ranks can load their state "
            "after a loss; add them"
        )


def hosts_of(
    args: argparse.Namespace,
    nproc: int | None = None,
    alone: int | None = None,
) -> tuple[tuple[hostfile.Host, ...], str | None]:
    """Return the hosts that the flags select and the id of their Slurm job, if any.

    Each host starts `nproc` processes or, by default, one process per slot. Without a hostfile or
    Slurm, this machine is the only host and has `alone` slots.
    """
    job = None
    if args.hostfile is not None:
        listed = hostfile.read(args.hostfile)
    else:
        job = os.environ.get("SLURM_JOB_ID") or None
        if job is not None:
            listed = slurm.hosts()
        else:
            listed = (hostfile.Host("localhost", slots=alone),)
    selected = hostfile.select(listed, args.include, args.exclude)
    hosts = []
    for number, host in enumerate(selected):
        is_local = job is None and _is_this_machine(host.name)
        slots = nproc or host.slots
        hosts.append(replace(host, slots=slots, number=number, local=is_local))
    return tuple(hosts), job


def _is_this_machine(name: str) -> bool:
    """Return whether a name or address belongs to this machine, without resolving it."""
    # A resolver may hang, or may resolve this machine's public name to another machine. Binding an
    # address proves nothing either, because ip_nonlocal_bind allows binding any address.
    if name in ("localhost", socket.gethostname()):
        return True
    # `ip_address` raises for a name.
    with suppress(ValueError):
        return ip_address(name).is_loopback or interface_of(name) is not None
    return False
