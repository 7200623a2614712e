"""The subcommand `doctor`."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import LaunchError
from megatron_ext.schedules.generators.catalog import generate
from megatron_ext.tools.launch.launch_commands import add_hosts, count

if TYPE_CHECKING:
    from megatron_ext.tools.doctor.finding import Finding
    from megatron_ext.tools.launch.plan import Plan

__all__ = ["add_subcommand", "run"]

_Subparsers = Any  # argparse._SubParsersAction is private
_SIZES = ("seq_length", "micro_batch_size", "hidden_size", "pp")


def add_subcommand(subparsers: _Subparsers) -> None:
    """Register `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, or all hosts of a hostfile",
        description="Check versions, patches, device, memory, RDMA and ports of this machine, and "
        "with --hostfile also every host, and after -- the flags of a training. Exit code 1 if "
        "anything is a FAIL.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_hosts(parser)
    group = parser.add_argument_group(
        "sizes of a run", "With all of them, also check the memory of the transport's arenas."
    )
    group.add_argument("--schedule", default="1f1b", metavar="NAME", help="default: 1f1b")
    group.add_argument("--pp", type=count, metavar="P", help="ranks of the pipeline")
    group.add_argument(
        "--microbatches", type=count, default=None, metavar="M", help="default: 4 x P"
    )
    group.add_argument("--seq-length", type=count, metavar="S", help="tokens of a sample")
    group.add_argument("--micro-batch-size", type=count, metavar="B", help="samples")
    group.add_argument("--hidden-size", type=count, metavar="H", help="width of the model")
    group.add_argument("--use-dpp", action="store_true", help="with a dynamic order")
    group.add_argument(
        "--dpp-extra-activations", type=int, default=1, metavar="N", help="of --use-dpp, default: 1"
    )
    group.add_argument("--fp32", action="store_true", help="values of 4 bytes (default: 2)")
    parser.add_argument("command_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks that the flags select, in sequence."""
    from megatron_ext.tools.doctor import hosts, machine, software
    from megatron_ext.tools.launch.start import ssh_of

    yield from software.check_versions()
    yield from software.check_requirements()
    yield from software.check_bridge()
    yield from software.check_tree()
    yield from software.check_device()
    yield from software.check_native()
    yield from software.check_patches()
    yield from machine.check_shared_memory()
    yield from machine.check_memlock()
    yield from machine.check_rdma()
    yield from machine.check_ports()
    sizes = _sizes(args)
    if sizes is not None:
        yield from machine.check_arenas(sizes)
    if args.command_words:
        yield from software.check_training(args.command_words)
    if args.hostfile is not None:
        yield from hosts.check_hosts(_plan(args), ssh_of(args), args.preflight_timeout)


def _sizes(args: argparse.Namespace) -> Any:
    """Return the given sizes, or None if there are none.

    Raises:
        LaunchError: Some are missing.
    """
    from megatron_ext.tools.doctor.machine import Sizes

    missing = [name for name in _SIZES if getattr(args, name) is None]
    if len(missing) == len(_SIZES):
        return None
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise LaunchError(f"the arenas need {flags} too; give all sizes, or none")
    return Sizes(
        schedule=args.schedule,
        pp=args.pp,
        num_microbatches=args.microbatches or 4 * args.pp,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=args.hidden_size,
        bytes_per_value=4 if args.fp32 else 2,
        extra_activations=args.dpp_extra_activations if args.use_dpp else None,
    )


def _plan(args: argparse.Namespace) -> Plan:
    """Return a plan for checks only; it starts nothing.

    Raises:
        LaunchError: Something is wrong with the hostfile.
    """
    from megatron_ext.tools.launch import runs
    from megatron_ext.tools.launch.plan import Plan
    from megatron_ext.tools.launch.start import nodes_of

    nodes = tuple(replace(node, nproc=0) for node in nodes_of(args))  # it counts the devices
    return Plan(
        run_id=runs.new_run_id(),
        nodes=nodes,
        command=("true",),
        workdir="/",
        python=args.python,
        per_node=True,
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings of all checks; return 1 if one of them failed."""
    # Report mistakes in the flags before any check runs.
    sizes = _sizes(args)
    if sizes is not None:
        generate(sizes.schedule, sizes.pp, sizes.num_microbatches)
    if args.hostfile is not None:
        _plan(args)
    elif args.include is not None or args.exclude is not None:
        flag = "--exclude" if args.include is None else "--include"
        raise LaunchError(f"{flag} chooses among the hosts of a hostfile; add --hostfile FILE")
    found = []
    for finding in findings(args):
        found.append(finding)
        if not args.json:
            print(finding, flush=True)
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    return 1 if any(finding.level == "FAIL" for finding in found) else 0
