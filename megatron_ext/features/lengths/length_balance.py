"""Distributes a global batch by the cost of its samples, so that all pipelines end together.

Attention is quadratic in the length L of a sample, and everything else is linear, so a sample costs
a*L + b*L^2. Packs with the same number of tokens therefore differ in cost, and a pipeline waits for
its costliest micro-batch in every stage. Only the place where a sample runs changes: the global
batch and the terms of its gradient stay the same. `deal_out` distributes micro-batches, whose
samples stay together. `best_order` chooses the order in which a pipeline runs its unequal
micro-batches.

Everything here is deterministic and depends only on the lengths, so ranks that know them agree
without a message. This module uses only the standard library.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement


def fills_of(placement: Placement) -> float:
    """Return how many whole micro-batches a pipeline takes to fill and drain: (pp - 1) / v."""
    return (placement.num_ranks - 1) * placement.num_ranks / placement.num_stages


def deal_out(
    costs: Sequence[float], num_replicas: int, fills: float = 0.0
) -> list[list[int]]:
    """Return which micro-batches of a step each replica runs; all replicas get equally many.

    The costliest replica never costs more than in the order of the data. The cost of a replica is
    the sum over its micro-batches, plus `fills` times its costliest one: the makespan, in any
    order, of a flow shop whose jobs take equally long on all machines (Pinedo, Scheduling, 2016,
    section 6.1). Micro-batches are dealt out costliest first (Graham 1969), each to the cheapest
    share that has room. Each replica then takes a share of which it has already read a large part.

    Args:
        costs: Cost of each micro-batch, in the order of the data. Replica r reads the micro-batches
            whose number is r modulo `num_replicas`.
        num_replicas: Data-parallel replicas.
        fills: How many micro-batches the pipeline takes to fill and drain; see `fills_of`.

    Returns:
        By replica: the numbers of its micro-batches, ascending.

    Raises:
        ScheduleError: The micro-batches cannot be divided equally.
    """
    share_size, remainder = divmod(len(costs), num_replicas)
    if remainder:
        raise ScheduleError(
            f"{len(costs)} micro-batches cannot be shared equally by {num_replicas} replicas; give "
            "each replica the same number"
        )

    def costliest(shares: list[list[int]]) -> float:
        """Return the cost of the costliest replica."""
        replica_costs = []
        for share in shares:
            share_costs = [costs[number] for number in share]
            if share_costs:
                replica_costs.append(fsum(share_costs) + fills * max(share_costs))
        return max(replica_costs, default=0.0)

    in_file_order = [
        list(range(first, len(costs), num_replicas)) for first in range(num_replicas)
    ]
    dealt = _dealt(costs, num_replicas, share_size)
    # If both are equal, keep the order of the data, which moves nothing.
    shares = min(in_file_order, dealt, key=costliest)
    return _assigned(shares)


def _dealt(
    costs: Sequence[float], num_replicas: int, share_size: int
) -> list[list[int]]:
    """Deal out micro-batches, costliest first, each to the cheapest share that has room."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    # Heap of (cost, share), without full shares.
    cheapest = [(0.0, share) for share in range(num_replicas)]
    for number in sorted(
        range(len(costs)), key=lambda number: (-costs[number], number)
    ):
        cost, share = heapq.heappop(cheapest)
        shares[share].append(number)
        if len(shares[share]) < share_size:
            heapq.heappush(cheapest, (cost + costs[number], share))
    return shares


def _assigned(shares: list[list[int]]) -> list[list[int]]:
    """Return the shares by replica; each share goes to the replica that has read most of it."""
    num_replicas = len(shares)
    has_read: Counter[tuple[int, int]] = Counter()
    for index, share in enumerate(shares):
        for number in share:
            has_read[number % num_replicas, index] += 1
    share_of: dict[int, int] = {}
    free_shares = dict.fromkeys(range(num_replicas))
    for replica, index in sorted(has_read, key=lambda pair: (-has_read[pair], pair)):
        if replica not in share_of and index in free_shares:
            share_of[replica] = index
            del free_shares[index]
    # Replicas that got no share this way take the remaining ones, in order.
    remaining = iter(free_shares)
    assigned = []
    for replica in range(num_replicas):
        index = share_of[replica] if replica in share_of else next(remaining)
        assigned.append(sorted(shares[index]))
    return assigned


