"""The ways to run one global batch: a runtime, a packing and an order.

Imports neither torch nor Megatron, as the parent of the ranks does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.schedule_harness.ops import OpTimes
from benchmarks.schedule_harness.systems import Own, Peer, System, all_systems
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules import generate
from megatron_ext.schedules.search.length_balance import (
    best_order,
    deal_out,
    num_fills,
    pack_by_cost,
    pack_in_file_order,
    shortest,
)

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind

    from .workloads import Workload

__all__ = ["UPSTREAM", "Batch", "ScaledTimes", "Way", "ways"]

UPSTREAM = "megatron-core interleaved, file order"


@dataclass(frozen=True)
class Way:
    """One line of the table."""

    name: str
    system: System
    shares: Literal["file", "pack", "repack"] = "file"
    """How a batch is shared out: as the file has it, micro-batch by micro-batch between the
    replicas (`--pipeline-balance pack`), or sample by sample into new packs."""
    orders: bool = False
    """Whether micro-batches are ordered by cost; else they stay in the order of their packs."""


def ways() -> list[Way]:
    """Return all ways; the first is what the others are compared with."""
    [upstream] = [
        system
        for system in all_systems()
        if isinstance(system, Peer) and system.schedule == "interleaved-overlap"
    ]
    static = Own("interleaved", "interleaved", {"chunks": 2}, transport="shm")
    hint = DynamicOrder(policy="hint")
    dynamic = Own("dynamic", "interleaved", {"chunks": 2}, transport="shm", dynamic=hint)
    zb_v = Own("zb-v", "zb-v", transport="shm")
    dynamic_zb_v = Own("zb-v dynamic", "zb-v", transport="shm", dynamic=hint)
    return [
        Way(UPSTREAM, upstream),
        Way("interleaved, file order", static),
        Way("interleaved, order", static, orders=True),
        Way("interleaved, pack", static, "pack", orders=True),
        Way("interleaved, repack", static, "repack"),
        Way("interleaved, repack and order", static, "repack", orders=True),
        Way("interleaved, dynamic", dynamic),
        Way("interleaved, pack and dynamic", dynamic, "pack", orders=True),
        Way("interleaved, repack, order and dynamic", dynamic, "repack", orders=True),
        Way("zb-v, file order", zb_v),
        Way("zb-v, pack", zb_v, "pack", orders=True),
        Way("zb-v, repack and order", zb_v, "repack", orders=True),
        Way("zb-v, repack, order and dynamic", dynamic_zb_v, "repack", orders=True),
    ]


@dataclass(frozen=True)
class ScaledTimes(OpTimes):
    """Ops take as long as their micro-batch costs."""

    scales: tuple[float, ...]
    """By place in the table: cost over that of the mean micro-batch in file order."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the time of one op."""
        return super().seconds(kind, stage, microbatch) * self.scales[microbatch]


@dataclass
class Batch:
    """One drawn global batch, shared out in all ways."""

    workload: Workload
    pp: int
    num_microbatches: int
    num_replicas: int
    seed: int
    pack_s: float = 0.0
    """Processor time of packing anew by cost."""
    deal_s: float = 0.0
    """Processor time of sharing out micro-batches between the replicas."""
    order_s: float = 0.0
    """Processor time of ordering one replica's micro-batches, at most."""
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the lengths and pack them."""
        self.lengths = self.workload.batch(self.num_microbatches * self.num_replicas, self.seed)
        settings = self.lengths, self.num_replicas, self.workload.max_tokens
        begin_s = time.thread_time()
        packed = pack_by_cost(*settings, self.workload.cost, num_fills(self.pp, 2))
        self.pack_s = time.thread_time() - begin_s
        cost = self.workload.cost
        file_rows = cost.of_packing(pack_in_file_order(*settings), self.lengths)
        self._unit = sum(map(sum, file_rows)) / (self.num_microbatches * self.num_replicas)
        costs = [each for turn in zip(*file_rows, strict=True) for each in turn]
        begin_s = time.thread_time()
        shares = deal_out(costs, self.num_replicas, num_fills(self.pp, 2))
        self.deal_s = time.thread_time() - begin_s
        self._rows = {
            "file": file_rows,
            "pack": [[costs[number] for number in share] for share in shares],
            "repack": cost.of_packing(packed, self.lengths),
        }

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.lengths)

    def rows(self, way: Way) -> list[tuple[float, ...]]:
        """Return by replica what its micro-batches cost, in the order in which they run.

        The unit is the mean micro-batch in file order.
        """
        rows = [tuple(cost / self._unit for cost in row) for row in self._rows[way.shares]]
        return [self._ordered(row, way) for row in rows] if way.orders else rows

    def _ordered(self, row: Sequence[float], way: Way) -> tuple[float, ...]:
        assert isinstance(way.system, Own)
        table = generate(
            way.system.schedule, self.pp, self.num_microbatches, **dict(way.system.options)
        )
        begin_s = time.thread_time()
        order = best_order(table, row)
        self.order_s = max(self.order_s, time.thread_time() - begin_s)
        return tuple(row[number] for number in order)

    def bound(self, way: Way) -> float:
        """Return the shortest possible step, in forwards of the mean micro-batch on a rank."""
        costs = [self.workload.cost.of_length(length) / self._unit for length in self.lengths]
        return shortest(costs, self.num_replicas, way.system.placement(self.pp))
