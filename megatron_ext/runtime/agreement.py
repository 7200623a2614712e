"""Elects the leader whose action order a group of ranks follows.

An action may contain a collective over tensor-, context- or expert-parallel ranks, or over two
twins of mirrored pipelines that read data for each other. All ranks that share such groups,
directly or through other ranks, follow one leader. The leader sends its choices as messages; a
decision needs no collective.

Why this cannot deadlock: ranks with one leader run one order, so they count as one rank. The leader
only runs an action whose inputs have arrived, so the leader of the previous stage has run the
action that produced them. Its followers run that action too, and their peers in this stage get
their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.transport.torch_dist import Channel

__all__ = ["Agreement", "agree", "leaders"]


@dataclass(frozen=True)
class Agreement:
    """The leader and the followers of this rank, as global ranks."""

    rank: int
    """This process."""
    leader: int
    followers: tuple[int, ...] = ()
    """Ranks that follow this one; empty unless it leads."""

    @property
    def channels(self) -> list[Channel]:
        """The channels on which this rank sends or receives decisions."""
        sent = [Channel(self.rank, follower, "D") for follower in self.followers]
        return sent if self.leader == self.rank else [Channel(self.leader, self.rank, "D")]


def agree(*groups: dist.ProcessGroup, others: Iterable[int] = ()) -> Agreement:
    """Find the leader of this rank. Collective over all ranks of the job.

    Args:
        groups: Groups whose collectives run inside this rank's actions. Expert groups are added.
        others: Further global ranks that must run the same order.
    """
    experts = (
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
    )
    peers = {dist.get_rank(), *others}
    for group in (*groups, *experts):
        if group is not None:
            peers.update(dist.get_process_group_ranks(group))
    everybody: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, peers)
    leader_of = leaders(everybody)
    me = dist.get_rank()
    mine = (rank for rank, leader in enumerate(leader_of) if leader == me != rank)
    return Agreement(me, leader_of[me], tuple(mine))


def leaders(peers: Sequence[Iterable[int]]) -> list[int]:
    """Return the lowest rank of each rank's connected component.

    Args:
        peers: By rank, the ranks that must run the same order.
    """
    leader = list(range(len(peers)))

    def root(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for rank, others in enumerate(peers):
        for other in others:
            low, high = sorted((root(rank), root(other)))
            leader[high] = low
    return [root(rank) for rank in range(len(peers))]
