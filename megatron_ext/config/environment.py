"""The launcher's variables and the plain command line, read before any parser.

`megatron.core` copies names of the device at import, so the device is read first; after parsing,
`config/hosting.py` checks that both agree. No other flag is read this way. Each configuration reads
the launcher's variables once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.errors import ArgumentsError

__all__ = [
    "FLAGS",
    "FORWARD_FLAG",
    "Environment",
    "of_forward_rank",
    "requested_device",
    "requested_flags",
]

FORWARD_FLAG = "--fbd-forward-device"
_FLAG = "--device-backend"
_VARIABLE = "MEGATRON_EXT_DEVICE"

FLAGS = "MEGATRON_EXT_FLAGS"
"""Flags of this package for programs that do not parse Megatron's command line."""


def requested_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the words of `MEGATRON_EXT_FLAGS`, split as by a shell; none if it is not set.

    Raises:
        ArgumentsError: A quotation does not end.
    """
    text = environ.get(FLAGS, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentsError(f"{FLAGS} is {text!r}: {error}; close the quotation") from None


def requested_device(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """Return the device that the user requested, or `auto`, and the flag or variable that did.

    The separate device of the forward ranks of a disaggregated job comes first, then the
    environment, then the flag.

    Args:
        argv: The command line; `sys.argv` if left out.
        environ: The environment.
    """
    words = list(sys.argv if argv is None else argv)
    of_role = of_forward_rank(words, environ)
    if of_role:
        return of_role, FORWARD_FLAG
    if environ.get(_VARIABLE):
        return environ[_VARIABLE], _VARIABLE
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_FLAG, dest="device", nargs="?", const="", default="auto")
    return str(parser.parse_known_args(words)[0].device), _FLAG


def of_forward_rank(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the value of `--fbd-forward-device` if this process is a forward rank, else None.

    Args:
        argv: The command line.
        environ: The environment, which holds RANK and WORLD_SIZE.
    """
    if not any(word.partition("=")[0] == FORWARD_FLAG for word in argv):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--forward-backward-disaggregating", action="store_true")
    parser.add_argument("--ignore-forward-tensor-parallel", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument(FORWARD_FLAG, dest="device")
    try:
        given, _ = parser.parse_known_args(list(argv))
        ranks = rank_map(
            int(environ.get("WORLD_SIZE", "1")),
            tp=given.tensor_model_parallel_size,
            pp=given.pipeline_model_parallel_size,
            merged=given.ignore_forward_tensor_parallel,
            cp=given.context_parallel_size,
        )
        role = ranks.place(int(environ.get("RANK", "0"))).role
    except (argparse.ArgumentError, ArgumentsError, ValueError, ZeroDivisionError):
        return None  # the full parser reports the mistake
    if not given.forward_backward_disaggregating or role == "backward":
        return None
    return str(given.device)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Place of this process among those that the launcher started together."""

    local_rank: int = 0
    """Number of this process on its host."""
    local_world_size: int | None = None
    """Processes on this host; None: all of the job."""
    run: tuple[str, str] = ("", "")
    """torchrun's run id and restart count; empty without torchrun."""
    rendezvous_host: str = "localhost"
    """Where processes find each other: torchrun's MASTER_ADDR."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables that torchrun and compatible launchers set."""
        size = environ.get("LOCAL_WORLD_SIZE")
        return cls(
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=None if size is None else int(size),
            run=(
                environ.get("TORCHELASTIC_RUN_ID", ""),
                environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            ),
            rendezvous_host=environ.get("MASTER_ADDR") or "localhost",
        )

    def ranks_per_node(self, world_size: int) -> int:
        """Return the number of ranks on this host."""
        return self.local_world_size or world_size
