"""Checks during the first steps that features have their intended effect.

A patch can be in place without effect, because Megatron no longer calls its target. No comparison
of functions shows that, and losses keep falling. So each feature that could fail silently is
checked by its effect: copies of a tied embedding are equal, the loss arrives on the rank that logs,
and so on. A failed check raises `EffectMissing`, which names the patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import EffectMissing
from megatron_ext.upstream import releases

if TYPE_CHECKING:
    import torch

    from megatron_ext.config.sized_pipeline import Pipeline

__all__ = [
    "check_frozen",
    "check_gloo",
    "check_logged",
    "check_messages",
    "check_split",
    "check_table",
    "check_tied",
    "labels_missing",
]


def _missing(feature: str, effect: str, found: str, patch: str) -> EffectMissing:
    return EffectMissing(
        feature,
        effect,
        found,
        patch,
        installed=releases.core_version() or "(none)",
        tested=releases.reference().version,
    )


def _schedule(pipeline: Pipeline) -> str:
    return f"--pipeline-schedule {pipeline.name}"


def check_tied(pipeline: Pipeline, chunks: Sequence[torch.nn.Module], *, step: int) -> None:
    """Check that both copies of a tied embedding are equal on the rank that holds them.

    Args:
        pipeline: The schedule.
        chunks: Model chunks of this rank.
        step: Steps since the start: 0 checks the initial copy, later ones its updates.
    """
    from megatron_ext.runtime.folded import differing_copies

    found = differing_copies(chunks)
    if found is not None:
        patch = "placement.tied_gradients" if step else "placement.tied_weights"
        effect = "the copies of the tied embedding on the first rank are equal"
        raise _missing(_schedule(pipeline), effect, found, patch)


def labels_missing(pipeline: Pipeline) -> EffectMissing:
    """Return the error of a last stage on the first rank that has no labels."""
    return _missing(
        _schedule(pipeline),
        "the first rank, which has the last stage, gets labels too",
        "its loss could not be computed",
        "placement.batch",
    )


def check_split(pipeline: Pipeline, chunks: Sequence[torch.nn.Module], *, recorded: bool) -> None:
    """Check that linear layers left their weight gradients for W.

    Args:
        pipeline: A schedule that splits backwards.
        chunks: Model chunks of this rank.
        recorded: Whether any gradient was deferred.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    layers = (layer for chunk in chunks for layer in chunk.modules())
    kinds = (ColumnParallelLinear, RowParallelLinear)
    weights = [layer.weight for layer in layers if isinstance(layer, kinds)]
    if recorded or not any(weight is not None and weight.requires_grad for weight in weights):
        return
    raise _missing(
        _schedule(pipeline),
        "gradients of weights wait for W",
        "none of the first step did",
        "split_backward.linear",
    )


def check_table(pipeline: Pipeline, *, ran: bool) -> None:
    """Check that a training step ran under the chosen schedule."""
    if not ran:
        effect = "steps run its table"
        found = "the first step ran another schedule"
        raise _missing(_schedule(pipeline), effect, found, "schedules.forward_backward")


def check_messages(pipeline: Pipeline, *, used: bool) -> None:
    """Check that a training step of Megatron's own schedule used the chosen transport."""
    if not used:
        feature = f"--pipeline-transport {pipeline.transport}"
        found = "the first step sent nothing through it"
        raise _missing(feature, "it carries tensors between stages", found, "pipeline.messages")


def check_logged(pipeline: Pipeline, losses: Any) -> None:
    """Check that a rank that logs has losses to log."""
    if not losses:
        effect = "the loss, which is on the first rank, is brought to the rank that logs"
        raise _missing(_schedule(pipeline), effect, "there was none", "placement.train_step")


def check_frozen(chunks: Sequence[torch.nn.Module]) -> None:
    """Check that a forward rank of a disaggregated job trains nothing."""
    trained = sum(p.requires_grad for chunk in chunks for p in chunk.parameters())
    if trained:
        raise _missing(
            "--forward-backward-disaggregating",
            "forward ranks keep no gradients",
            f"{trained} weights of this one require some",
            "disaggregation.model",
        )


def check_gloo(*, off: bool) -> None:
    """Check that there are no gloo groups besides those of the device.

    Args:
        off: Whether the device's defaults disable them.
    """
    from megatron.core import parallel_state

    if off and parallel_state._DATA_PARALLEL_GROUP_GLOO is not None:
        raise _missing(
            "--device-backend cpu",
            "no second gloo group is made for each group",
            "there are some, with two threads each",
            "arguments.flags",
        )
