"""What a pipeline owes Megatron when it ends on the rank where it began.

Megatron takes for granted that the first and the last stage are on different ranks, and that the
last rank of the world logs because it has the loss. In V and W placements the first rank of the
pipeline holds both ends: the two copies of the word embedding meet in one process, and losses have
to travel to where they are logged. All functions do nothing in any other placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from megatron_ext.config.active import is_folded
from megatron_ext.signatures import default_groups

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = [
    "differing_copies",
    "keep_one_main_copy",
    "share_losses",
    "share_mtp_losses",
    "sum_tied_gradients",
    "tie_embeddings",
]


def tie_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Start the copy of the word embedding in the last stage with the values of the first stage.

    To be called when all chunks are built and before an optimizer copies their parameters. Upstream
    fills the copy with an all-reduce between ranks, which does nothing within one.
    """
    tied = _tied_weights(chunks)
    if tied is None:
        return
    embedding, copy = tied
    with torch.no_grad():
        copy.copy_(embedding)  # in place: gradient buffers have mapped the storage


def differing_copies(chunks: Sequence[torch.nn.Module]) -> str | None:
    """Say how the two copies of the word embedding differ on this rank; None: they do not."""
    models = unwrap_model(list(chunks))
    if not all(hasattr(model, "share_embeddings_and_output_weights") for model in models):
        return None  # no language models of Megatron's
    tied = _tied_weights(chunks)
    if tied is None or torch.equal(*tied):
        return None
    difference = (tied[0].float() - tied[1].float()).abs().max().item()
    zero = " (the second is zero)" if not tied[1].any() else ""
    return f"they differ by up to {difference:.2g}{zero}"


def sum_tied_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Give both copies of the word embedding the sum of their gradients.

    To be called when replicas have been reduced and before gradients are scaled by the number of
    tokens, in place of upstream's all-reduce over the embedding group. With the distributed
    optimizer each replica has one part of the gradient; tied weights have buckets of their own, so
    that the parts of both copies are the same.
    """
    tied = _tied_weights(chunks)
    if tied is None:
        return
    first, last = (getattr(weight, "main_grad", None) for weight in tied)
    if first is None or last is None:  # frozen
        return
    first.add_(last)
    last.copy_(first)


def _tied_weights(
    chunks: Sequence[torch.nn.Module],
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Return the word embedding of the first stage and its copy in the last, if both are here."""
    if not is_folded():
        return None
    first, last = (
        get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for chunk in (chunks[0], chunks[-1])
    )
    if first is last or not (first.pre_process and last.post_process):
        return None
    if not first.share_embeddings_and_output_weights and not first.config.mtp_num_layers:
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def keep_one_main_copy(sharded_state_dict: Any) -> None:
    """Let a rank save, or read from disk, one of two copies of a tensor; the other follows it.

    Args:
        sharded_state_dict: With the replica numbers that upstream gave for saving or loading in
            parallel, 0 for what this rank takes care of; changed in place.
    """
    taken: set[tuple[Any, ...]] = set()
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            name = (shard.key, shard.global_offset)
            if name in taken:
                shard.replica_id = 1
            taken.add(name)


def share_losses(
    losses: Mapping[str, torch.Tensor], groups: ProcessGroupCollection | None = None
) -> dict[str, torch.Tensor]:
    """Bring the losses of the last stage to all stages, whatever they are called. Collective.

    Args:
        losses: On the rank with the last stage what it has, anything elsewhere.
        groups: Of the model; None: Megatron's global ones.

    Returns:
        The last stage's losses.
    """
    if not is_folded():
        return dict(losses)
    group = (default_groups() if groups is None else groups).pp
    source = dist.get_process_group_ranks(group)[0]
    holder = dist.get_rank() == source
    box: list[Any] = [{k: v.detach().cpu() for k, v in losses.items()} if holder else None]
    dist.broadcast_object_list(box, src=source, group=group)
    if holder:
        return dict(losses)
    return {key: loss.to(torch.cuda.current_device()) for key, loss in box[0].items()}


def share_mtp_losses(groups: ProcessGroupCollection | None = None) -> None:
    """Bring what multi-token prediction counted in this step to all stages. Collective.

    Losses, and from 0.19 on hits too. Upstream keeps them in a tracker of the rank that computed
    them and averages them over its replicas when they are logged; each rank's own replicas have the
    same values, so that the average is right everywhere.

    Args:
        groups: Of the model; None: Megatron's global ones.
    """
    if not is_folded():
        return
    tracker = MTPLossLoggingHelper.tracker
    shared = share_losses(
        {
            name: values
            for name, values in tracker.items()
            if name.endswith("values") and not name.startswith("cumulative")
        },
        groups,
    )
    if shared:
        replicas = (default_groups() if groups is None else groups).dp_cp
        tracker.update(shared, reduce_group=None, avg_group=replicas)
