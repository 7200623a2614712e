"""Gain of balancing by cost where samples differ in length, on emulated stages.

    python benchmarks/lengths.py [--workload NAME ...] [--size PPxM ...] [--draws N]
        [--forward-ms T] [--only TEXT ...] [--simulate] [--json FILE] [--quick]

A stage sleeps a*L + b*L^2 for each sample of a micro-batch, with a and b of Llama 3 8B. Processes
and messages are real. The replicas of a step run one after another, since a machine has few cores,
and the slowest counts. All lines of a table get the same batches, so the same tokens and the same
gradient:

    step ms    slowest replica, median of the draws
    speed      tokens per second over those of Megatron's interleaved schedule with file order:
               median of the draws (lowest .. highest)
    order      the same ratio for the orders that ran, with exact ops and free messages: without
               other load on the machine
    replay %   overhead of runtime and messages over the order that ran with the measured ops,
               median of all replicas

Lengths. General fine-tuning data: the mixture of Llama 3 (Grattafiori et al. 2024, arXiv
2407.21783, table 7), which gives the share and the mean length of six kinds of examples. How
lengths spread around these means is not published: log-normal with sigma 0.8, an assumption. Long
instructions: LongAlign (Bai et al. 2024, arXiv 2401.18058) has examples of 8k to 64k tokens,
LongMIT (Chen et al. 2024, https://github.com/WowCZ/LongMIT/issues/3) nearly uniform ones of 4k to
128k. How many of them are among general data is an assumption too: 3 %, uniform over that range.

`--simulate` computes the same table without processes: what to expect on a machine without overhead
or other load. The last line is what no assignment of samples to replicas and micro-batches, and no
order of theirs, can beat. Sleeping ops say nothing about kernels: what a length costs is the
model's count of operations, not a measurement.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.harness import ranks
from benchmarks.harness.command import chosen, machine, options, ratios, size, spread, write_json
from benchmarks.harness.metrics import evaluate
from benchmarks.harness.ops import ScaledTimes, Sizes
from benchmarks.harness.scenarios import simulated
from benchmarks.harness.systems import OVERLAPPED, Own, System, all_systems
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules import Costs, generate
from megatron_ext.schedules.commands import aligned
from megatron_ext.schedules.search.length_balance import (
    LengthCost,
    best_order,
    deal_out,
    fills_of,
    packs_in_file_order,
    shortest,
)

_STATIC = Own("interleaved", "interleaved", {"chunks": 2}, transport="shm")
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
_REPLICAS = 4
"""Pipelines that share a batch."""
_LONG_SHARE = 0.03
_COST = LengthCost.of_model(4096, 14336, gated=True, query_width=4096, key_width=1024)
"""Of a layer of Llama 3 8B."""


@dataclass(frozen=True)
class Workload:
    """Where lengths come from."""

    about: str
    max_tokens: int
    """Of a micro-batch; longer samples are cut."""
    long_range: tuple[int, int] | None = None
    """Lengths of long instructions, if there are any."""

    @property
    def attention(self) -> float:
        """Cost of attention at the greatest length, over the rest."""
        return _COST.quadratic * self.max_tokens / _COST.linear

    def batch(self, num_packs: int, seed: int) -> list[int]:
        """Return the lengths of one global batch: what fills so many packs in file order."""
        drawn = random.Random(seed)
        lengths: list[int] = []
        room = 0
        while True:
            if self.long_range is not None and drawn.random() < _LONG_SHARE:
                length = drawn.randint(*self.long_range)
            else:
                [(_, mean)] = drawn.choices(_KINDS, [share for share, _ in _KINDS])
                length = round(drawn.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA))
            length = min(self.max_tokens, max(1, length))
            if length > room:
                if not num_packs:
                    return lengths
                num_packs -= 1
                room = self.max_tokens
            lengths.append(length)
            room -= length


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
    packs: bool = False
    """Whether replicas share out micro-batches (`--pipeline-balance pack`); else they run what the
    file has for them."""
    orders: bool = False
    """True if micro-batches are ordered by cost; else they stay in the order of their packs."""


def ways() -> list[Way]:
    """Return all ways; the first is what the others are compared with."""
    [upstream] = [system for system in all_systems() if system.name == OVERLAPPED]
    hint = DynamicOrder(policy="hint")
    dynamic = Own("dynamic", "interleaved", {"chunks": 2}, transport="shm", dynamic=hint)
    zb_v = Own("zb-v", "zb-v", transport="shm")
    return [
        Way(UPSTREAM, upstream),
        Way("interleaved, file order", _STATIC),
        Way("interleaved, order", _STATIC, orders=True),
        Way("interleaved, pack", _STATIC, packs=True, orders=True),
        Way("interleaved, dynamic", dynamic),
        Way("interleaved, pack and dynamic", dynamic, packs=True, orders=True),
        Way("zb-v, file order", zb_v),
        Way("zb-v, pack", zb_v, packs=True, orders=True),
    ]


class Batch:
    """One drawn global batch, shared out in all ways; processor times are of this process."""

    def __init__(
        self, workload: Workload, pp: int, num_microbatches: int, num_replicas: int, seed: int
    ) -> None:
        self.pp, self.num_replicas = pp, num_replicas
        self.lengths = workload.batch(num_microbatches * num_replicas, seed)
        # As replicas read them: one micro-batch each, in turn.
        costs = list(map(_COST.of_pack, packs_in_file_order(self.lengths, workload.max_tokens)))
        assert len(costs) == num_microbatches * num_replicas
        in_file = [costs[first::num_replicas] for first in range(num_replicas)]
        self._unit = sum(map(sum, in_file)) / (num_microbatches * num_replicas)
        begin_s = time.thread_time()
        shares = deal_out(costs, num_replicas, fills_of(_STATIC.placement(pp)))
        self.deal_s = time.thread_time() - begin_s
        self.order_s = 0.0
        """Of ordering one replica's micro-batches, at most."""
        self._in_file = in_file
        self._packed = [[costs[number] for number in share] for share in shares]

    def rows(self, way: Way) -> list[tuple[float, ...]]:
        """Return by replica what its micro-batches cost, in the order in which they run.

        The unit is the mean micro-batch in file order.
        """
        taken = self._packed if way.packs else self._in_file
        rows = [tuple(cost / self._unit for cost in row) for row in taken]
        if not way.orders:
            return rows
        assert isinstance(way.system, Own)
        table = generate(way.system.schedule, self.pp, len(rows[0]), **dict(way.system.options))
        ordered = []
        for row in rows:
            begin_s = time.thread_time()
            order = best_order(table, row)
            self.order_s = max(self.order_s, time.thread_time() - begin_s)
            ordered.append(tuple(row[number] for number in order))
        return ordered

    def bound(self, way: Way) -> float:
        """Return the shortest possible step, in forwards of the mean micro-batch on a rank."""
        costs = [_COST.of_length(length) / self._unit for length in self.lengths]
        return shortest(costs, self.num_replicas, way.system.placement(self.pp))


