"""Adapts Megatron to folded pipelines, whose first and last stage share a rank (V and W).

Megatron assumes that the first and last stages are on different ranks, and that the job's last rank
computes and logs the loss. In a folded pipeline, both copies of the word embedding are on one rank,
and losses must be sent to the rank that logs them. For all other placements, these functions do
nothing.

Each rank builds the layers that a `PipelineParallelLayerLayout` assigns to it. Upstream's class
assigns stages to ranks round-robin; `PlacedLayout` follows a `Placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)

from megatron_ext.config.active import is_folded
from megatron_ext.errors import ScheduleError
from megatron_ext.upstream.signatures import default_groups

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.schedules.table.placement import Placement


def tie_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Copy the first stage's word embedding into the last stage's copy.

    Call this after all chunks are built and before an optimizer copies their parameters.
    """
    # Upstream uses an all-reduce between the two copies' ranks, which has no effect if both copies
    # are on the same rank.
    tied = _tied_weights(chunks)
    if tied is None:
        return
    embedding, copy = tied
    with torch.no_grad():
        copy.copy_(embedding)  # in place: DDP's buffers already map this storage


def differing_copies(chunks: Sequence[torch.nn.Module]) -> str | None:
    """Describe how this rank's two copies of the word embedding differ; None if they do not."""
    tied = _tied_weights(chunks)
    if tied is None:
        return None
    first, last = tied
    # NaN is not equal to itself, and a diverged run has NaNs in both copies, so replace them.
    if torch.equal(torch.nan_to_num(first), torch.nan_to_num(last)):
        return None
    differences = (first.float() - last.float()).abs()
    difference = differences.max().item()
    description = f"they differ by up to {difference:.2g}"
    if not last.any():
        description += " (the second is zero)"
    return description


def sum_tied_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Set `main_grad` of both copies of the word embedding to the sum of their gradients.

    This replaces upstream's all-reduce over the embedding group. Call it after the data-parallel
    reduction and before gradients are scaled by the number of tokens.
    """
    # With the distributed optimizer, each replica owns a shard of the gradient. Tied weights have
    # separate buckets, so both copies' shards match.
    tied = _tied_weights(chunks)
    if tied is None:
        return
    embedding, copy = tied
    gradient = getattr(embedding, "main_grad", None)
    gradient_of_copy = getattr(copy, "main_grad", None)
    if gradient is None or gradient_of_copy is None:  # frozen
        return
    # Both copies get the sum: identical gradients and optimizer states keep the copies
    # identical.
    gradient.add_(gradient_of_copy)
    gradient_of_copy.copy_(gradient)


def _tied_weights(
    chunks: Sequence[torch.nn.Module],
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Return the first stage's word embedding and the last stage's copy, if this rank has both."""
    if not is_folded() or len(chunks) < 2:
        return None
    first = language_model(chunks[0])
    last = language_model(chunks[-1])
    if first is None or last is None:
        return None
    has_both_ends = first.pre_process and last.post_process
    if not has_both_ends:
        return None
    is_tied = first.share_embeddings_and_output_weights or first.config.mtp_num_layers
    if not is_tied:
        return None
    return (
        first.shared_embedding_or_output_weight(),
        last.shared_embedding_or_output_weight(),
    )


def language_model(chunk: torch.nn.Module) -> Any | None:
    """Return Megatron's language model inside a chunk's wrappers; None for other modules."""
    model: Any = chunk
    while not hasattr(model, "share_embeddings_and_output_weights"):
        model = getattr(model, "module", None)
        if model is None:
            return None
    return model


def keep_one_main_copy(sharded_state_dict: Any) -> None:
    """Make one of a tensor's two copies the main replica, which is saved or loaded.

    The dict contains upstream's replica ids for parallel saving or loading and is modified in
    place. Id 0 marks the tensors that this rank handles.
    """
    main_copies: set[tuple[Any, ...]] = set()
    for shard in nested_values(sharded_state_dict):
        if not isinstance(shard, ShardedTensor):
            continue
        if not is_main_replica(shard.replica_id):
            continue
        name = (shard.key, shard.global_offset)
        if name in main_copies:
            # Any id other than 0 will do: only the first copy of the tensor is then
            # saved or loaded.
            shard.replica_id = 1
        main_copies.add(name)


