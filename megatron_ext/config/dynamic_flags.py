"""The training flags of dynamic schedules, and what they cannot be combined with."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.config import stages
from megatron_ext.config.choice import Dynamic
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.gains import NOTABLE
from megatron_ext.schedules.search.patience import quiet
from megatron_ext.schedules.search.policies import POLICIES, Hint
from megatron_ext.schedules.search.simulate import simulate

if TYPE_CHECKING:
    from megatron_ext.config.choice import Choice
    from megatron_ext.schedules.representation.costs import Costs
    from megatron_ext.schedules.search.simulate import Timeline

__all__ = ["add_flags", "base_table", "dynamic", "running", "timeline", "warning"]

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
        help=f"Of {_USE}: what goes first if several actions are ready. hint follows the table and "
        "keeps its memory, the others keep up to all micro-batches (default: "
        f"{next(iter(POLICIES))}).",
    )
    group.add_argument(
        "--dpp-extra-activations",
        type=int,
        metavar="N",
        help=f"Of {_USE} with hint: micro-batches that a rank may keep beyond the table's peak "
        f"(default: {Dynamic.extra_activations}).",
    )


def dynamic(args: Namespace) -> Dynamic | None:
    """Return what `--use-dpp` and its options say; None without it.

    Raises:
        ArgumentsError: An option without the flag, or one that the policy does not have.
    """
    policy = getattr(args, "dpp_policy", None)
    extra = getattr(args, "dpp_extra_activations", None)
    if not getattr(args, "use_dpp", False):
        for flag, value in (("--dpp-policy", policy), ("--dpp-extra-activations", extra)):
            if value is not None:
                raise ArgumentsError(f"{flag} is for {_USE}; add it, or leave {flag} out")
        return None
    policy = policy or Dynamic.policy
    if extra is not None and extra < 0:
        raise ArgumentsError(
            f"--dpp-extra-activations {extra}: a rank cannot keep less than the table's own peak; "
            "take 0 for exactly that, or a schedule that keeps less, such as v-half"
        )
    if extra is not None and policy != "hint":
        raise ArgumentsError(
            f"--dpp-extra-activations {extra}: --dpp-policy {policy} has no bound on memory; leave "
            "one of them out"
        )
    found = Dynamic(policy, Dynamic.extra_activations if extra is None else extra)
    instances = getattr(args, "num_distributed_optimizer_instances", None) or 1
    if instances > 1 and getattr(args, "overlap_grad_reduce", False):
        return replace(found, splits=False)  # their gradients are complete all at once
    return found


def base_table(args: Namespace) -> str:
    """Return the schedule that `--use-dpp` starts from where none was named."""
    return "interleaved" if stages.chunks_of_megatron(args) > 1 else "1f1b"


def running(choice: Choice) -> str:
    """Describe the policy of a choice and its bound on memory, for the log."""
    assert choice.dynamic is not None
    policy = choice.policy(choice.num_microbatches, 0)
    schedule = choice.schedule(choice.num_microbatches)
    share = schedule.pp / schedule.num_stages
    if isinstance(policy, Hint):
        most = share * policy.cap
        bound = f"at most {most:g} activations (+{choice.dynamic.extra_activations})"
    else:
        bound = f"no bound on activations, up to {schedule.num_microbatches}"
    split = "" if choice.dynamic.splits else ", backwards whole"
    return f"dynamic order by {choice.dynamic.policy}, {bound}{split}"


def timeline(choice: Choice, costs: Costs) -> Timeline:
    """Simulate a dynamic choice."""
    m = choice.num_microbatches
    return simulate_dynamic(choice.schedule(m), lambda rank: choice.policy(m, rank), costs)


def warning(choice: Choice) -> str | None:
    """Return what to do instead if the table's own order is as fast while nothing is late."""
    calm = quiet(choice.costs)
    static = replace(choice, dynamic=None).schedule(choice.num_microbatches)
    ratio = simulate(static, calm).makespan / timeline(choice, calm).makespan
    if ratio >= 1 + NOTABLE:
        return None
    less = 100 * (1 - ratio)
    takes = f"takes {less:.1f} % less time than" if ratio < 1 - NOTABLE else "is as fast as"
    return (
        f"while no message and no micro-batch is late, the order of {choice.name} itself {takes} "
        f"{_USE} (simulated); leave {_USE} out unless links or micro-batches vary"
    )
