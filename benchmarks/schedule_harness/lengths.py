"""Steps of micro-batches of unequal lengths: where lengths come from, and the ways to run a batch.

General fine-tuning data: the mixture of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, table
7), which gives the share and the mean length of six kinds of examples. How lengths spread around
these means is not published: log-normal with sigma 0.8, an assumption. Long instructions: LongAlign
(Bai et al. 2024, arXiv 2401.18058) has examples of 8k to 64k tokens, LongMIT (Chen et al. 2024,
https://github.com/WowCZ/LongMIT/issues/3) nearly uniform ones of 4k to 128k. How many of them are
among general data is an assumption too: 3 %, uniform over that range.

The parent of the ranks imports this, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Literal

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.length_balance import (
    LengthCost,
    best_order,
    deal_out,
    num_fills,
    pack_by_cost,
    pack_in_file_order,
    shortest,
)

from .ops import OpTimes, Sizes, Step
from .rank import begin_together, prepare
from .systems import Own, Peer, System, all_systems

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind

__all__ = ["UPSTREAM", "WORKLOADS", "Batch", "ScaledTimes", "Way", "Workload", "measure",
           "step_time", "ways"]  # fmt: skip

UPSTREAM = "megatron-core interleaved, file order"
_KINDS = (
    (52.66, 974.0),  # general English
    (14.89, 753.3),  # code
    (3.01, 520.5),  # multilingual
    (8.14, 297.8),  # exam-like
    (21.19, 661.6),  # reasoning and tools
    (0.11, 38135.6),  # long context
)
"""Percent of the examples and their mean length in tokens."""

_SIGMA = 0.8
_LONG_SHARE = 0.03

_LLAMA_3_8B = LengthCost.of_model(4096, 14336, gated=True, query_width=4096, key_width=1024)


@dataclass(frozen=True)
class Workload:
    """Where lengths come from, and what they cost: a layer of Llama 3 8B."""

    what: str
    max_tokens: int
    """Of a micro-batch; longer samples are cut."""
    long_range: tuple[int, int] | None = None
    """Lengths of long instructions, if there are any."""
    cost: LengthCost = _LLAMA_3_8B

    @property
    def attention(self) -> float:
        """Cost of attention at the greatest length, over the rest."""
        return self.cost.quadratic * self.max_tokens / self.cost.linear

    def batch(self, num_packs: int, seed: int) -> list[int]:
        """Return the lengths of one global batch: what fills so many packs in file order."""
        drawn = random.Random(seed)
        lengths: list[int] = []
        room = 0
        while True:
            length = self._length(drawn)
            if length > room:
                if not num_packs:
                    return lengths
                num_packs -= 1
                room = self.max_tokens
            lengths.append(length)
            room -= length

    def _length(self, drawn: random.Random) -> int:
        if self.long_range is not None and drawn.random() < _LONG_SHARE:
            return min(self.max_tokens, drawn.randint(*self.long_range))
        [(_, mean)] = drawn.choices(_KINDS, [share for share, _ in _KINDS])
        length = round(drawn.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA))
        return min(self.max_tokens, max(1, length))


WORKLOADS = {
    "sft": Workload("general fine-tuning", 1 << 16),
    "long-64k": Workload("3 % of 8k to 64k tokens among them", 1 << 16, (1 << 13, 1 << 16)),
    "long-128k": Workload("3 % of 4k to 128k tokens among them", 1 << 17, (1 << 12, 1 << 17)),
}


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


def step_time(system: System, pp: int, scales: Sequence[float]) -> float:
    """Return the makespan of one replica.

    Megatron's interleaved schedule counts as our table of the same order, which lacks its extra
    warm-up for overlapped messages: here they take no time.

    Args:
        system: The runtime and its schedule.
        pp: Ranks of the pipeline.
        scales: What each micro-batch costs, in the order in which they run.
    """
    costs = Costs(microbatch_scale=tuple(scales))
    if not isinstance(system, Own):
        return simulate(generate("interleaved", pp, len(scales), chunks=2), costs).makespan
    pipeline = system.pipeline(pp, len(scales))
    if pipeline.dynamic is None:
        return simulate(pipeline.full, costs).makespan
    return simulate_dynamic(
        pipeline.full, lambda rank: pipeline.policy(len(scales), rank), costs
    ).makespan


def measure(system: System, sizes: Sizes, rows: Sequence[tuple[float, ...]]) -> list[Step]:
    """Return what this rank recorded in one step for each row of scales."""
    step, probe = prepare(system, sizes)
    share = system.share(sizes.pp)

    def take(row: tuple[float, ...]) -> Step:
        probe.times = ScaledTimes(sizes.forward_s, share, row)
        begin_together()
        begin_s = time.perf_counter()
        step()
        return Step(begin_s, time.perf_counter(), *probe.take(), 0.0)

    for _ in range(sizes.warmup):
        take((0.2,) * sizes.num_microbatches)
    records = [take(row) for row in rows]
    begin_together()
    return records
