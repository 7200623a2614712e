"""The flags for `launch`, `stop`, `status` and `logs`.

The implementations are imported only when they run, so every command in this package starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def _number(
    convert: Callable[[str], Any],
    first: int,
    last: float,
    rule: str,
) -> Any:
    """Return an argparse converter for a number in a range; errors quote `rule`."""

    def checked(text: str) -> Any:
        with suppress(ValueError):
            # All comparisons with NaN are false, so this also rejects NaN.
            if first <= convert(text) <= last:
                return convert(text)
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number {rule}")

    return checked


def whole_number(first: int, last: int) -> Any:
    """Return an argparse converter for a whole number in a range."""
    return _number(int, first, last, f"between {first} and {last}")


_count = whole_number(1, 10**9 - 1)
_seconds = _number(float, 0, 1e9, "of seconds, 0 or more")


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=VALUE, for example --env A=1, or the NAME of a variable"
        )
    if equals:
        return name, value
    if name not in os.environ:
        raise argparse.ArgumentTypeError(
            f"{name} is not set here; export it, or pass {name}=VALUE"
        )
    # Take the value from the environment, so that secrets need not appear on the command line.
    return name, os.environ[name]


def _program(text: str) -> tuple[str, ...]:
    from megatron_ext.config.flags import split_words

    words = split_words(text, "--ssh-cmd")
    if not words:
        raise argparse.ArgumentTypeError(
            "must not be empty; set a program, such as ssh"
        )
    return words


def _absolute(text: str) -> str:
    if not Path(text).is_absolute():
        raise argparse.ArgumentTypeError(
            f"{text} is relative; hosts need an absolute path"
        )
    return text


def add_subcommands(subparsers: Any) -> None:
    """Register `launch` and the commands for its jobs: stop, status, logs."""
    parser = subparsers.add_parser(
        "launch",
        help="start a training job on this machine or on the hosts in a hostfile",
        usage="megatron-ext launch [--hostfile FILE | --slurm OPTIONS] [options] -- SCRIPT.py "
        "FLAGS...",
        description="Start torchrun on this machine, or on every host through ssh or Slurm's "
        "srun; show the logs; and stop the job on all hosts as soon as any part of it fails or "
        "Ctrl-C is pressed.",
    )
    add_hosts(parser)
    add = add_job(parser)
    add(
        "--per-node",
        action="store_true",
        help="run a command once on each host, without torchrun, for setup or inspection",
    )
    add(
        "--max-restarts",
        type=whole_number(0, 10**9),
        default=0,
        metavar="N",
        help="restart after a failure, at most N times within the window (default: 0)",
    )
    add(
        "--restart-window",
        type=_seconds,
        default=3600.0,
        metavar="S",
        help="seconds after which a restart no longer counts (default: 3600)",
    )
    add(
        "--spares",
        type=whole_number(0, 10**9),
        default=0,
        metavar="K",
        help="keep the last K hosts as spares, which replace unusable hosts on a restart; with "
        "--keep-going, all of their ranks are reserve ranks",
    )
    add(
        "--keep-going",
        action="store_true",
        help="after the loss of a rank, continue in the same processes with a reserve rank "
        "(needs nvidia-resiliency-ext: pip install 'megatron-ext[resilience]')",
    )
    add(
        "--reserve",
        type=whole_number(1, 1024),
        metavar="N",
        help="with --keep-going: number of extra ranks on the last training host, ready to replace "
        "lost ranks (default: 1, or 0 with --spares)",
    )
    add(
        "--run-id",
        metavar="ID",
        help="name of this run (default: derived from the time)",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--dry-run",
        action="store_true",
        help="print each host's command without running it",
    )
    add(
        "--raw",
        action="store_true",
        help="show every line that the ranks print (default for Megatron's pretrain_*.py scripts: "
        "a short line per startup phase and logged step, and any errors)",
    )
    add(
        "--show",
        default="0,last",
        metavar="RANKS",
        help="ranks whose output is shown: all, or a list such as 0,3,last (default: 0,last); the "
        "hosts keep the full logs",
    )
    # All words after the options, usually preceded by `--`.
    parser.add_argument(
        "command_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=_run)
    for name, text in (
        ("stop", "stop a running job"),
        ("status", "show a job's state and its processes and logs on each host"),
        ("logs", "show the last lines of a job's logs"),
    ):
        parser = subparsers.add_parser(
            name, help=text, description=f"{text.capitalize()}."
        )
        add = parser.add_argument
        add(
            "run_id",
            metavar="RUN_ID",
            help="the id that launch printed, or the Slurm job id",
        )
        add_programs(add)
        add(
            "--timeout",
            type=_seconds,
            default=60.0,
            metavar="S",
            help="seconds to wait for each host's answer (default: 60)",
        )
        if name == "stop":
            add(
                "--grace",
                type=_seconds,
                metavar="S",
                help="seconds before the job is killed, if less than launch's --grace",
            )
        if name == "logs":
            add(
                "--rank",
                type=int,
                metavar="R",
                help="rank whose log is shown (default: torchrun's own log)",
            )
            add(
                "--lines",
                type=_count,
                default=20,
                metavar="N",
                help="number of lines (default: 20)",
            )
        parser.set_defaults(run=_run)


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the hosts and define how to reach them."""
    add = parser.add_argument_group("hosts").add_argument
    add("--hostfile", type=Path, metavar="FILE", help="a file with one host per line")
    add("--include", metavar="HOST@...", help="use only these hosts")
    add("--exclude", metavar="HOST@...", help="do not use these hosts")
    add_programs(add)
    add(
        "--preflight-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds to wait for all hosts' answers (default: 30)",
    )


