"""Which device a forward rank computes on, from the plain command line.

The device has to be known before Megatron is imported, hence before there is a parser that knows
Megatron's flags. Imports nothing but the standard library and our errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.errors import ArgumentsError

__all__ = ["FLAG", "of_forward_rank"]

FLAG = "--fbd-forward-device"


def of_forward_rank(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return what `--fbd-forward-device` says to this process; None: nothing.

    Args:
        argv: The command line.
        environ: Where RANK and WORLD_SIZE are.
    """
    if not any(word.partition("=")[0] == FLAG for word in argv):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--forward-backward-disaggregating", action="store_true")
    parser.add_argument("--ignore-forward-tensor-parallel", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument(FLAG, dest="device")
    try:
        given, _ = parser.parse_known_args(list(argv))
        ranks = rank_map(
            int(environ.get("WORLD_SIZE", "1")),
            tp=given.tensor_model_parallel_size,
            pp=given.pipeline_model_parallel_size,
            merged=given.ignore_forward_tensor_parallel,
        )
        role = ranks.place(int(environ.get("RANK", "0"))).role
    except (argparse.ArgumentError, ArgumentsError, ValueError, ZeroDivisionError):
        return None  # whoever reads all flags says what is wrong with them
    if not given.forward_backward_disaggregating or role == "backward":
        return None
    return str(given.device)
