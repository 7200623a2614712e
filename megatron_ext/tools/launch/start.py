"""Implements `launch`: from flags to a plan, and from the plan to a finished job."""


# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_ext.devices.count import count_devices
from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import (
    hostfile,
    preflight,
    process,
    restarts,
    runs,
    slurm,
)
from megatron_ext.tools.launch.display import Display
from megatron_ext.tools.launch.plan import Node, Parallel, Plan, add_computed_flags, flag_value
from megatron_ext.tools.launch.restarts import Restarts
from megatron_ext.tools.launch.ssh import Ssh
from megatron_ext.tools.launch.supervise import Job, Outcome
from megatron_ext.upstream import failure
from megatron_ext.upstream.person_view import PersonView

if TYPE_CHECKING:
    from megatron_ext.tools.launch.connection import Connection

__all__ = ["is_this_machine", "make_plan", "nodes_of", "run", "ssh_of"]

FORWARDED = (
    "NCCL_", "MCCL_", "GLOO_", "UCX_", "TORCH_", "CUDA_", "MUSA_", "OMP_", "MEGATRON_EXT_", "HF_",
)  # fmt: skip
"""Prefixes of the environment variables that every host gets from the launcher's environment."""
_FORWARDED_NAMES = ("PYTHONPATH", "PYTHONWARNINGS", "MEGATRON_LM_PATH")
_NOT_FORWARDED = (
    "MEGATRON_EXT_RUNS", process.RUN_ID, process.NODE, process.AGENT_PID
)  # fmt: skip
_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    # Every rank would warn about missing kernels and deprecated calls in Megatron.
    "PYTHONWARNINGS": "ignore",
}


def is_this_machine(host: hostfile.Host) -> bool:
    """Return whether a host is this machine, which needs no ssh.

    It compares addresses and names of this machine, without name resolution.
    """
    if host.name in ("localhost", socket.gethostname()):
        return True
    try:
        address = ip_address(host.name)
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host.name, 0))
        except OSError:
            return False
    return True


def nodes_of(
    args: argparse.Namespace, nproc: int | None = None, alone: int | None = None
) -> tuple[Node, ...]:
    """Return the hosts that the flags name: this machine, if they name none.

    Args:
        args: The flags.
        nproc: Processes on each host; None: its slots.
        alone: Slots of this machine without a hostfile.

    Raises:
        LaunchError: The hostfile is missing or malformed.
    """
    job = _allocation(args)
    if job is not None:
        known = slurm.hosts(os.environ)
    elif args.hostfile is not None:
        known = hostfile.read(args.hostfile)
    else:
        known = (hostfile.Host("localhost", slots=alone),)
    hosts = hostfile.select(known, args.include, args.exclude)
    if nproc is not None and not 1 <= nproc <= hostfile.MAX_SLOTS:
        raise LaunchError(f"--nproc is {nproc}; it must be from 1 to {hostfile.MAX_SLOTS}")
    return tuple(
        Node(
            host,
            nproc=(len(host.devices) if host.devices else nproc or host.slots or 0),
            local=job is None and is_this_machine(host),
        )
        for host in hosts
    )


def _allocation(args: argparse.Namespace) -> str | None:
    """Return the id of the Slurm job to run on; None if there is a hostfile."""
    return slurm.job_of(os.environ) if args.hostfile is None else None


def ssh_of(args: argparse.Namespace) -> Ssh:
    """Return the ssh settings of the flags.

    Raises:
        LaunchError: The command is empty or has an open quote.
    """
    job = _allocation(args)
    if job is not None:
        return slurm.Srun(job=job)
    return Ssh.parse(args.ssh_cmd, max(1, min(10, int(args.preflight_timeout))))


def _environment(args: argparse.Namespace, *, show_bubble: bool) -> dict[str, str]:
    variables = dict(_DEFAULTS)
    if show_bubble:
        variables["MEGATRON_EXT_STEP_BUBBLE"] = "1"  # of `tools/trace/scalars.py`
    for name, value in os.environ.items():
        named = name.startswith(FORWARDED) or name in _FORWARDED_NAMES
        if named and name not in _NOT_FORWARDED:
            variables[name] = value
    return {**variables, **dict(_assignments(args.env))}


def _assignments(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for assignment in given:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"--env {assignment!r} must be NAME=VALUE, for example --env A=1")
        yield name, value