def add_job(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Add the flags that configure a job; return the function that adds flags to their group."""
    add = parser.add_argument_group("job").add_argument
    add(
        "--slurm",
        metavar="OPTIONS",
        help="submit the job to Slurm with these sbatch options, such as '--nodes 2'; inside an "
        "allocation, neither this nor a hostfile is needed",
    )
    add(
        "--nproc",
        type=whole_number(1, 1024),
        metavar="N",
        help="processes per host (default: its slots or devices; on a single machine without "
        "devices, as many as the flags require)",
    )
    add(
        "--allow-uneven",
        action="store_true",
        help="allow hosts to run different numbers of processes",
    )
    add(
        "--num-microbatches",
        type=_count,
        metavar="M",
        help="add --global-batch-size = M x micro-batch size x data-parallel size",
    )
    add(
        "--master-port",
        type=whole_number(1, 65535),
        metavar="P",
        help="port for the ranks' rendezvous (default: a free port)",
    )
    add(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an environment variable for all processes; NAME alone passes on its current value "
        "without showing it; can be repeated",
    )
    add(
        "--grace",
        type=_seconds,
        # With ranks that ignore SIGTERM, a job on two hosts stopped after 12.9 s on a busy machine.
        default=5.0,
        metavar="S",
        help="seconds between asking processes to stop and killing them (default: 5)",
    )
    add(
        "--log-dir",
        type=_absolute,
        metavar="DIR",
        help="log directory on every host (default: ~/.local/state/megatron_ext/runs)",
    )
    return add


def add_programs(add: Callable[..., Any]) -> None:
    """Add the flags that select the programs used to reach hosts."""
    add(
        "--ssh-cmd",
        type=_program,
        default=("ssh",),
        metavar="COMMAND",
        help="the ssh program, with options (default: ssh)",
    )
    add(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="path to Python on the hosts (default: the path to this Python)",
    )


def _run(args: argparse.Namespace) -> int:
    if args.command == "launch":
        from megatron_ext.tools.launch.jobs import launch

        return launch(args, sys.argv[1:])
    from megatron_ext.tools.launch.manage import manage

    return manage(args)
