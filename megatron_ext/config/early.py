"""Reads the device from the raw command line, before any parser exists.

`megatron.core` copies names of the device at import, before a parser knows Megatron's flags. No
other setting is read this way; after parsing, `config/hosting.py` checks that both agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.errors import ArgumentsError

__all__ = ["FORWARD_FLAG", "of_forward_rank", "requested_device"]

FORWARD_FLAG = "--fbd-forward-device"
_FLAG = "--device-backend"
_VARIABLE = "MEGATRON_EXT_DEVICE"


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
