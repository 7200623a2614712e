"""The training flags of dynamic schedules."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.search.policies import POLICIES

__all__ = ["add_flags", "dynamic_order"]

_USE = "--use-dpp"


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags that let ranks choose the order of their actions."""
    group.add_argument(
        _USE,
        action="store_true",
        help="Dynamic pipeline parallelism: each rank runs the next action that is ready, instead "
        "of waiting for the next one of the table. The table is that of --pipeline-schedule, by "
        "default interleaved where the model has virtual stages, else 1f1b.",
    )
    group.add_argument(
        "--dpp-policy",
        choices=tuple(POLICIES),
        help=f"With {_USE}: which action runs first if several are ready. hint follows the table "
        "and its bound on memory, the others may keep the activations of all micro-batches "
        f"(default: {next(iter(POLICIES))}).",
    )
    group.add_argument(
        "--dpp-extra-activations",
        type=int,
        metavar="N",
        help=f"With {_USE} and hint: micro-batches that a rank may keep beyond the table's peak "
        f"(default: {DynamicOrder().margin}).",
    )


def dynamic_order(args: Namespace) -> DynamicOrder | None:
    """Return the settings of `--use-dpp`; None without it.

    Raises:
        ArgumentsError: An option is given without the flag, or the policy does not have it.
    """
    policy = getattr(args, "dpp_policy", None)
    extra = getattr(args, "dpp_extra_activations", None)
    if not getattr(args, "use_dpp", False):
        for flag, value in (("--dpp-policy", policy), ("--dpp-extra-activations", extra)):
            if value is not None:
                raise ArgumentsError(f"{flag} is for {_USE}; add it, or leave {flag} out")
        return None
    return DynamicOrder(policy=policy or DynamicOrder.policy, extra_activations=extra)
