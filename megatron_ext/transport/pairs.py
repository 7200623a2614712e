"""Process groups of two ranks each, which all ranks of the job create together."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Pair", "groups_of_pairs"]

Pair = tuple[int, int]
"""Two global ranks, source and target: (0, 1) and (1, 0) have a group each."""


def groups_of_pairs(pairs: Iterable[Pair], timeout_s: float) -> dict[Pair, dist.ProcessGroup]:
    """Return a process group for each pair. Collective over all ranks of the job.

    Unless all ranks create all groups, torch names a group by the number of groups that the calling
    rank is in. Ranks of one pipeline differ in that (embedding groups, for example), so two ranks
    on their own would wait for each other under different names, forever.

    Args:
        pairs: Pairs that contain this rank; the other rank names them too.
        timeout_s: Time-out of the groups' operations.

    Returns:
        The groups of `pairs`, by pair.
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
