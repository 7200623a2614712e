"""Runs a step's micro-batches in an order that depends on their lengths.

With `--pipeline-balance`, a rank reads all of a step's micro-batches in advance. `order` runs them
in the order that is fastest in a simulation of the table. `pack` first distributes them over the
data-parallel replicas so that all replicas have about the same amount of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_balance import best_order, fills_of
from megatron_ext.runtime.lengths import item_size

if TYPE_CHECKING:
    from megatron_ext.features.lengths.replica_exchange import ReplicaExchange
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs
    from megatron_ext.schedules.table.length_cost import LengthCost

_FLAG = "--pipeline-balance"


def item_cost(item: Any, cost: LengthCost, flag: str = _FLAG) -> float:
    """Return a micro-batch's cost, computed from an item of the data iterator.

    `flag` is the flag that requires the cost, for the error message.

    Raises:
        ScheduleError: The item does not contain its samples' lengths.
    """
    size = item_size(item)
    if size is not None:
        return cost.linear * size.tokens + cost.quadratic * size.sum_of_squares
    contents = f"a {type(item).__name__}"
    if isinstance(item, Mapping) and item:
        contents = ", ".join(str(name) for name in item)
    raise ScheduleError(
        f"{flag} requires micro-batch lengths, from tokens or cu_seqlens in the data iterator's "
        f"items, but the iterator yields {contents}; remove {flag}"
    )


def check_iterator(items: Any, flag: str = _FLAG) -> None:
    """Check that a chunk's data can be read ahead.

    Raises:
        ScheduleError: The data is not an iterator.
    """
    if not hasattr(items, "__next__"):
        raise ScheduleError(
            f"{flag} reads a step's micro-batches in advance, which a {type(items).__name__} "
            f"does not allow; remove {flag}"
        )


def fetched(
    items: Iterator[Any],
    num_microbatches: int,
    replicas: ReplicaExchange | None,
    flag: str = _FLAG,
) -> dict[int, Any]:
    """Fetch a step's micro-batches.

    Returns:
        Micro-batch number in the data -> its item. With `replicas`, micro-batches are numbered
        across all of them.

    Raises:
        ScheduleError: The data is not an iterator, or ends too early.
    """
    check_iterator(items, flag)
    held: dict[int, Any] = {}
    first = 0
    step = 1
    if replicas is not None:
        first = replicas.group.rank()
        step = replicas.group.size()
    try:
        for place in range(num_microbatches):
            # Use `next`, because Megatron's RerunDataIterator has no `__iter__`.
            held[first + step * place] = next(items)
    except StopIteration:
        raise ScheduleError(
            f"the data ended after {len(held)} of {num_microbatches} micro-batches of a step; "
            "train fewer iterations, or provide more data"
        ) from None
    return held


@dataclass
class BalancedStep:
    """The order of one training step's micro-batches on this rank.

    Micro-batch `order[i]` in the data runs as micro-batch i in the table.
    """

    schedule: Schedule
    costs: Costs
    length_cost: LengthCost
    replicas: ReplicaExchange | None = None
    """Replicas that redistribute micro-batches. If None, this replica runs the micro-batches that
    it reads."""
    order: tuple[int, ...] | None = field(default=None, init=False)
    """[micro-batch in the table] -> its number in the data, counted across all `replicas`. None
    before the data is read."""
    _received: dict[int, Any] | None = field(default=None, init=False)
    """With `replicas`: number in the data -> item, for the micro-batches that this replica runs."""

    def iterator(self, items: Any) -> Iterator[Any] | None:
        """Return an iterator over a chunk's micro-batches in the step's order.

        The first `next` fetches all items from `items`, Megatron's data iterator. Returns None if
        `items` is None.

        Raises:
            ScheduleError: The data is not an iterator.
        """
        if items is None:
            return None
        check_iterator(items)
        return self._ordered(items)

    def _ordered(self, items: Iterator[Any]) -> Iterator[Any]:
        # All chunks on a rank read the same data. The first chunk to read it determines
        # the order.
        if self.order is None:
            held = self._decided(items)
        else:
            held = self._fetched(items)
        if self._received is not None:
            # Copy the items: forward steps write to them, and the next chunk reads them
            # as well.
            held = {}
            for number, item in self._received.items():
                held[number] = copy(item)
        assert self.order is not None
        for number in self.order:
            yield held.pop(number)

    def _decided(self, items: Iterator[Any]) -> dict[int, Any]:
        """Choose the micro-batches that this replica runs and their order.

        Returns:
            Micro-batch number in the data -> its item.
        """
        # All ranks in a replica that read data see the same lengths, so they choose the
        # same order without communicating. Ranks without data use only the micro-batch
        # numbers in the table.
        replicas = self.replicas
        num_microbatches = self.schedule.num_microbatches
        try:
            held = self._fetched(items)
            costs = [item_cost(item, self.length_cost) for item in held.values()]
        except Exception:
            # The other replicas are waiting for the costs, so send them NaN instead.
            if replicas is not None:
                replicas.costs([nan] * num_microbatches)
            raise
        if replicas is not None:
            # A rank gets here when it first reads data in a step. This collective
            # cannot deadlock: in each replica, a stage's first read depends only on
            # earlier stages.
            costs = replicas.costs(costs)
            fills = fills_of(self.schedule.placement)
            held = replicas.shared_out(held, costs, fills)
            self._received = held
        numbers = sorted(held)
        own_costs = [costs[number] for number in numbers]
        places = best_order(self.schedule, own_costs, self.costs)
        self.order = tuple(numbers[place] for place in places)
        return held

    def _fetched(self, items: Iterator[Any]) -> dict[int, Any]:
        """Fetch the step's micro-batches, keyed by number in the data."""
        return fetched(items, self.schedule.num_microbatches, self.replicas)

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Return reports indexed by micro-batch in the data instead of in the table.

        Collective over the tensor-parallel group of stages that have reports, because only the
        group's first rank reads data. Communication runs on the device of the model's `chunks`.
        """
        # The ranks in a tensor-parallel group have the same stages, so either all of
        # them return here or none do.
        if not reports:
            return {}
        # A rank without data has no order. The broadcast below replaces this placeholder.
        placeholder = range(self.schedule.num_microbatches)
        order = list(self.order or placeholder)
        if tensor_parallel.size() > 1:
            shared = torch.tensor(order, device=device_of(chunks))
            source = dist.get_process_group_ranks(tensor_parallel)[0]
            dist.broadcast(shared, source, group=tensor_parallel)
            order = shared.tolist()
        report_of = {}
        for microbatch, report in reports.items():
            report_of[order[microbatch]] = report
        return report_of
