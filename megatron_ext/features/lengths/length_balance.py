"""Distributes a global batch by sample cost, so that all pipelines finish together.

Attention is quadratic in a sample's length L and all other computation is linear, so a sample costs
a*L + b*L^2. Packs with the same number of tokens therefore differ in cost, and at every stage a
pipeline waits for its costliest micro-batch. `deal_out` distributes micro-batches over replicas
while keeping each micro-batch's samples together. `best_order` chooses the order in which a
pipeline runs its micro-batches. Only the place where a sample runs changes: the global batch and
the terms in its gradient stay the same.

All results are deterministic and depend only on the lengths, so ranks that know the lengths agree
without communicating. This module uses only the standard library.
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
    """Return the time to fill and drain a pipeline, in whole micro-batches: (pp - 1) / chunks."""
    num_ranks = placement.num_ranks
    return (num_ranks - 1) * num_ranks / placement.num_stages


def deal_out(
    costs: Sequence[float],
    num_replicas: int,
    fills: float = 0.0,
) -> list[list[int]]:
    """Distribute a step's micro-batches over replicas, giving each the same number.

    A replica's cost is the sum over its micro-batches plus `fills` times the costliest one. This is
    the makespan, in any order, of a flow shop in which every job takes equally long on all machines
    (Pinedo, Scheduling, 2016, section 6.1). The costliest replica never costs more than it would in
    data order.

    Micro-batches are dealt out in descending order of cost (Graham 1969), each to the cheapest
    share that has room. Each replica then takes a share that it has already largely read.

    Args:
        costs: Cost of each micro-batch, in data order. Replica r reads the micro-batches whose
            numbers are r modulo `num_replicas`.
        num_replicas: Number of data-parallel replicas.
        fills: Time to fill and drain the pipeline, in micro-batches; see `fills_of`.

    Returns:
        [replica] -> the numbers of its micro-batches, in ascending order.

    Raises:
        ScheduleError: The micro-batches cannot be divided equally.
    """
    share_size, remainder = divmod(len(costs), num_replicas)
    if remainder:
        raise ScheduleError(
            f"{len(costs)} micro-batches cannot be divided equally among {num_replicas} replicas; "
            "give each replica the same number"
        )

    def costliest(shares: list[list[int]]) -> float:
        """Return the cost of the costliest share."""
        replica_costs = []
        for share in shares:
            share_costs = [costs[number] for number in share]
            if share_costs:
                # Use exact sums, because rounding errors could otherwise decide between
                # distributions of equal cost.
                work = fsum(share_costs)
                fill = fills * max(share_costs)
                replica_costs.append(work + fill)
        return max(replica_costs, default=0.0)

    in_file_order = []
    for replica in range(num_replicas):
        numbers = range(replica, len(costs), num_replicas)
        in_file_order.append(list(numbers))
    dealt = _dealt(costs, num_replicas, share_size)
    # If both cost the same, `min` returns the data order, for which nothing has to be sent.
    shares = min(in_file_order, dealt, key=costliest)
    return _assigned(shares)


def _dealt(
    costs: Sequence[float],
    num_replicas: int,
    share_size: int,
) -> list[list[int]]:
    """Deal out micro-batches in descending order of cost, each to the cheapest share with room."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    # Heap of (cost, share) for the shares that are not full.
    cheapest = [(0.0, share) for share in range(num_replicas)]
    # Sort equal costs by number, so that all replicas deal out the micro-batches
    # identically.
    numbers = range(len(costs))
    costliest_first = sorted(numbers, key=lambda number: (-costs[number], number))
    for number in costliest_first:
        cost, share = heapq.heappop(cheapest)
        shares[share].append(number)
        if len(shares[share]) < share_size:
            new_cost = cost + costs[number]
            heapq.heappush(cheapest, (new_cost, share))
    return shares


