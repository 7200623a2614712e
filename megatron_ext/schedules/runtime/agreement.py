"""Which ranks have to run their actions in the same order, and who of them decides.

An action may hold a collective: of the tensor-, context- or expert-parallel ranks, or of the twins
of a mirrored pipeline that read data for each other. All ranks that are connected by such groups
follow one leader. Its choices are messages; no collective is needed for a decision.

That it ends: all ranks that follow one leader run one order, so they count as one rank. What the
leader runs was ready for it, hence made by the stage before, whose leader ran it; then the
followers of that stage run it too, and their peers here get what they wait for.
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
    """Who decides for this rank; global ranks."""

    rank: int
    """This one."""
    leader: int
    followers: tuple[int, ...] = ()
    """Those that this rank decides for, if it is the leader."""

    @property
    def channels(self) -> list[Channel]:
        """The queues of decisions that this rank has an end of."""
        sent = [Channel(self.rank, follower, "D") for follower in self.followers]
        return sent if self.leader == self.rank else [Channel(self.leader, self.rank, "D")]


def agree(*groups: dist.ProcessGroup, others: Iterable[int] = ()) -> Agreement:
    """Find the leader of this rank. Collective over all ranks of the job.

    Args:
        groups: Whose collectives actions of this rank take part in; those of experts are added.
        others: Further ranks that this one has to agree with.
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
        peers: By rank: whom it has to agree with.
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
