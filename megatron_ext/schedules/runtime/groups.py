"""The groups of a step, and which of their ranks exchange tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.transport.torch_dist import Channel

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.placement import Placement
    from megatron_ext.schedules.runtime.program import Peers

__all__ = ["channels_of", "default_groups"]


def default_groups() -> ProcessGroupCollection:
    """Return what Megatron's schedules take where they are given no groups."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


def channels_of(placement: Placement, rank: int, peers: Peers) -> list[Channel]:
    """Return all queues that this rank sends to or receives from under a placement."""
    me, channels = peers.pipeline[rank], []
    for stage, hop in enumerate(placement.hops):
        here, there = placement.rank_of[stage], placement.rank_of[stage + 1]
        if hop == "twin" and here == rank:
            assert peers.twin is not None
            ends = [(me, peers.twin), (peers.twin, me)]
        elif hop == "rank" and rank in (here, there):
            ends = [(peers.pipeline[here], peers.pipeline[there])]
        else:
            continue
        for source, target in ends:
            channels += [Channel(source, target, "F"), Channel(target, source, "B")]
    return channels