def _assigned(shares: list[list[int]]) -> list[list[int]]:
    """Assign the shares to replicas such that few micro-batches have to be sent.

    Returns:
        [replica] -> the numbers of its micro-batches, in ascending order.
    """
    num_replicas = len(shares)
    # (replica, share) -> how many of the share's micro-batches the replica has read
    has_read: Counter[tuple[int, int]] = Counter()
    for index, share in enumerate(shares):
        for number in share:
            has_read[number % num_replicas, index] += 1
    # Match the largest overlaps first. This greedy rule does not always find the best assignment.
    share_of: dict[int, int] = {}
    # Use a dict as an ordered set, because all replicas must assign the shares
    # identically.
    free_shares = dict.fromkeys(range(num_replicas))
    largest_first = sorted(has_read, key=lambda key: (-has_read[key], key))
    for replica, index in largest_first:
        if replica not in share_of and index in free_shares:
            share_of[replica] = index
            del free_shares[index]
    # Replicas that have no share yet take the remaining ones, in order.
    remaining = iter(free_shares)
    assigned = []
    for replica in range(num_replicas):
        if replica in share_of:
            index = share_of[replica]
        else:
            index = next(remaining)
        assigned.append(sorted(shares[index]))
    return assigned


def packs_in_file_order(
    lengths: Iterable[int],
    max_tokens: int,
) -> Iterator[list[int]]:
    """Yield each micro-batch's sample lengths, for a sampler that reads in order.

    Each sample is added to the current pack, or starts a new one if it does not fit.

    Raises:
        ScheduleError: A sample does not fit in a micro-batch, or has no tokens.
    """
    pack: list[int] = []
    room = max_tokens
    for length in lengths:
        if length < 1:
            raise ScheduleError(f"a sample has {length} tokens; remove empty samples")
        if length > max_tokens:
            raise ScheduleError(
                f"a sample has {length} tokens, but a micro-batch has at most {max_tokens}; cut "
                "the sample, or raise the limit"
            )
        if length > room:
            yield pack
            pack = []
            room = max_tokens
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

    `costs` are durations for a sample of cost 1. The result is the larger of two bounds:
    - At least one replica has at least the mean work. In addition, every rank waits until its first
      micro-batch, which contains at least the smallest sample, has passed all earlier stages.
    - The longest sample passes through all stages, and its gradient passes back through them.
    """
    # One stage's share of a rank's work.
    stage_share = placement.num_ranks / placement.num_stages
    # The rank that starts last: its first stage has the highest number.
    last_head = max(min(stages) for stages in placement.stages_of)
    fill = last_head * stage_share * costs.forward * min(sample_costs)
    mean = costs.work * sum(sample_costs) / num_replicas
    hops = sum(hop != "local" for hop in placement.hops)
    passes = costs.forward + costs.input
    longest = placement.num_ranks * passes * max(sample_costs)
    message_time = 2 * hops * costs.latency
    return max(mean + fill, longest + message_time)


# Number of small micro-batches that fill the pipeline before the largest ones.
_FEW = 3


def best_order(
    schedule: Schedule,
    scales: Sequence[float],
    costs: Costs = UNIT,
) -> tuple[int, ...]:
    """Return, for each micro-batch in a table, the number of the data micro-batch that runs there.

    If all micro-batches cost the same, they stay in data order.

    Args:
        schedule: The table.
        scales: Micro-batch costs in data order, in any unit.
        costs: Durations at scale 1.

    Raises:
        ScheduleError: The number of scales differs from the table's number of micro-batches.
    """
    in_file_order = tuple(range(len(scales)))
    if len(set(scales)) <= 1:
        return in_file_order
    largest = max(scales)
    shares = [scale / largest for scale in scales]
    # Ranks wait for each other mainly while the pipeline fills and drains, so small
    # micro-batches should run at both ends. The best order depends on the table, so
    # simulate a few orders, including the data order, so that the result is never
    # slower than that.
    rising = sorted(in_file_order, key=lambda number: (shares[number], number))
    # Small micro-batches at both ends, the largest in the middle.
    first_half = rising[::2]
    second_half = rising[1::2]
    largest_in_middle = first_half + second_half[::-1]
    # One or a few small micro-batches, then the rest in descending order.
    one_small_first = rising[:1] + rising[:0:-1]
    few_small_first = rising[:_FEW] + rising[: _FEW - 1 : -1]
    candidates = (
        in_file_order,
        tuple(largest_in_middle),
        tuple(rising),
        tuple(one_small_first),
        tuple(few_small_first),
    )
    # Do not use a set, because the first of several equally fast orders must be the
    # same on every rank.
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
    """Return the duration of a step whose micro-batches enter the pipeline in a given order.

    `order` gives the micro-batch number at each place. `costs` are durations at scale 1.
    """
    placed_scales = tuple(scales[number] for number in order)
    scaled_costs = replace(costs, microbatch_scale=placed_scales)
    return simulate(schedule, scaled_costs).makespan