def packs_in_file_order(lengths: Iterable[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the lengths in each micro-batch of a sampler that reads samples in order.

    Each sample goes into the open pack; the first sample that does not fit starts a new one.

    Raises:
        ScheduleError: A sample does not fit into a micro-batch, or has no tokens.
    """
    pack: list[int] = []
    room = max_tokens
    for length in lengths:
        if length < 1:
            raise ScheduleError(
                f"a sample has {length} tokens; leave out samples without any"
            )
        if length > max_tokens:
            raise ScheduleError(
                f"a sample has {length} tokens, a micro-batch holds at most {max_tokens}; cut the "
                "sample, or raise the limit"
            )
        if length > room:
            yield pack
            pack, room = [], max_tokens
        pack.append(length)
        room -= length
    if pack:
        yield pack


def shortest(
    sample_costs: Sequence[float],
    num_replicas: int,
    placement: Placement,
    costs: Costs = UNIT,
) -> float:
    """Return a lower bound on the step time for any packing and order, in the unit of `costs`.

    Some replica has at least the mean of all work. Each rank waits until its first micro-batch,
    which holds at least the smallest sample, has passed the stages before it. And the longest
    sample goes through all stages, and its gradient comes back.

    `costs` are durations for a sample of cost 1.
    """
    stage_share = (
        placement.num_ranks / placement.num_stages
    )  # one stage's part of a rank's work
    last_head = max(min(stages) for stages in placement.stages_of)
    fill = last_head * stage_share * costs.forward * min(sample_costs)
    mean = costs.work * sum(sample_costs) / num_replicas
    hops = sum(hop != "local" for hop in placement.hops)
    longest = placement.num_ranks * (costs.forward + costs.input) * max(sample_costs)
    return max(mean + fill, longest + 2 * hops * costs.latency)


# Number of small micro-batches that fill the pipeline before the largest ones.
_FEW = 3


def best_order(
    schedule: Schedule, scales: Sequence[float], costs: Costs = UNIT
) -> tuple[int, ...]:
    """Return which micro-batch of the data runs in each place of a table.

    Equal micro-batches stay in the order of the data.

    `scales` are the costs of the micro-batches in the order of the data, in any unit; `costs` are
    durations at scale 1.

    Raises:
        ScheduleError: The number of scales differs from the table's number of micro-batches.
    """
    in_file_order = tuple(range(len(scales)))
    if len(set(scales)) <= 1:
        return in_file_order
    largest = max(scales)
    shares = [scale / largest for scale in scales]
    # Ranks wait for each other's micro-batches mainly while the pipeline fills and drains, so small
    # ones belong at both ends. The best order depends on the table, so simulate a few, including
    # the order of the data, which the result can then never be slower than.
    rising = sorted(range(len(shares)), key=lambda number: (shares[number], number))
    candidates = (
        in_file_order,
        tuple(
            rising[::2] + rising[1::2][::-1]
        ),  # small at both ends, the largest in the middle
        tuple(rising),
        tuple(rising[:1] + rising[:0:-1]),
        tuple(rising[:_FEW] + rising[: _FEW - 1 : -1]),
    )
    # Not a set, so that on every rank the first of equally fast orders wins.
    return min(
        dict.fromkeys(candidates),
        key=lambda order: makespan_of(schedule, shares, order, costs),
    )


def makespan_of(
    schedule: Schedule,
    scales: Sequence[float],
    order: Sequence[int],
    costs: Costs = UNIT,
) -> float:
    """Return the time of a step whose micro-batches enter the pipeline in a given order.

    `order` gives the number of the micro-batch in each place; `costs` are durations at scale 1.
    """
    placed = tuple(scales[number] for number in order)
    return simulate(schedule, replace(costs, microbatch_scale=placed)).makespan