@dataclass
class Line:
    """One way at one size."""

    seconds: list[float]
    """Of the slowest replica, by draw."""
    of_order: list[float]
    """The same for the orders that ran, with exact ops and free messages."""
    overheads: list[float] = field(default_factory=list)
    """By replica of each draw: what runtime and messages added to the order that ran."""


def run(way: Way, sizes: Sizes, batches: Sequence[Batch], *, simulates: bool) -> Line:
    """Run, or simulate, all replicas of all batches in one way, with the same processes."""
    rows = [batch.rows(way) for batch in batches]
    if simulates:
        # Megatron's interleaved schedule counts as our table of the same order, which lacks its
        # extra warm-up for overlapped messages: here they take no time.
        own = way.system if isinstance(way.system, Own) else _STATIC
        seconds = [
            max(
                sizes.forward_s
                * simulated(own, sizes.pp, len(row), Costs(microbatch_scale=row)).makespan
                for row in by_replica
            )
            for by_replica in rows
        ]
        return Line(seconds, seconds)
    share = way.system.share(sizes.pp)
    times = [ScaledTimes(sizes.forward_s, share, row) for by in rows for row in by]
    # One after another, by the same processes.
    steps = ranks.run(ranks.measure, way.system, sizes, times, repeats=_REPLICAS)
    found = evaluate(steps, way.system.placement(sizes.pp), times)
    seconds, of_order = (
        [max(by_row[first : first + _REPLICAS]) for first in range(0, len(times), _REPLICAS)]
        for by_row in (found.seconds, found.order_s)
    )
    return Line(seconds, of_order, found.overheads)