def _command(args: argparse.Namespace) -> list[str]:
    """Return the script and its flags, or with `--per-node` any command."""
    words: list[str] = (
        args.command_words[1:] if args.command_words[:1] == ["--"] else args.command_words
    )
    if not words:
        raise LaunchError(
            "nothing to run; name a script after --, as in `-- pretrain_gpt.py --num-layers 8`"
        )
    if not args.per_node and not words[0].endswith(".py"):
        raise LaunchError(
            f"{words[0]} is not a Python script; torchrun needs one (SCRIPT.py), or run any "
            f"command once on each host with --per-node"
        )
    return words


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan of the flags; numbers of processes may still be open.

    Raises:
        LaunchError: Something is missing or contradictory.
    """
    words = _command(args)
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise LaunchError(f"--master-port is {args.master_port}; it must be from 1 to 65535")
    if args.log_dir is not None and not Path(args.log_dir).is_absolute():
        raise LaunchError(f"--log-dir {args.log_dir} is relative; hosts need an absolute path")
    nodes = nodes_of(args, args.nproc, _processes_here(words))
    if args.per_node:
        nodes = tuple(replace(node, nproc=1) for node in nodes)
    plan = Plan(
        run_id=runs.check_run_id(args.run_id) if args.run_id else _new_run_id(_allocation(args)),
        slurm_job=_allocation(args),
        nodes=nodes,
        command=tuple(words),
        workdir=_workdir(),
        python=args.python,
        env=_environment(args, show_bubble=not args.raw),
        master_port=args.master_port,
        per_node=args.per_node,
        embedded=args.embedded,
        log_root=args.log_dir,
        grace_s=args.grace,
    )
    plan.check(allow_uneven=args.allow_uneven)
    return plan


def _processes_here(words: Sequence[str]) -> int:
    """Return the ranks to start on this machine: one for each device, or one replica on a CPU."""
    backend = flag_value(words, "--device-backend") or os.environ.get("MEGATRON_EXT_DEVICE")
    devices = 0 if backend == "cpu" else count_devices()
    return devices or Parallel.of(words).replica_size


def _new_run_id(job: str | None) -> str:
    """That of the Slurm job for the first run in it."""
    if job is None:
        return runs.new_run_id()
    return f"{job}-{runs.new_run_id()}" if (runs.run_dir(job) / "plan.json").exists() else job


def _workdir() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError("the work directory was removed; change to one that exists") from None


def _completed(plan: Plan, args: argparse.Namespace) -> Plan:
    """Return the complete plan: checked, with all numbers and computed flags."""
    plan.check(allow_uneven=args.allow_uneven)
    return plan if plan.per_node else add_computed_flags(plan, args.num_microbatches)


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


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `launch`.

    Args:
        args: The flags.
        words: The command line as typed, for a batch job that runs it later.

    Raises:
        LaunchError: The job cannot be started; no process of it runs.
    """
    if args.slurm is not None and slurm.job_of(os.environ) is None:
        return _submit(args, words)
    plan, spares = _without_spares(make_plan(args), args.spares)
    ssh = ssh_of(args)
    if args.dry_run:
        open_hosts = [node.host.name for node in plan.nodes if node.nproc == 0]
        if open_hosts:
            raise LaunchError(
                f"--dry-run asks no host, so it cannot count the devices of "
                f"{', '.join(open_hosts)}; give slots=N in the hostfile, or --nproc N"
            )
        print(_completed(plan, args).dry_run(), end="")
        return 0
    _show_own_log()
    # Run local checks before contacting hosts.
    if all(node.nproc for node in plan.nodes):
        _shown_ranks(args.show, _completed(plan, args).world_size)
    limits = Restarts(args.max_restarts, args.restart_window, spares, args.preflight_timeout)
    return asyncio.run(_launch(plan, args, ssh, limits)).code


