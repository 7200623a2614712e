"""Runs this package's commands, and Python code that uses it, in separate processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megatron_ext import cli

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 200


def run_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout importable, on the CPU unless `env` says otherwise.

    A `PYTHONPATH` in `env` comes before this checkout.
    """
    environment = {**os.environ, "MEGATRON_EXT_DEVICE": "cpu", **env}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [env.get("PYTHONPATH"), str(_ROOT)])
    )
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env=environment,
    )


def run_package(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron_ext` with these arguments."""
    return run_python("-m", "megatron_ext", *arguments, **env)


def subcommands() -> set[str]:
    """Return the subcommands of `megatron-ext`."""
    actions = cli.build_parser()._actions
    [subparsers] = [
        action for action in actions if isinstance(action, argparse._SubParsersAction)
    ]
    return set(subparsers.choices)
