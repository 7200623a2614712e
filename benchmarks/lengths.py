"""Gain of balancing by cost where samples differ in length, by simulation.

    python benchmarks/lengths.py [--size PPxM ...] [--draws N] [--quick]

A stage takes a*L + b*L^2 for each sample of a micro-batch, with the a and b of Llama 3 8B. All rows
of a table get the same batches, so the same tokens and the same gradient. `step` is the time of the
slowest replica, in forwards of the mean micro-batch on a rank, the median of the draws. `speed` is
the tokens per second relative to Megatron's interleaved schedule in file order: median
(lowest..highest). That schedule is represented by our table of the same order, which lacks the
extra warm-up for overlapped messages, because messages take no time here. dynamic_order.py
(`microbatch-0.5`) measures what runtime and messages add if micro-batches differ.

Lengths. General fine-tuning data: the mixture of Llama 3 (Grattafiori et al. 2024, arXiv
2407.21783, table 7), which gives the share and the mean length of six kinds of examples. How
lengths spread around these means is not published: log-normal with sigma 0.8, an assumption. Long
instructions: LongAlign (Bai et al. 2024, arXiv 2401.18058) has examples of 8k to 64k tokens,
LongMIT (Chen et al. 2024, https://github.com/WowCZ/LongMIT/issues/3) nearly uniform ones of 4k to
128k. How many of them are among general data is an assumption too: 3 %, uniform over that range.

The last row is a bound that no assignment of samples to replicas and micro-batches, and no order,
can beat. The cost of a length is computed from the model's operations, not measured.
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
from megatron_ext.tools.text_table import aligned

UPSTREAM = "interleaved, file order"
_KINDS = (
    (52.66, 974.0),  # general English
    (14.89, 753.3),  # code
    (3.01, 520.5),  # multilingual
    (8.14, 297.8),  # exam-like
    (21.19, 661.6),  # reasoning and tools
    (0.11, 38135.6),  # long context
)
"""Percentage of the examples, and their mean length in tokens."""
_SIGMA = 0.8
_REPLICAS = 4
"""Number of pipelines that share a batch."""
_LONG_SHARE = 0.03
_COST = LengthCost.of_model(4096, 14336, gated=True, query_width=4096, key_width=1024)
"""Cost of a layer of Llama 3 8B."""


@dataclass(frozen=True)
class Workload:
    """A distribution of lengths."""

    about: str
    max_tokens: int
    """Tokens in a micro-batch; longer samples are cut."""
    long_range: tuple[int, int] | None = None
    """Range of the lengths of long instructions, if any."""

    @property
    def attention(self) -> float:
        """Cost of attention at the greatest length, relative to the other cost."""
        return _COST.quadratic * self.max_tokens / _COST.linear

    def packs(self, number: int, seed: int) -> list[list[int]]:
        """Return the lengths of one global batch, which fills this many packs in file order."""
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
    """Whether replicas redistribute micro-batches (`--pipeline-balance pack`); otherwise they run
    those they read."""
    orders: bool = False
    """Whether micro-batches are ordered by cost; otherwise they stay in the order of their
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
"""The others are compared with the first one."""


class Batch:
    """One drawn global batch, distributed in all ways; processor times are this process's."""

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
        # Replicas take turns to read one micro-batch each.
        self._in_file = [costs[first::num_replicas] for first in range(num_replicas)]
        self._unit = sum(map(sum, self._in_file)) / (num_microbatches * num_replicas)
        begin_s = time.thread_time()
        shares = deal_out(costs, num_replicas, fills_of(_STATIC.placement(pp)))
        self.deal_s = time.thread_time() - begin_s
        self.order_s = 0.0
        """Longest time to order one replica's micro-batches."""
        self._packed = [[costs[number] for number in share] for share in shares]

    def rows(self, way: Way) -> list[tuple[float, ...]]:
        """Return, by replica, the costs of its micro-batches in the order in which they run.

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
        """Return the time of the slowest replica, in forwards of the mean micro-batch."""
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
    """Return all ways at one size and workload as a table, with its heading."""
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
        f"rest, {samples:.0f} samples and {tokens:.0f} tokens in a batch\n{aligned(rows)}\n"
        f"processor time: share out {deal_ms:.1f} ms, order {order_ms:.1f} ms\n"
    )


def main() -> None:
    """Simulate and print."""
    parser = options(__doc__, "one small size, as a test")
    add = parser.add_argument
    add("--size", nargs="+", type=size, default=[(4, 16), (8, 32)], metavar="PPxM",
        help="ranks of a pipeline and its micro-batches (default: 4x16 8x32)")  # fmt: skip
    add("--draws", type=int, default=2, help="global batches of each size")
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