def text_of(name: str, sizes: Sizes, batches: Sequence[Batch], lines: Mapping[str, Line]) -> str:
    """Return all ways at one size and workload as a table, with what surrounds it."""
    workload, reference = WORKLOADS[name], lines[UPSTREAM]
    rows = [("", "step ms", "speed", "order", "replay %")]
    rows += [
        (
            way,
            f"{1e3 * statistics.median(line.seconds):.0f}",
            spread(ratios(reference.seconds, line.seconds), 2),
            f"{statistics.median(ratios(reference.of_order, line.of_order)):.2f}",
            f"{100 * statistics.median(line.overheads):.1f}" if line.overheads else "-",
        )
        for way, line in lines.items()
    ]
    samples = statistics.median(len(batch.lengths) for batch in batches)
    tokens = statistics.median(sum(batch.lengths) for batch in batches)
    deal_ms, order_ms = (
        1e3 * max(getattr(batch, took) for batch in batches) for took in ("deal_s", "order_s")
    )
    return (
        f"{name} ({workload.about}): pp {sizes.pp}, {sizes.num_microbatches} micro-batches of at "
        f"most {workload.max_tokens} tokens, attention at that length {workload.attention:.1f} of "
        f"the rest, {samples:.0f} samples and {tokens:.0f} tokens in a batch\n{aligned(rows)}\n"
        f"processor time: share out {deal_ms:.1f} ms, order {order_ms:.1f} ms\n"
    )


def main() -> int:
    """Measure and print."""
    parser = options(__doc__, "few and short steps, as a test", only=True)
    add = parser.add_argument
    add("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME",
        help=f"of {', '.join(WORKLOADS)} (default: all)")  # fmt: skip
    add("--size", nargs="+", type=size, default=[(4, 16), (8, 32)], metavar="PPxM",
        help="ranks of a pipeline and its micro-batches (default: 4x16 8x32)")  # fmt: skip
    add("--draws", type=int, default=2, help="global batches of each size")
    add("--forward-ms", type=float, help="forward of the mean micro-batch on a rank; default: "
        "160/pp")  # fmt: skip
    add("--simulate", action="store_true", help="compute what to expect instead of measuring")
    args = parser.parse_args()
    if args.quick:
        args.workload, args.size = args.workload[-1:], [(2, 4)]
        args.draws, args.forward_ms = 1, 1.0
    ranks.clean_up_when_terminated()
    reference, *others = ways()
    tables = []
    for name in args.workload:
        for pp, num_microbatches in args.size:
            batches = [
                Batch(WORKLOADS[name], pp, num_microbatches, _REPLICAS, seed)
                for seed in range(args.draws)
            ]
            forward_s = (args.forward_ms or 160 / pp) / 1e3
            sizes = Sizes(pp, num_microbatches, forward_s, 1, args.draws, timeout_s=300.0)
            lines = {}
            for way in [reference, *chosen(parser, others, args.only)]:
                print(f"{name}, pp {pp}: {way.name}", file=sys.stderr)
                lines[way.name] = run(way, sizes, batches, simulates=args.simulate)
            bounds = [forward_s * batch.bound(reference) for batch in batches]
            lines["bound"] = Line(bounds, bounds)
            print(text_of(name, sizes, batches, lines), flush=True)
            figures = {way: asdict(line) for way, line in lines.items()}
            tables.append({"workload": name, **asdict(sizes), "lines": figures})
    conditions = f"simulated; {_REPLICAS} replicas, {args.draws} draws"
    if not args.simulate:
        forward = f"{args.forward_ms:g} ms" if args.forward_ms else "160 ms / pp"
        conditions = (
            f"{_REPLICAS} replicas one after another, {args.draws} draws, forward of the mean "
            f"micro-batch on a rank {forward}, either gradient as long; {machine()}"
        )
    print(conditions)
    write_json(args.json, {"conditions": conditions, "tables": tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
