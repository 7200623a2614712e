"""The training flags of forward/backward disaggregation."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup

from megatron_ext.config.early import FORWARD_FLAG
from megatron_ext.config.pipeline_config import Disaggregation
from megatron_ext.devices import CHOICES
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.generators.catalog import get

__all__ = ["FLAG", "FORWARD_FLAG", "MERGE", "add_flags", "disaggregation"]

FLAG = "--forward-backward-disaggregating"
MERGE = "--ignore-forward-tensor-parallel"


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags of disaggregation."""
    group.add_argument(
        FLAG,
        action="store_true",
        help="Run forward passes and backward passes in different processes: 2 x TP x PP processes "
        "for each replica, so the data-parallel size is halved and has to be even.",
    )
    group.add_argument(
        MERGE,
        action="store_true",
        help=f"With {FLAG}: one forward process replaces all tensor-parallel ranks of its "
        "stage, so a replica has (TP + 1) x PP processes.",
    )
    modes = get("fbd").options["activations"]
    group.add_argument(
        "--fbd-activations",
        choices=modes,
        help=f"With {FLAG}: recompute: backward ranks run the forward again; ship: forward ranks "
        "send them the input of each layer, which needs full uniform recomputation (default: "
        f"{modes[0]}).",
    )
    group.add_argument(
        FORWARD_FLAG,
        choices=CHOICES[1:],
        help=f"With {FLAG}: device of the forward ranks (default: that of the backward ranks).",
    )


def disaggregation(args: Namespace) -> Disaggregation | None:
    """Return the settings of disaggregation; None if it is off.

    Raises:
        ArgumentsError: A flag about forward ranks is given, but disaggregation is off.
    """
    if not getattr(args, "forward_backward_disaggregating", False):
        _refuse_without_roles(args)
        return None
    return Disaggregation(
        activations=args.fbd_activations or Disaggregation.activations,
        merged=args.ignore_forward_tensor_parallel,
        forward_device=args.fbd_forward_device,
    )


def _refuse_without_roles(args: Namespace) -> None:
    for dest in ("ignore_forward_tensor_parallel", "fbd_activations", "fbd_forward_device"):
        if getattr(args, dest, None):
            raise ArgumentsError(
                f"--{dest.replace('_', '-')} is for forward ranks, but there are none; add {FLAG}, "
                "or leave it out"
            )
