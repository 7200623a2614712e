"""Lets the micro-batches of a step enter the pipeline in the order of their costs.

`--pipeline-balance order`: a rank that reads data fetches all micro-batches of the step at its
beginning, computes what each costs, and hands out the file's micro-batch `order[i]` as micro-batch
i of the table. All ranks that read data see the same lengths, so they choose the same order without
a message; ranks that read none run the table as ever. The gradient is the same sum, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.runtime.local_devices import device_of
from megatron_ext.schedules.search.length_balance import LengthCost
from megatron_ext.schedules.search.length_order import best_order

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Schedule
    from megatron_ext.schedules.representation.costs import Costs

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
        item: What the data iterator gives: `tokens`, `[b, s]` with any s from 0 on, or for packed
            samples `cu_seqlens` as well, where each sample begins and the last one ends.
        cost: Cost of a sample by its length.

    Raises:
        ScheduleError: The item says neither.
    """
    fields = item if isinstance(item, Mapping) else {}
    tokens, bounds = fields.get("tokens"), fields.get("cu_seqlens")
    if bounds is not None:
        begins = bounds.flatten().tolist()
        squares = sum((end - begin) ** 2 for begin, end in pairwise(begins))
        count = begins[-1] if tokens is None else tokens.numel()
        return float(cost.linear * count + cost.quadratic * squares)
    if tokens is not None:
        length = int(tokens.shape[-1])
        return tokens.numel() // length * cost.of_length(length) if length else 0.0
    found = ", ".join(map(str, fields)) if fields else f"a {type(item).__name__}"
    raise ScheduleError(
        f"--pipeline-balance order needs the lengths of micro-batches, from tokens or cu_seqlens "
        f"of what the data iterator gives, which is {found}; leave --pipeline-balance out"
    )


@dataclass
class BalancedStep:
    """The order of one training step on this rank."""

    schedule: Schedule
    costs: Costs
    length_cost: LengthCost
    order: tuple[int, ...] | None = field(default=None, init=False)
    """The micro-batch of the file by micro-batch of the table; None: no data was read so far."""

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
                f"--pipeline-balance order reads the micro-batches of a step ahead, which a "
                f"{type(items).__name__} does not allow; leave --pipeline-balance out"
            )
        return self._ordered(items)

    def _ordered(self, items: Iterator[Any]) -> Iterator[Any]:
        fetched = list(islice(items, self.schedule.num_microbatches))
        if len(fetched) < self.schedule.num_microbatches:
            raise ScheduleError(
                f"the data ended after {len(fetched)} of {self.schedule.num_microbatches} "
                "micro-batches of a step; train fewer iterations, or give more data"
            )
        if self.order is None:  # chunks of one rank read the same data
            scales = [item_cost(item, self.length_cost) for item in fetched]
            self.order = best_order(self.schedule, scales, self.costs)
        for number in self.order:
            yield fetched[number]

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