def with_own_tensors(state_dict: Any) -> Any:
    """Copy every tensor that appears twice in a loaded state dict; modify and return the dict."""
    tensor_ids: set[int] = set()

    def separate(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in tensor_ids:
            value = value.clone()
        tensor_ids.add(id(value))
        return value

    return dict_list_map_inplace(separate, state_dict)


def share_losses(
    losses: Mapping[str, torch.Tensor],
    groups: ProcessGroupCollection | None = None,
) -> dict[str, torch.Tensor]:
    """Broadcast the last stage's losses, by name, to all stages. Collective over the pipeline.

    The argument is ignored on all other ranks. If the placement is not folded, `losses` is returned
    unchanged.
    """
    if not is_folded():
        return dict(losses)
    # Broadcast Python objects, because only one rank knows the names and shapes, which depend on
    # the model.
    group = (groups or default_groups()).pp
    source = dist.get_process_group_ranks(group)[0]
    has_losses = dist.get_rank() == source
    box: list[Any] = [None]
    if has_losses:
        on_host = {name: loss.detach().cpu() for name, loss in losses.items()}
        box = [on_host]
    dist.broadcast_object_list(box, src=source, group=group)
    if has_losses:
        return dict(losses)
    [shared] = box
    on_device = {}
    for name, loss in shared.items():
        on_device[name] = loss.to(torch.cuda.current_device())
    return on_device


def share_mtp_losses(groups: ProcessGroupCollection | None = None) -> None:
    """Broadcast this step's multi-token prediction losses and hits to all stages. Collective."""
    if not is_folded():
        return
    tracker = MTPLossLoggingHelper.tracker
    step_values = {}
    for name, values in tracker.items():
        is_cumulative = name.startswith("cumulative")
        if name.endswith("values") and not is_cumulative:
            step_values[name] = values
    shared = share_losses(step_values, groups)
    if shared:
        # Upstream averages over the replicas of the rank that computed the values. Now every rank's
        # replicas have the values, so the rank that logs can average over its own replicas.
        replicas = (groups or default_groups()).dp_cp
        tracker.update(shared, reduce_group=None, avg_group=replicas)


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout in upstream's notation and in stage order; its placement assigns stages to ranks.

    Raises:
        ScheduleError: The layout and the placement have different numbers of stages.
    """

    def __init__(self, layout: str, placement: Placement) -> None:
        stages: list[list[LayerType]] = self.parse_str_to_list(layout)
        if len(stages) != placement.num_stages:
            raise ScheduleError(
                f"--pipeline-model-parallel-layout {layout} has {len(stages)} stages, but the "
                f"schedule has {placement.num_stages}; use | to separate that many stages"
            )
        # Keep the plain string in stage order: upstream stores it in arguments and checkpoints,
        # which must not depend on the placement.
        super().__init__(layout, placement.num_ranks)
        # Store plain tuples: some hosts copy a configuration by assigning to every attribute
        # reachable from it, which fails on a frozen `Placement`.
        self.stages_of = placement.stages_of
        self.stages = stages
        self.layout = []
        for stages_of_rank in placement.stages_of:
            layers_of_rank = [stages[stage] for stage in stages_of_rank]
            self.layout.append(layers_of_rank)

    def validate_layer_layout(
        self,
        num_layers: int,
        mtp_num_layers: int | None,
    ) -> bool:
        """Run upstream's checks; return whether an MTP layer is outside the last stage."""
        # Upstream's result depends on the rank, which is wrong for these placements.
        super().validate_layer_layout(num_layers, mtp_num_layers)
        return any(LayerType.mtp in stage for stage in self.stages[:-1])

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers of a type in all stages before a chunk.

        `vp_stage` is the chunk's number on this rank or on `pp_rank`.
        """
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = self.stages_of[pp_rank]
        if vp_stage is None:
            assert len(chunks) == 1, "ranks hold several chunks: pass vp_stage"
            vp_stage = 0
        stage = chunks[vp_stage]
        earlier_stages = self.stages[:stage]
        return sum(layers.count(layer_type) for layers in earlier_stages)


# Cached, because upstream may build a new configuration for every micro-batch.
placed_layout = lru_cache(maxsize=16)(PlacedLayout)
