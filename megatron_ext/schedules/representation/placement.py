"""Which rank holds which stage of the model.

| name   | stages on p ranks | stage s is on rank                        | first, last stage |
|--------|-------------------|-------------------------------------------|-------------------|
| linear | p                 | s                                         | 0, p-1            |
| loop   | v*p               | s mod p                                   | 0, p-1            |
| v      | 2p                | s on the way down, 2p-1-s on the way back | 0, 0              |
| w      | 4p                | two v in a row                            | 0, 0              |
| roles  | p/2               | s for forwards, p-1-s for backwards       | 0, p/2-1          |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_ext.errors import ScheduleError

__all__ = [
    "Hop",
    "Placement",
    "Routing",
    "linear",
    "loop",
    "mirrored",
    "recognised",
    "roles",
    "v",
    "w",
]

Hop = Literal["local", "rank", "twin"]
"""How a tensor gets from one stage to the next: not at all, to another rank, to the twin."""

Routing = Literal["twin", "local"]


@dataclass(frozen=True)
class Placement:
    """An assignment of stages to the ranks of one pipeline.

    With `twins == 2` a mirrored copy of the pipeline exists: rank r and its twin hold the same
    stages, so they are data-parallel peers, and each of the two pipelines runs half of the
    micro-batches. `twin_hops` are the stages whose output goes to the next stage on the twin
    instead of the next stage on the same rank; by symmetry the twin's comes back in exchange.
    """

    name: str
    num_ranks: int
    rank_of: tuple[int, ...]
    """Rank of each stage."""
    twins: int = 1
    twin_hops: frozenset[int] = frozenset()
    backward_rank_of: tuple[int, ...] | None = None
    """Rank of each stage's backwards, where its forwards run on another rank."""

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank in ascending order; a position in it is a chunk number."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        for stage, rank in enumerate(self.backward_rank_of or ()):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def rank_for(self, stage: int, kind: str) -> int:
        """Return the rank that runs a kind of action of a stage."""
        if kind == "F" or self.backward_rank_of is None:
            return self.rank_of[stage]
        return self.backward_rank_of[stage]

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """How the output of each stage but the last gets to the next stage."""
        return tuple(map(self._hop, range(self.num_stages - 1)))

    def _hop(self, stage: int) -> Hop:
        if stage in self.twin_hops:
            return "twin"
        return "local" if self.rank_of[stage] == self.rank_of[stage + 1] else "rank"

    def is_crossed(self, stage: int) -> bool:
        """Tell whether a stage runs the micro-batches that began on the twin."""
        return sum(hop < stage for hop in self.twin_hops) % 2 == 1

    def chunk_of(self, stage: int) -> int:
        """Return the number of a stage among those of its rank."""
        return self.stages_of[self.rank_of[stage]].index(stage)


def linear(num_ranks: int) -> Placement:
    """Return the placement of stage r on rank r."""
    return Placement("linear", num_ranks, tuple(range(num_ranks)))


def loop(num_ranks: int, num_chunks: int) -> Placement:
    """Return Megatron's interleaving: `num_chunks` times around all ranks."""
    return Placement("loop", num_ranks, tuple(range(num_ranks)) * num_chunks)


def v(num_ranks: int) -> Placement:
    """Return the placement that goes down to the last rank and back to the first."""
    down = tuple(range(num_ranks))
    return Placement("v", num_ranks, down + down[::-1])


def w(num_ranks: int) -> Placement:
    """Return the placement that goes down and back twice."""
    down = tuple(range(num_ranks))
    return Placement("w", num_ranks, (down + down[::-1]) * 2)


def roles(num_ranks: int) -> Placement:
    """Return the placement of forwards on the first half of the ranks and of backwards on the rest.

    Backward ranks are those of the last to the first stage, so a micro-batch goes down and back.
    """
    down = tuple(range(num_ranks // 2))
    back = tuple(num_ranks - 1 - stage for stage in down)
    return Placement("roles", num_ranks, down, backward_rank_of=back)


def mirrored(placement: Placement, routing: Routing) -> Placement:
    """Return a folded placement (v or w) together with its twin.

    With `routing="twin"` activations cross to the twin at the inner folds, where stages that
    follow each other are on one rank: there the literal bidirectional pipeline goes straight on.
    With `"local"` they stay, which saves these messages.
    """
    if routing not in ("twin", "local"):
        raise ScheduleError(f"routing must be twin or local, got {routing!r}")
    h = placement.num_ranks
    inner = range(h - 1, placement.num_stages - 1, 2 * h)
    hops = frozenset(inner) if routing == "twin" else frozenset[int]()
    return Placement(placement.name, h, placement.rank_of, twins=2, twin_hops=hops)


def recognised(rank_of: tuple[int, ...], num_ranks: int) -> Placement:
    """Return the placement of a table that somebody else made, under its name if it has one."""
    num_chunks, rest = divmod(len(rank_of), num_ranks)
    known = [v(num_ranks), w(num_ranks)]
    if rest == 0:
        known.append(loop(num_ranks, num_chunks) if num_chunks > 1 else linear(num_ranks))
    for placement in known:
        if placement.rank_of == rank_of:
            return placement
    return Placement("custom", num_ranks, rank_of)
