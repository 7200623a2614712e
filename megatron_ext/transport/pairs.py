"""Process groups of two ranks each, made by all ranks of the job."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Pair", "groups_of_pairs"]

Pair = tuple[int, int]
"""Two global ranks. Groups of (0, 1) and of (1, 0) are two."""


def groups_of_pairs(pairs: Iterable[Pair], timeout_s: float) -> dict[Pair, dist.ProcessGroup]:
    """Return a group for each pair. Collective over all ranks of the job, also those without one.

    torch names a group by the groups that the calling rank is in already, unless all ranks make all
    groups. Ranks of one pipeline are in different numbers of groups, those of embeddings for
    example, so two of them alone would look for each other under different names, without end.

    Args:
        pairs: Those that this rank is one of; the other one names them as well.
        timeout_s: How long the operations of the groups may last.
    """
    mine = sorted(set(pairs))
    everybody: list[list[Pair]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, mine)
    groups = {}
    for pair in sorted({pair for theirs in everybody for pair in theirs}):
        group = dist.new_group(sorted(pair), timeout=timedelta(seconds=timeout_s))
        if pair in mine:
            groups[pair] = group
    return groups
