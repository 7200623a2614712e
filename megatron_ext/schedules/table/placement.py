"""Placements: which rank holds each stage of the model.

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

Hop = Literal["local", "rank", "twin"]
"""Where a stage's output goes: it stays on the same rank or goes to another rank or the twin."""

Routing = Literal["twin", "local"]


@dataclass(frozen=True)
class Placement:
    """An assignment of stages to the ranks in one pipeline.

    With `twins == 2`, there is a mirrored copy of the pipeline. Rank r and its twin hold the same
    stages, so they are data-parallel peers, and each pipeline runs half of the micro-batches.
    `twin_hops` are the stages whose output goes to the next stage on the twin instead of on the
    same rank. By symmetry, the twin's output goes to this rank.
    """

    name: str
    num_ranks: int
    rank_of: tuple[int, ...]
    """By stage: its rank."""
    twins: int = 1
    twin_hops: frozenset[int] = frozenset()
    backward_rank_of: tuple[int, ...] | None = None
    """By stage: the rank that runs its backward passes. None if forward passes run on the same
    rank."""

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is split into."""
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """By rank: its stages, in ascending order. The position is the chunk number."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        # With separate roles, a second rank holds every stage for its backward passes.
        for stage, rank in enumerate(self.backward_rank_of or ()):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def rank_for(self, stage: int, kind: str) -> int:
        """Return the rank that runs a given kind of action on a stage."""
        if kind == "F" or self.backward_rank_of is None:
            return self.rank_of[stage]
        return self.backward_rank_of[stage]

    def source(self, stage: int, kind: str) -> int | None:
        """Return the stage whose tensor an action on a given stage needs.

        Activations go to higher stages and gradients to lower stages. None means that the action
        reads data, the loss or, as W does, only results from its own stage.
        """
        if kind == "W":
            return None
        needs_activation = kind in ("F", "R")
        source = stage - 1 if needs_activation else stage + 1
        if not 0 <= source < self.num_stages:
            return None
        return source

    def target(self, stage: int, kind: str) -> int | None:
        """Return the stage that needs an action's output tensor, or None if no stage does."""
        if kind in ("W", "R"):
            return None
        target = stage + 1 if kind == "F" else stage - 1
        if not 0 <= target < self.num_stages:
            return None
        return target

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """By stage: the hop to the next stage. The last stage has no entry."""
        hops: list[Hop] = []
        for stage in range(self.num_stages - 1):
            if stage in self.twin_hops:
                hops.append("twin")
            elif self.rank_of[stage] == self.rank_of[stage + 1]:
                hops.append("local")
            else:
                hops.append("rank")
        return tuple(hops)

    def is_crossed(self, stage: int) -> bool:
        """Return whether a stage runs micro-batches that started on the twin."""
        # Every twin hop switches to the other twin, so two of them lead back.
        num_hops = sum(hop < stage for hop in self.twin_hops)
        return num_hops % 2 == 1

    def chunk_of(self, stage: int) -> int:
        """Return a stage's chunk number on its rank."""
        rank = self.rank_of[stage]
        return self.stages_of[rank].index(stage)


def linear(num_ranks: int) -> Placement:
    """Return the placement with stage r on rank r."""
    rank_of = tuple(range(num_ranks))
    return Placement("linear", num_ranks, rank_of)


def loop(num_ranks: int, num_chunks: int) -> Placement:
    """Return Megatron's interleaved placement: round-robin, with `num_chunks` stages per rank."""
    rank_of = tuple(range(num_ranks)) * num_chunks
    return Placement("loop", num_ranks, rank_of)


def v(num_ranks: int) -> Placement:
    """Return the placement that goes from the first rank to the last and back."""
    down = tuple(range(num_ranks))
    back = down[::-1]
    return Placement("v", num_ranks, down + back)


def w(num_ranks: int) -> Placement:
    """Return the placement that runs two `v` in sequence."""
    down = tuple(range(num_ranks))
    back = down[::-1]
    return Placement("w", num_ranks, 2 * (down + back))


def roles(num_ranks: int) -> Placement:
    """Return the placement with forward ranks in the first half and backward ranks in the second.

    Backward ranks hold the stages in reverse, so micro-batches go down the ranks and back up.
    """
    down = tuple(range(num_ranks // 2))
    back = tuple(num_ranks - 1 - stage for stage in down)
    return Placement("roles", num_ranks, down, backward_rank_of=back)


def mirrored(placement: Placement, routing: Routing) -> Placement:
    """Return a folded placement (v or w) with its twin.

    With `routing="twin"`, activations cross to the twin at the inner folds, where consecutive
    stages share a rank, because a literal bidirectional pipeline would go straight on there. With
    `"local"`, activations stay on their rank, which saves these messages.
    """
    num_ranks = placement.num_ranks
    twin_hops = frozenset[int]()
    if routing == "twin":
        # This excludes the fold between the two v in a w. That fold is at the outer
        # end, where a literal pipeline turns around as well.
        first_fold = num_ranks - 1
        last_stage = placement.num_stages - 1
        twin_hops = frozenset(range(first_fold, last_stage, 2 * num_ranks))
    return Placement(
        placement.name,
        num_ranks,
        placement.rank_of,
        twins=2,
        twin_hops=twin_hops,
    )


def recognised(rank_of: tuple[int, ...], num_ranks: int) -> Placement:
    """Return the placement for a table loaded from a file, under its usual name if it has one."""
    num_chunks, remainder = divmod(len(rank_of), num_ranks)
    # Other code recognises folded tables by the names v and w, so tables loaded from
    # files need them.
    candidates = [v(num_ranks), w(num_ranks)]
    if remainder == 0:
        # A loop with one chunk is linear.
        if num_chunks > 1:
            candidates.append(loop(num_ranks, num_chunks))
        else:
            candidates.append(linear(num_ranks))
    for placement in candidates:
        if placement.rank_of == rank_of:
            return placement
    return Placement("custom", num_ranks, rank_of)
