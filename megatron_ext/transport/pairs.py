"""Process groups of a few ranks each, which all ranks of the job create together."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

__all__ = ["Pair", "groups_of_ranks"]

Pair = tuple[int, int]
"""Two global ranks, source and target: (0, 1) and (1, 0) have a group each."""

_Members = TypeVar("_Members", bound=tuple[int, ...])


def groups_of_ranks(
    sets: Iterable[_Members], timeout_s: float, backend: str | None = None
) -> dict[_Members, dist.ProcessGroup]:
    """Return a process group for each set of ranks. Collective over all ranks of the job.

    Unless all ranks create all groups, torch names a group by the number of groups that the calling
    rank is in. Ranks of one pipeline differ in that (embedding groups, for example), so two ranks
    on their own would wait for each other under different names, forever.

    Args:
        sets: Global ranks, this one among them; the others name the same sets.
        timeout_s: Time-out of the groups' operations.
        backend: A backend of torch.distributed; None: that of the job.

    Returns:
        The groups of `sets`, by set.
    """
    mine = sorted(set(sets))
    everybody: list[list[_Members]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, mine)
    groups = {}
    timeout = timedelta(seconds=timeout_s)
    for members in sorted({members for theirs in everybody for members in theirs}):
        group = dist.new_group(sorted(members), timeout=timeout, backend=backend)
        if members in mine:
            groups[members] = group
    return groups
