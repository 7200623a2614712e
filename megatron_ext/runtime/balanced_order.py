"""Lets the micro-batches of a step enter the pipeline in the order of their costs.

`--pipeline-balance order`: a rank that reads data fetches all micro-batches of the step at its
beginning, computes what each costs, and hands out the file's micro-batch `order[i]` as micro-batch
i of the table. All ranks that read data see the same lengths, so they choose the same order without
a message; ranks that read none run the table as ever. The gradient is the same sum, in this order.

`--pipeline-balance pack` shares out the micro-batches of all data-parallel replicas before that
(`replica_exchange.py`). All stages of a replica compute the same shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.item_sizes import item_size
from megatron_ext.runtime.local_devices import device_of
from megatron_ext.schedules.search.length_balance import LengthCost, fills_of
from megatron_ext.schedules.search.length_order import best_order

if TYPE_CHECKING:
    from megatron_ext.runtime.replica_exchange import ReplicaExchange
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs

__all__ = ["BalancedStep", "cost_of_model", "item_cost"]


def cost_of_model(config: Any) -> LengthCost:
    """Return what a length costs in a model.

    Args:
        config: Its `TransformerConfig`.
    """
    experts = config.moe_router_topk if config.num_moe_experts else 1
    ffn = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    return LengthCost.of_model(
        config.hidden_size,
        experts * ffn + shared,
        gated=bool(config.gated_linear_unit),
        query_width=config.kv_channels * config.num_attention_heads,
        key_width=config.kv_channels * (config.num_query_groups or config.num_attention_heads),
    )


def item_cost(item: Any, cost: LengthCost) -> float:
    """Return what a micro-batch costs.

    Args:
        item: What the data iterator gives, see `item_size`.
        cost: Cost of a sample by its length.

    Raises:
        ScheduleError: The item does not say how long its samples are.
    """
    size = item_size(item)
    if size is not None:
        return cost.linear * size.tokens + cost.quadratic * size.pairs
    is_mapping = isinstance(item, Mapping) and item
    found = ", ".join(map(str, item)) if is_mapping else f"a {type(item).__name__}"
    raise ScheduleError(
        f"--pipeline-balance needs the lengths of micro-batches, from tokens or cu_seqlens of what "
        f"the data iterator gives, which is {found}; leave --pipeline-balance out"
    )


@dataclass
class BalancedStep:
    """The order of one training step on this rank."""

    schedule: Schedule
    costs: Costs
    length_cost: LengthCost
    replicas: ReplicaExchange | None = None
    """Those that share out their micro-batches; None: this replica runs what it reads."""
    order: tuple[int, ...] | None = field(default=None, init=False)
    """By micro-batch of the table: its number in the file, which counts the micro-batches of all
    `replicas`; None: no data was read so far."""
    _received: dict[int, Any] | None = field(default=None, init=False)
    """With `replicas`: what this replica runs, by number."""

    def iterator(self, items: Any) -> Iterator[Any] | None:
        """Return an iterator over a chunk's micro-batches in the order of the step.

        The first item that is asked for fetches all.

        Args:
            items: Megatron's data iterator of the chunk; None: the chunk reads no data.

        Raises:
            ScheduleError: The data come from something else.
        """
        if items is None:
            return None
        if not hasattr(items, "__next__"):
            raise ScheduleError(
                f"--pipeline-balance reads the micro-batches of a step ahead, which a "
                f"{type(items).__name__} does not allow; leave --pipeline-balance out"
            )
        return self._ordered(items)

    def _ordered(self, items: Iterator[Any]) -> Iterator[Any]:
        # Chunks of one rank read the same data.
        held = self._decided(items) if self.order is None else self._numbered(self._fetched(items))
        if self._received is not None:
            # Forward steps write into what they read, and the next chunk reads it too.
            held = {number: copy(item) for number, item in self._received.items()}
        assert self.order is not None
        for number in self.order:
            yield held.pop(number)

    def _decided(self, items: Iterator[Any]) -> dict[int, Any]:
        """Choose the micro-batches and their order; return them by number."""
        if self.replicas is None:
            held = self._numbered(self._fetched(items))
            costs = {number: item_cost(item, self.length_cost) for number, item in held.items()}
        else:
            held, costs = self._shared_out(items, self.replicas)
        numbers = sorted(held)
        places = best_order(self.schedule, [costs[number] for number in numbers], self.costs)
        self.order = tuple(numbers[place] for place in places)
        return held

    def _shared_out(
        self, items: Iterator[Any], replicas: ReplicaExchange
    ) -> tuple[dict[int, Any], dict[int, float]]:
        """Return the micro-batches of this replica, and what those of all replicas cost."""
        try:
            fetched = self._fetched(items)
            mine = [item_cost(item, self.length_cost) for item in fetched]
        except Exception:
            replicas.costs([nan] * self.schedule.num_microbatches)  # the others wait for it
            raise
        costs = replicas.costs(mine)
        fills = fills_of(self.schedule.placement)
        self._received = replicas.shared_out(self._numbered(fetched), costs, fills)
        return self._received, dict(enumerate(costs))

    def _numbered(self, fetched: Sequence[Any]) -> dict[int, Any]:
        """Return what was fetched by its number in the file."""
        if self.replicas is None:
            return dict(enumerate(fetched))
        first, step = self.replicas.rank, self.replicas.size
        return {first + step * place: item for place, item in enumerate(fetched)}

    def _fetched(self, items: Iterator[Any]) -> list[Any]:
        """Fetch the micro-batches of the step."""
        fetched: list[Any] = []
        wanted = self.schedule.num_microbatches
        try:
            while len(fetched) < wanted:
                fetched.append(next(items))  # Megatron's RerunDataIterator has no __iter__
        except StopIteration:
            raise ScheduleError(
                f"the data ended after {len(fetched)} of {wanted} micro-batches of a step; train "
                "fewer iterations, or give more data"
            ) from None
        return fetched

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Return the reports of the loss function by micro-batch of the file.

        Collective over the tensor-parallel group where there are reports: of its ranks the first
        reads data.

        Args:
            reports: By micro-batch of the table; empty on ranks without the last stage.
            tensor_parallel: That group.
            chunks: The model, on whose device the group communicates.
        """
        if not reports:
            return {}
        order = list(self.order or range(self.schedule.num_microbatches))
        if tensor_parallel.size() > 1:
            shared = torch.tensor(order, device=device_of(chunks))
            source = dist.get_process_group_ranks(tensor_parallel)[0]
            dist.broadcast(shared, source, group=tensor_parallel)
            order = shared.tolist()
        return {order[microbatch]: report for microbatch, report in reports.items()}