def _submit(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Hand this launch to Slurm, which starts it again inside an allocation."""
    if args.hostfile is not None:
        raise LaunchError("--slurm and --hostfile are both given; Slurm chooses the hosts")
    command = _command(args)
    own = [word for word in words[: -len(args.command_words)] if word not in ("--dry-run", "--")]
    script = slurm.batch_script(args.slurm, [*own, "--", *command], _workdir())
    if args.dry_run:
        print(script, end="")
        return 0
    job = slurm.submit(script)
    _say(f"job {job} is submitted; `megatron-ext status {job}` shows it, `stop {job}` ends it")
    return 0


def _show_own_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("megatron-ext: %(message)s"))
    logger = logging.getLogger("megatron_ext")
    logger.handlers, logger.propagate = [handler], False


def _say(text: str) -> None:
    print(f"megatron-ext: {text}", file=sys.stderr, flush=True)


def _without_spares(plan: Plan, count: int) -> tuple[Plan, tuple[Node, ...]]:
    """Return the plan without its last hosts, and those."""
    used = len(plan.nodes) - count
    if used < 1:
        raise LaunchError(
            f"--spares is {count} of {len(plan.nodes)} hosts; at least one has to be in use"
        )
    return replace(plan, nodes=plan.nodes[:used]), plan.nodes[used:]


async def _launch(plan: Plan, args: argparse.Namespace, ssh: Ssh, limits: Restarts) -> Outcome:
    return await restarts.run(plan, ssh, limits, lambda each: _attempt(each, args, ssh))


async def _attempt(plan: Plan, args: argparse.Namespace, ssh: Ssh) -> Outcome:
    connections, findings = await preflight.meet(plan, ssh, args.preflight_timeout)
    try:
        plan = _completed(plan.with_devices([found.get("devices", 0) for found in findings]), args)
        show = _shown_ranks(args.show, plan.world_size)
        directory = _record(plan)
    except BaseException:
        await asyncio.gather(*(connection.close() for connection in connections))
        raise
    for warning in preflight.warnings(plan, findings):
        _say(f"warning: {warning}")
    _say(f"run {plan.run_id}: {plan.summary()}")
    raw = args.raw or not Path(plan.command[0]).name.startswith("pretrain_")
    if not raw:
        show = list(range(plan.world_size)) if len(plan.nodes) == 1 else show
        _say(f"everything the ranks print: {directory / 'output.log'}")
    outcome = await _supervised(plan, connections, findings, ssh, show, raw=raw)
    try:
        runs.write_json(directory / "result.json", outcome.to_json())
    except OSError as error:
        _say(f"warning: {directory / 'result.json'} cannot be written: {error.strerror}")
    _tell(plan, outcome, raw=raw)
    return outcome


async def _supervised(
    plan: Plan,
    connections: list[Connection],
    findings: list[dict[str, Any]],
    ssh: Ssh,
    show: list[int],
    raw: bool,
) -> Outcome:
    view = None if raw else PersonView()
    with (runs.run_dir(plan.run_id) / "output.log").open("wb") as log:
        display = Display(sys.stdout.buffer, log, view)
        try:
            outcome = await Job(plan, connections, findings, display, ssh).run(show)
        finally:
            await asyncio.to_thread(display.close)
            if display.left_out:
                _say(f"{display.left_out} lines were not shown, because the output was blocked")
    outcome.iteration = display.iteration
    return outcome


def _record(plan: Plan) -> Path:
    """Write the files of this run that later commands read."""
    directory = runs.run_dir(plan.run_id)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "plan.json").exists():
            raise LaunchError(f"there is a run {plan.run_id} already; give another --run-id")
        runs.write_json(directory / "plan.json", plan.to_json())
        runs.write_json(directory / "launcher.json", process.record(psutil.Process()))
    except OSError as error:
        raise LaunchError(
            f"{directory} cannot be written: {error.strerror}; make room, or set "
            f"MEGATRON_EXT_RUNS to another directory"
        ) from None
    return directory


def _tell(plan: Plan, outcome: Outcome, *, raw: bool) -> None:
    logs = f"logs: megatron-ext logs {plan.run_id}"
    if not raw:
        logs = f"everything: {runs.run_dir(plan.run_id) / 'output.log'}"
    if outcome.failure is not None:
        lines = [line for line in outcome.failure.tail if line.strip()]
        for line in lines if raw else lines[-1:]:
            _say(f"| {line}")
        _say(f"failed first: {outcome.failure}; the job was stopped on all hosts; {logs}")
    elif outcome.stopped_by == "SIGINT" and outcome.iteration:
        saved = [flag_value(plan.command, flag) for flag in ("--save", "--load")]
        _say(f"interrupted at iteration {outcome.iteration}; {failure.to_resume(*saved)}; {logs}")
    elif outcome.stopped_by is not None:
        _say(f"stopped by {outcome.stopped_by}; {logs}")
    else:
        _say(f"run {plan.run_id} succeeded; {logs}")
