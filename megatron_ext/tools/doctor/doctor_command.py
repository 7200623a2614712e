"""The subcommand `doctor`: its flags and the checks it runs."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ArgumentsError, LaunchError
from megatron_ext.planning.hardware import DEVICES, parse_devices
from megatron_ext.tools.launch.launch_commands import add_hosts

if TYPE_CHECKING:
    from megatron_ext.tools.doctor.flight import Diagnosis


def add_subcommand(subparsers: Any) -> None:
    """Register `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine or all hosts in a hostfile",
        usage="megatron-ext doctor [options] [-- pretrain_gpt.py FLAGS...]",
        description="Check this machine's versions, patches, device, memory and RDMA. With "
        "--hostfile, also check every host. With a training run's flags after --, report those "
        "that are rejected, are known to hang, do not fit in memory or leave devices idle, and "
        "suggest better ones. The exit code is 1 if any check is a FAIL.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--devices",
        metavar="NxKIND",
        help=f"only check the flags, for N devices of a kind: {', '.join(DEVICES)}, or a file as "
        "for `plan` (default: one replica on devices like this machine's)",
    )
    add_hosts(parser)
    parser.add_argument(
        "command_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Print the diagnoses from all checks; return 1 if a check failed."""
    from megatron_ext.tools.doctor.flight import check_training

    selects_hosts = args.include is not None or args.exclude is not None
    if args.devices is not None:
        for name in ("hostfile", "include", "exclude"):
            if getattr(args, name) is not None:
                raise LaunchError(
                    f"--{name} checks real machines, but --devices needs none; remove one"
                )
        if not args.command_words:
            raise ArgumentsError(
                "--devices checks a training run's flags; add them: -- pretrain_gpt.py FLAGS"
            )
        count, device = parse_devices(args.devices)
        findings = check_training(args.command_words, count, device)
    elif args.hostfile is None and selects_hosts:
        flag = "--exclude" if args.include is None else "--include"
        raise LaunchError(f"{flag} selects hosts from a hostfile; add --hostfile FILE")
    else:
        findings = _of_machines(args)
    diagnoses = []
    for diagnosis in findings:
        diagnoses.append(diagnosis)
        if not args.json:
            # Print each line immediately, because some checks take seconds.
            print(diagnosis, flush=True)
    if args.json:
        report = [asdict(diagnosis) for diagnosis in diagnoses]
        print(json.dumps(report, indent=1))
    return int(any(diagnosis.level == "FAIL" for diagnosis in diagnoses))


def _of_machines(args: argparse.Namespace) -> Iterator[Diagnosis]:
    """Check this machine, the flags for a training run on it, and the hosts in a hostfile."""
    plan = None
    # Read the hostfile first, so that errors in it appear before the slow checks.
    if args.hostfile is not None:
        from megatron_ext.tools.launch import runs
        from megatron_ext.tools.launch.jobs import hosts_of
        from megatron_ext.tools.launch.plan import JobPlan

        selected, _ = hosts_of(args)
        # Without slots, each host counts its devices.
        hosts = tuple(replace(host, slots=None) for host in selected)
        # Every host has `true` and /, so the agents' checks of the command and the
        # directory pass.
        plan = JobPlan(
            run_id=runs.new_run_id(),
            hosts=hosts,
            command=("true",),
            workdir="/",
            python=args.python,
            per_node=True,
            ssh=args.ssh_cmd,
        )
    # Import here because the checks import torch, which takes seconds to load and is not needed for
    # --devices.
    from megatron_ext.tools.doctor import checks, flight

    for check in checks.MACHINE:
        yield from check()
    if args.command_words:
        device = checks.device_here()
        yield from flight.check_training(args.command_words, None, device)
    if plan is not None:
        yield from checks.check_hosts(plan, args.preflight_timeout)
