"""The table that this rank runs, and the check that all ranks run the same one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.queues import MessageOrder, check_queues
from megatron_ext.schedules.table.communication import (
    Exchange,
    Transfer,
    exchanges,
    reduction_order,
)
from megatron_ext.schedules.table.forward_only import forward_only, slots_for_forward
from megatron_ext.schedules.table.route_plan import most_hops
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.table.actions import Action, Schedule
    from megatron_ext.schedules.table.memory import Edge
    from megatron_ext.schedules.table.route_plan import Route

__all__ = ["Table", "check_agreement", "make_table"]


@dataclass(frozen=True)
class Table:
    """One rank's view of a validated schedule."""

    schedule: Schedule
    rank: int
    """Pipeline rank of this process."""
    slots: int
    """Most messages in flight on one edge; with this many slots no send blocks."""

    window: int | None = None
    """Disaggregated tables only: how many micro-batches forwards may run ahead (`exchanges`)."""

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """This rank's actions with their transfers, in table order."""
        return exchanges(self.schedule, self.rank, self.window)

    @cached_property
    def positions(self) -> Mapping[Action, int]:
        """Index of each of this rank's actions in table order."""
        return {action: index for index, action in enumerate(self.schedule.rows[self.rank])}

    @cached_property
    def actions_by_stage(self) -> Counter[int]:
        """Number of actions that this rank runs, by stage."""
        return Counter(action.stage for action in self.schedule.rows[self.rank])

    @cached_property
    def arrivals(self) -> tuple[Transfer, ...]:
        """The messages that this rank receives, per source in sending order."""
        return tuple(
            Transfer("RECV", sent.message, rank, sent.to_twin)
            for rank in range(self.schedule.placement.num_ranks)
            for exchange in exchanges(self.schedule, rank, self.window)
            for sent in (*exchange.grants, *exchange.outputs)
            if sent.verb == "SEND" and sent.peer == self.rank
        )

    @cached_property
    def order(self) -> MessageOrder:
        """The message order that all ranks share."""
        return MessageOrder(self.schedule)

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """This rank's stages in the order in which the table completes them."""
        return reduction_order(self.schedule.rows[self.rank])

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages with W actions."""
        return frozenset(a.stage for a in self.schedule.rows[self.rank] if a.kind == "W")

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs with a W. A stage may have split and whole backwards."""
        return frozenset(
            (a.stage, a.microbatch) for a in self.schedule.rows[self.rank] if a.kind == "W"
        )

    @cached_property
    def max_live(self) -> int:
        """Peak number of this rank's forwards whose backward has not run."""
        live = peak = 0
        for action in self.schedule.rows[self.rank]:
            live += {"F": 1, "R": 1, "W": 0}.get(action.kind, -1)
            peak = max(peak, live)
        return peak


def make_table(
    pipeline: Pipeline,
    num_microbatches: int,
    rank: int,
    *,
    backward: bool,
    routes: tuple[Route, ...] = (),
) -> Table:
    """Generate and validate the table for a number of micro-batches.

    Args:
        pipeline: The configured pipeline.
        num_microbatches: Micro-batches per step.
        rank: Pipeline rank of this process.
        backward: Whether to train; otherwise the table has forwards only.
        routes: The model's routes.

    Raises:
        ScheduleError: The schedule cannot run this number of micro-batches.
    """
    if not backward:
        placement = pipeline.placement
        schedule = forward_only(placement, num_microbatches)
        # Nothing bounds what routes have under way but the number of micro-batches.
        slots = slots_for_forward(schedule) + num_microbatches * most_hops(routes, placement)
        return Table(replace(schedule, routes=routes), rank, slots)
    schedule = replace(pipeline.schedule(num_microbatches), routes=routes)
    if pipeline.transport == "torch":  # may be the first step with this number
        check_queues(schedule)
    return Table(schedule, rank, _most_on_an_edge(validate(schedule).slots))


def _most_on_an_edge(slots: Mapping[Edge, int]) -> int:
    """Return the most messages in flight from one rank to another, per direction of data flow."""
    by_pair: Counter[tuple[int, int, bool]] = Counter()
    for (source, target, kind), count in slots.items():
        by_pair[source, target, kind in ("F", "P")] += count
    return max(by_pair.values(), default=1)


def check_agreement(
    table: Table, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Check that all ranks of all groups run the same table. Collective over each group.

    Raises:
        ScheduleError: Tables differ in a group. Every rank of that group raises it.
    """
    mine = torch.tensor([int(table.schedule.digest[:15], 16)], device=device)
    for group in groups:
        others = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(others, mine, group=group)
        ranks = dist.get_process_group_ranks(group)
        different = [r for r, other in zip(ranks, others, strict=True) if other != mine]
        if different:
            raise ScheduleError(
                f"rank {dist.get_rank()} made another table for {table.schedule.label} than ranks "
                f"{', '.join(map(str, different))}; give all ranks the same flags, the same "
                "megatron_ext and the same number of micro-batches"
            )
