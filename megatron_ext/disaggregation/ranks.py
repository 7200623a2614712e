"""Maps the rank of a process in a disaggregated job to its role and position.

Tensor-parallel ranks are innermost, then the two roles, then context-parallel ranks, data-parallel
replicas and pipeline stages. For TP 2, PP 2 and one replica:

    plain   0 1 forward, 2 3 backward of stage 0; 4 5 forward, 6 7 backward of stage 1
    merged  0 forward, 1 2 backward of stage 0; 3 forward, 4 5 backward of stage 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_ext.errors import ArgumentsError

Role = Literal["forward", "backward"]


class Place(NamedTuple):
    """Role and position of one process."""

    role: Role
    dp: int
    """Data-parallel replica, or with context parallelism the part of a sequence in it."""
    pp: int
    """Pipeline stage."""
    tp: int
    """Tensor-parallel rank; always 0 on merged forward ranks."""


@dataclass(frozen=True)
class RankMap:
    """All processes of a job, by global rank; each role also numbers its own."""

    tp: int
    """Tensor-parallel size of the backward ranks."""
    pp: int
    dp: int
    """Copies of the model that forward ranks hold, and backward ranks: data-parallel replicas times
    context-parallel ranks, which hold the same weights."""
    merged: bool = False
    """Whether one forward rank replaces all tensor-parallel ranks of its stage."""

    @property
    def num_ranks(self) -> int:
        """Processes of the whole job."""
        return self.role_size("forward") + self.role_size("backward")

    def role_tp(self, role: Role) -> int:
        """Return the tensor-parallel size of a role."""
        return 1 if self.merged and role == "forward" else self.tp

    def role_size(self, role: Role) -> int:
        """Return the number of processes with a role."""
        return self.role_tp(role) * self.pp * self.dp

    def place(self, rank: int) -> Place:
        """Return role and position of a global rank."""
        # The two roles of one part of the model are neighbours, which exchange the most; the last
        # process is a backward rank of the last stage, which logs; either role has Megatron's own
        # order.
        block, offset = divmod(rank, self.role_tp("forward") + self.tp)
        pp, dp = divmod(block, self.dp)
        if offset < self.role_tp("forward"):
            return Place("forward", dp, pp, offset)
        return Place("backward", dp, pp, offset - self.role_tp("forward"))

    def rank(self, place: Place) -> int:
        """Return the global rank of a role and position."""
        forwards = self.role_tp("forward")
        block = place.pp * self.dp + place.dp
        before = forwards if place.role == "backward" else 0
        return block * (forwards + self.tp) + before + place.tp

    def role_rank(self, place: Place) -> int:
        """Return the rank of a process among those of its role, in Megatron's own order."""
        return (place.pp * self.dp + place.dp) * self.role_tp(place.role) + place.tp

    def twins(self, place: Place) -> list[Place]:
        """Return the processes of the other role that hold the same weights, or shards of them."""
        if place.role == "backward":
            return [Place("forward", place.dp, place.pp, 0 if self.merged else place.tp)]
        shards = range(self.tp) if self.merged else [place.tp]
        return [Place("backward", place.dp, place.pp, tp) for tp in shards]


def rank_map(world_size: int, *, tp: int, pp: int, merged: bool, cp: int = 1) -> RankMap:
    """Return the map of a job with `world_size` processes, by its parallel sizes.

    Raises:
        ArgumentsError: The number of processes does not fit; the message names numbers that do.
    """
    ranks_of_replica = (tp + 1 if merged else 2 * tp) * pp * cp
    replicas, rest = divmod(world_size, ranks_of_replica)
    if rest or not replicas:
        rule = f"(TP + 1) x PP = ({tp} + 1) x {pp}" if merged else f"2 x TP x PP = 2 x {tp} x {pp}"
        if cp > 1:
            rule = rule.replace(" = ", " x CP = ") + f" x {cp}"
        near = [n * ranks_of_replica for n in (replicas, replicas + 1) if n]
        raise ArgumentsError(
            f"the job has {world_size} processes, but --forward-backward-disaggregating needs "
            f"{rule} = {ranks_of_replica} for each replica of the model"
            f"{'' if merged else ' (an even data-parallel size, which it halves)'}; start "
            f"{' or '.join(map(str, near))} processes, or change a parallel size"
        )
    return RankMap(tp, pp, replicas * cp, merged)
