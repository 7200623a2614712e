"""Derives the channels between pipeline ranks from a placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.transport.torch_dist import Channel

if TYPE_CHECKING:
    from megatron_ext.runtime.program import Peers
    from megatron_ext.schedules.table.placement import Placement

__all__ = ["channels_of"]


def channels_of(placement: Placement, rank: int, peers: Peers) -> list[Channel]:
    """Return every channel on which this rank sends or receives under a placement."""
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
