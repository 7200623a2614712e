"""Gain from balancing by cost if samples differ in length, by simulation.

    python benchmarks/lengths.py [--size PPxM ...] [--draws N] [--quick]

A stage takes a*L + b*L^2 for each sample in a micro-batch, with Llama 3 8B's values of a and b. All
rows of a table get the same batches, and therefore the same tokens and the same gradient. `step` is
the slowest replica's time, in forwards of the mean micro-batch on a rank, as the median of the
draws. `speed` is the tokens per second relative to Megatron's interleaved schedule in file order:
median (lowest..highest). That schedule is represented by our table with the same order, which does
not have the extra warm-up for overlapped messages, because messages take no time here.
dynamic_order.py (`microbatch-0.5`) measures what the runtime and messages add if micro-batches
differ.

Lengths. General fine-tuning data: the mixture of Llama 3 (Grattafiori et al. 2024, arXiv
2407.21783, table 7), which gives the share and the mean length of six kinds of examples. The spread
around these means is not published, so we assume a log-normal distribution with sigma 0.8. Long
instructions: LongAlign (Bai et al. 2024, arXiv 2401.18058) has examples with 8k to 64k tokens,
LongMIT (Chen et al. 2024, https://github.com/WowCZ/LongMIT/issues/3) has nearly uniform lengths
from 4k to 128k. Their share among general data is also an assumption: 3 %, uniform over that range.

The last row is a bound that no assignment of samples to replicas and micro-batches, and no order,
can beat. The cost per length is computed from the model's operations, not measured.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.command import options, ratios, size, spread
from benchmarks.harness.scenarios import simulated
from benchmarks.harness.systems import Own, ordered
from megatron_ext.features.lengths.length_balance import (
    best_order,
    deal_out,
    fills_of,
    packs_in_file_order,
    shortest,
)
from megatron_ext.schedules import Costs, generate
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.text_table import aligned

UPSTREAM = "interleaved, file order"
_KINDS = (
    (52.66, 974.0),  # general English
    (14.89, 753.3),  # code
    (3.01, 520.5),  # multilingual
    (8.14, 297.8),  # exam-like
    (21.19, 661.6),  # reasoning and tools
    (0.11, 38135.6),  # long context
)
"""Percentage of the examples and their mean length in tokens."""
_SIGMA = 0.8
_REPLICAS = 4
"""Number of pipelines that share a batch."""
_LONG_SHARE = 0.03
_COST = LengthCost.of_model(4096, 14336, gated=True, query_width=4096, key_width=1024)
"""Cost of a Llama 3 8B layer."""


@dataclass(frozen=True)
class Workload:
    """A distribution of lengths."""

    about: str
    max_tokens: int
    """Tokens per micro-batch. Longer samples are cut off."""
    long_range: tuple[int, int] | None = None
    """Range of lengths of long instructions, if there are any."""

    @property
    def attention(self) -> float:
        """Cost of attention at the maximum length, relative to all other costs."""
        return _COST.quadratic * self.max_tokens / _COST.linear

    def packs(self, number: int, seed: int) -> list[list[int]]:
        """Return the lengths in one global batch, which fills this many packs in file order."""
        return list(
            islice(packs_in_file_order(self._lengths(seed), self.max_tokens), number)
        )

    def _lengths(self, seed: int) -> Iterator[int]:
        drawn = random.Random(seed)
        while True:
            if self.long_range is not None and drawn.random() < _LONG_SHARE:
                length = drawn.randint(*self.long_range)
            else:
                [(_, mean)] = drawn.choices(_KINDS, [share for share, _ in _KINDS])
                length = round(drawn.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA))
            yield min(self.max_tokens, max(1, length))


WORKLOADS = {
    "sft": Workload("general fine-tuning", 1 << 16),
    "long-64k": Workload(
        "3 % of 8k to 64k tokens among them", 1 << 16, (1 << 13, 1 << 16)
    ),
    "long-128k": Workload(
        "3 % of 4k to 128k tokens among them", 1 << 17, (1 << 12, 1 << 17)
    ),
}


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    system: Own
    packs: bool = False
    """Whether replicas redistribute micro-batches (`--pipeline-balance pack`). Otherwise, each runs
    those that it reads."""
    orders: bool = False
    """Whether micro-batches are ordered by cost. Otherwise, they stay in the order of their
    packs."""


_STATIC = ordered("interleaved chunks=2, static")
_DYNAMIC = ordered("interleaved chunks=2, hint +1")
WAYS = {
    UPSTREAM: Way(_STATIC),
    "interleaved, order": Way(_STATIC, orders=True),
    "interleaved, pack": Way(_STATIC, packs=True, orders=True),
    "interleaved, dynamic": Way(_DYNAMIC),
    "interleaved, pack and dynamic": Way(_DYNAMIC, packs=True, orders=True),
    "zb-v, pack": Way(ordered("zb-v, static"), packs=True, orders=True),
}
"""The first one is what the others are compared with."""


class Batch:
    """One drawn global batch, distributed in all ways. Processor times are for this process."""

    def __init__(
        self,
        workload: Workload,
        pp: int,
        num_microbatches: int,
        num_replicas: int,
        seed: int,
    ) -> None:
        self.pp, self.num_replicas = pp, num_replicas
        packs = workload.packs(num_microbatches * num_replicas, seed)
        self.lengths = list(chain(*packs))
        costs = list(map(_COST.of_pack, packs))
        # Replicas take turns reading one micro-batch each.
        self._in_file = [costs[first::num_replicas] for first in range(num_replicas)]
        self._unit = sum(map(sum, self._in_file)) / (num_microbatches * num_replicas)
        begin_s = time.thread_time()
        shares = deal_out(costs, num_replicas, fills_of(_STATIC.placement(pp)))
        self.deal_s = time.thread_time() - begin_s
        self.order_s = 0.0
        """Longest time needed to order one replica's micro-batches."""
        self._packed = [[costs[number] for number in share] for share in shares]

    def rows(self, way: Way) -> list[tuple[float, ...]]:
        """Return, for each replica, the costs of its micro-batches in the order in which they run.

        The unit is the mean micro-batch in file order.
        """
        costs_by_replica = self._packed if way.packs else self._in_file
        rows = [tuple(cost / self._unit for cost in row) for row in costs_by_replica]
        if not way.orders:
            return rows
        config = way.system.config
        assert config.schedule is not None
        table = generate(config.schedule, self.pp, len(rows[0]), config.chunks)
        for number, row in enumerate(rows):
            begin_s = time.thread_time()
            order = best_order(table, row)
            self.order_s = max(self.order_s, time.thread_time() - begin_s)
            rows[number] = tuple(row[place] for place in order)
        return rows

    def step(self, way: Way) -> float:
        """Return the slowest replica's time, in forwards of the mean micro-batch."""
        makespans = []
        for row in self.rows(way):
            costs = Costs(microbatch_scale=row)
            makespans.append(simulated(way.system, self.pp, len(row), costs).makespan)
        return max(makespans)

    def bound(self) -> float:
        """Return the shortest possible step under the first way."""
        costs = [_COST.of_length(length) / self._unit for length in self.lengths]
        return shortest(costs, self.num_replicas, _STATIC.placement(self.pp))


