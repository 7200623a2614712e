"""The disaggregated job that this process is part of.

`role_settings.py` creates it. Patches and trainers query `current`; None: disaggregation is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.active import active
from megatron_ext.disaggregation.ranks import Place, RankMap, Role
from megatron_ext.schedules.generators.catalog import generate

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import Activations
    from megatron_ext.schedules.table.actions import Schedule


@dataclass(frozen=True)
class Job:
    """A disaggregated job, as seen from this process."""

    ranks: RankMap
    rank: int
    """Global rank of this process."""
    activations: Activations
    timeout_s: float
    """Time-out for one process waiting for another."""
    sequence_parallel: bool = False
    """Whether activations are split along the sequence over tensor-parallel ranks."""
    message_bytes: int = 1 << 20
    """Size of the largest message between stages."""
    gathers_late: bool = False
    """Whether each replica updates a shard of the weights and gathers in the next forward."""
    ends_by_itself: bool = False
    """Whether backward ranks may find that it is time to end, at any step."""

    @property
    def place(self) -> Place:
        """Role and position of this process."""
        return self.ranks.place(self.rank)

    @property
    def role(self) -> Role:
        """Whether this process runs forwards or backwards."""
        return self.place.role

    @property
    def role_rank(self) -> int:
        """Rank among the processes of the same role."""
        return self.ranks.role_rank(self.place)

    def name_of(self, rank: int | None) -> str:
        """Return the name of a global rank for error messages; None: this process."""
        rank = self.rank if rank is None else rank
        role, dp, pp, tp = self.ranks.place(rank)
        return f"{role} rank {rank} (stage {pp}, replica {dp}, shard {tp})"

    @property
    def shares_weights(self) -> bool:
        """Whether each replica sends its shard of the weights to the forward ranks of all."""
        return self.gathers_late and self.ranks.dp > 1

    @property
    def weight_partners(self) -> list[Place]:
        """Processes of the other role that exchange weights with this one, replica by replica."""
        place, ranks = self.place, self.ranks
        replicas = range(ranks.dp) if self.shares_weights else [place.dp]
        return [twin for replica in replicas for twin in ranks.twins(place._replace(dp=replica))]

    @property
    def window(self) -> int:
        """Micro-batches that a forward rank may run ahead of the backward rank of its stage."""
        # A backward rank grants one more credit with each micro-batch that it begins. That bounds
        # the messages waiting on any process: backwards of neighbouring stages are one micro-batch
        # apart, and nobody overtakes the forwards. It cannot deadlock: the credit for a micro-batch
        # depends only on earlier ones. Their messages wait in memory. With equal stages, fewer than
        # two for each stage are enough to lose no time, in either mode and for any number of
        # tensor-parallel ranks that a forward rank replaces.
        return 2 * self.ranks.pp

    @property
    def position(self) -> int:
        """Row of the table that this process runs."""
        # Down the forward stages and up the backward ones, as data flow.
        stage, pp = self.place.pp, self.ranks.pp
        return stage if self.role == "forward" else 2 * pp - 1 - stage

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table of one replica, both roles, for a number of micro-batches."""
        return generate("fbd", 2 * self.ranks.pp, num_microbatches, activations=self.activations)

    def peers(self, position: int) -> list[int]:
        """Return the global ranks in a row of the table that exchange tensors with this process.

        One rank of this replica, or all tensor-parallel ranks that a merged forward rank replaces.
        """
        pp, merged = self.ranks.pp, self.ranks.merged
        role: Role = "forward" if position < pp else "backward"
        stage = position if role == "forward" else 2 * pp - 1 - position
        shards = [self.place.tp]
        if merged and role == "forward":
            shards = [0]
        elif merged and self.role == "forward":
            shards = list(range(self.ranks.tp))
        return [self.ranks.rank(Place(role, self.place.dp, stage, tp)) for tp in shards]


def current() -> Job | None:
    """Return the job of the active configuration; None: forwards and backwards share ranks."""
    found = active()
    return None if found is None else found.job


def has_role(role: Role) -> bool:
    """Return whether this process has a given role in a disaggregated job."""
    job = current()
    return job is not None and job.role == role