def text_of(
    name: str, batches: Sequence[Batch], steps: Mapping[str, Sequence[float]]
) -> str:
    """Return all ways at one size and workload as a table with a heading."""
    workload = WORKLOADS[name]
    reference = steps[UPSTREAM]
    rows = [("", "step", "speed")]
    rows += [
        (
            way,
            f"{statistics.median(steps_of_way):.1f}",
            spread(ratios(reference, steps_of_way), 2),
        )
        for way, steps_of_way in steps.items()
    ]
    samples = statistics.median(len(batch.lengths) for batch in batches)
    tokens = statistics.median(sum(batch.lengths) for batch in batches)
    deal_ms = 1e3 * max(batch.deal_s for batch in batches)
    order_ms = 1e3 * max(batch.order_s for batch in batches)
    return (
        f"{name} ({workload.about}): pp {batches[0].pp}, micro-batches of at most "
        f"{workload.max_tokens} tokens, attention at that length {workload.attention:.1f} of the "
        f"rest, {samples:.0f} samples and {tokens:.0f} tokens in a "
        f"batch\n{aligned(rows)}\nprocessor time: share out {deal_ms:.1f} ms, order {order_ms:.1f} "
        "ms\n"
    )


def main() -> None:
    """Simulate and print the results."""
    parser = options(__doc__, "only one small size, for a test")
    add = parser.add_argument
    add("--size", nargs="+", type=size, default=[(4, 16), (8, 32)], metavar="PPxM",
        help="pipeline ranks and micro-batches (default: 4x16 8x32)")  # fmt: skip
    add("--draws", type=int, default=2, help="number of global batches per size")
    args = parser.parse_args()
    names = list(WORKLOADS)
    if args.quick:
        names, args.size, args.draws = names[-1:], [(2, 4)], 1
    for name in names:
        for pp, num_microbatches in args.size:
            batches = [
                Batch(WORKLOADS[name], pp, num_microbatches, _REPLICAS, seed)
                for seed in range(args.draws)
            ]
            steps = {}
            for label, way in WAYS.items():
                print(f"{name}, {pp}x{num_microbatches}: {label}", file=sys.stderr)
                steps[label] = [batch.step(way) for batch in batches]
            steps["bound"] = [batch.bound() for batch in batches]
            print(text_of(name, batches, steps), flush=True)
    print(f"simulated; {_REPLICAS} replicas, {args.draws} draws")


if __name__ == "__main__":
    main()
