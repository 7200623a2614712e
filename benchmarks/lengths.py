"""Gain of balancing by cost where samples differ in length, on emulated stages.

    python benchmarks/lengths.py [--workload NAME ...] [--size PPxM ...] [--replicas N] [--draws N]
        [--repetitions N] [--forward-ms T] [--only TEXT ...] [--simulate] [--json FILE] [--quick]

A stage sleeps a*L + b*L^2 for each sample of a micro-batch, with a and b of Llama 3 8B. Lengths are
drawn from published distributions (`schedule_harness/lengths.py`). Processes and messages are real.
The replicas of a step run one after another, since a machine has few cores, and the slowest counts.
All lines of a table get the same batches, so the same tokens and the same gradient:

    step ms    slowest replica, median of the draws; of each replica its shortest repetition counts
    speed      tokens per second over those of Megatron's interleaved schedule with file order:
               median of the draws (lowest .. highest)
    order      the same ratio for the orders that ran, with exact ops and free messages: without
               other load on the machine
    replay %   overhead of runtime and messages over the order that ran with the measured ops,
               median of all steps

`--simulate` computes the same table without processes: what to expect on a machine without overhead
or other load. The last line is what no assignment of samples to replicas and micro-batches, and no
order of theirs, can beat. Sleeping ops say nothing about kernels: what a length costs is the
model's count of operations, not a measurement.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import launch  # noqa: E402
from benchmarks.schedule_harness.lengths import (  # noqa: E402
    UPSTREAM,
    WORKLOADS,
    Batch,
    ScaledTimes,
    Way,
    Workload,
    step_time,
    ways,
)
from benchmarks.schedule_harness.lengths import measure as measure_rows  # noqa: E402
from benchmarks.schedule_harness.metrics import overhead, replay  # noqa: E402
from benchmarks.schedule_harness.ops import Op, Sizes, Step  # noqa: E402

if TYPE_CHECKING:
    from megatron_ext.schedules import Placement


@dataclass
class Line:
    """One way at one size. Lists are by draw."""

    seconds: list[float] = field(default_factory=list)
    """Of the slowest replica."""
    of_order: list[float] = field(default_factory=list)
    """The same for the orders that ran, with exact ops and free messages."""
    overheads: list[float] = field(default_factory=list)
    """By step: what runtime and messages added to the order that ran."""


@dataclass
class Table:
    """All ways at one size and workload."""

    workload: str
    pp: int
    num_microbatches: int
    tokens: list[int]
    """Of each draw, all replicas together."""
    samples: list[int]
    pack_ms: float
    """Processor time of packing one batch anew, at most."""
    deal_ms: float
    """Processor time of sharing out its micro-batches between the replicas, at most."""
    order_ms: float
    """Processor time of ordering one replica's step, at most."""
    bounds: list[float]
    """Shortest possible step of each draw, in seconds."""
    lines: dict[str, Line]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=list(WORKLOADS),
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"of {', '.join(WORKLOADS)} (default: all)",
    )
    parser.add_argument(
        "--size",
        nargs="+",
        type=_size,
        default=[(4, 16), (8, 32)],
        metavar="PPxM",
        help="ranks of a pipeline and its micro-batches (default: 4x16 8x32)",
    )
    parser.add_argument("--replicas", type=int, default=4, help="pipelines that share a batch")
    parser.add_argument("--draws", type=int, default=2, help="global batches of each size")
    parser.add_argument("--repetitions", type=int, default=1, help="of each replica's step")
    parser.add_argument(
        "--forward-ms",
        type=float,
        help="forward of the mean micro-batch on a rank; default: 160/pp",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="lines with this")
    parser.add_argument(
        "--simulate", action="store_true", help="compute what to expect instead of measuring"
    )
    parser.add_argument("--quick", action="store_true", help="few and short steps, as a test")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.workload, args.size, args.replicas = args.workload[-1:], [(2, 4)], 2
        args.draws, args.forward_ms = 1, 1.0
    return args


def _size(text: str) -> tuple[int, int]:
    try:
        pp, num_microbatches = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4x16") from None
    return pp, num_microbatches


def measure(args: argparse.Namespace, name: str, pp: int, num_microbatches: int) -> Table:
    """Run all ways of one size and workload."""
    workload = WORKLOADS[name]
    batches = [
        Batch(workload, pp, num_microbatches, args.replicas, seed) for seed in range(args.draws)
    ]
    sizes = Sizes(pp, num_microbatches, _forward_s(args, pp), 1, args.draws, timeout_s=300.0)
    lines = {}
    for way in chosen(args):
        print(f"{name}, pp {pp}: {way.name}", file=sys.stderr)
        lines[way.name] = (
            expect(way, sizes, batches)
            if args.simulate
            else run(way, sizes, batches, args.repetitions)
        )
    bounds = [sizes.forward_s * batch.bound(ways()[0]) for batch in batches]
    return Table(
        name,
        pp,
        num_microbatches,
        [batch.tokens for batch in batches],
        [len(batch.lengths) for batch in batches],
        1e3 * max(batch.pack_s for batch in batches),
        1e3 * max(batch.deal_s for batch in batches),
        1e3 * max(batch.order_s for batch in batches),
        bounds,
        lines,
    )


def chosen(args: argparse.Namespace) -> list[Way]:
    """Return the ways to run; the reference is always among them."""
    return [
        way
        for way in ways()
        if way.name == UPSTREAM or not args.only or any(text in way.name for text in args.only)
    ]


def expect(way: Way, sizes: Sizes, batches: Sequence[Batch]) -> Line:
    """Simulate all replicas of all batches in one way."""
    seconds = [
        sizes.forward_s * max(step_time(way.system, sizes.pp, row) for row in batch.rows(way))
        for batch in batches
    ]
    return Line(seconds=seconds, of_order=seconds)


def run(way: Way, sizes: Sizes, batches: Sequence[Batch], repetitions: int) -> Line:
    """Run all replicas of all batches in one way, with the same processes."""
    rows = [row for batch in batches for row in batch.rows(way)]
    repeated = [row for row in rows for _ in range(repetitions)]
    by_rank = launch.run(measure_rows, way.system, sizes, repeated, repeats=len(repeated))
    steps: list[tuple[Step, ...]] = list(zip(*by_rank, strict=True))
    times = [max(s.end_s for s in step) - min(s.begin_s for s in step) for step in steps]
    replicas = batches[0].num_replicas
    best = [min(again) for again in _groups(times, repetitions)]
    placement = way.system.placement(sizes.pp)
    share = way.system.share(sizes.pp)
    exact = [
        _exact_s([s.ops for s in step], placement, ScaledTimes(sizes.forward_s, share, row))
        for step, row in zip(steps, repeated, strict=True)
    ]
    exact = [min(again) for again in _groups(exact, repetitions)]
    return Line(
        seconds=[max(together) for together in _groups(best, replicas)],
        of_order=[max(together) for together in _groups(exact, replicas)],
        overheads=[overhead([s.ops for s in step], placement) for step in steps],
    )


def _exact_s(rows: Sequence[Sequence[Op]], placement: Placement, times: ScaledTimes) -> float:
    """Return the time of the order that ran, with exact ops and free messages."""
    return replay(rows, placement, lambda op: times.seconds(op.kind, op.stage, op.microbatch))


def _groups(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def speeds(table: Table, seconds: Sequence[float], of: str = "seconds") -> list[float]:
    """Return the speed of a line over the reference, draw by draw."""
    reference = getattr(table.lines[UPSTREAM], of)
    return [theirs / ours for theirs, ours in zip(reference, seconds, strict=True)]


def text_of(table: Table, workload: Workload) -> str:
    """Return a table in words."""
    rows = [("", "step ms", "speed", "order", "replay %")]
    for name, line in table.lines.items():
        order = f"{_median(speeds(table, line.of_order, 'of_order')):.2f}"
        step = f"{1e3 * _median(line.seconds):.0f}"
        overhead_percent = f"{100 * _median(line.overheads):.1f}" if line.overheads else "-"
        rows.append((name, step, _spread(speeds(table, line.seconds)), order, overhead_percent))
    bound = _median(speeds(table, table.bounds, "of_order"))
    measured = _spread(speeds(table, table.bounds))
    rows.append(("bound", f"{1e3 * _median(table.bounds):.0f}", measured, f"{bound:.2f}", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    head = (
        f"{table.workload} ({workload.what}): pp {table.pp}, {table.num_microbatches} "
        f"micro-batches of at most {workload.max_tokens} tokens, attention at that length "
        f"{workload.attention:.1f} of the rest, {_median(table.samples):.0f} samples and "
        f"{_median(table.tokens):.0f} tokens in a batch"
    )
    plan = (
        f"processor time: share out {table.deal_ms:.1f} ms, order {table.order_ms:.1f} ms, repack "
        f"{table.pack_ms:.1f} ms"
    )
    return "\n".join([head, *lines, plan])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> str:
    return f"{_median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


def conditions(args: argparse.Namespace) -> str:
    """Say under which conditions the figures were taken."""
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    if args.simulate:
        return f"simulated; {args.replicas} replicas, {args.draws} draws"
    forwards = ", ".join(f"{1e3 * _forward_s(args, pp):g} ms at pp {pp}" for pp, _ in args.size)
    return (
        f"{args.replicas} replicas one after another, {args.draws} draws, forward of the mean "
        f"micro-batch on a rank {forwards}, either gradient as long; {packages}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[1]:.1f}"
    )


def _forward_s(args: argparse.Namespace, pp: int) -> float:
    return (args.forward_ms or 160 / pp) / 1e3


def as_dict(tables: Sequence[Table], said: str) -> dict[str, Any]:
    """Return everything for `--json`."""
    return {"conditions": said, "tables": [asdict(table) for table in tables]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    launch.clean_up_when_terminated()
    tables = []
    for name in args.workload:
        for pp, num_microbatches in args.size:
            tables.append(measure(args, name, pp, num_microbatches))
            print(f"{text_of(tables[-1], WORKLOADS[name])}\n", flush=True)
    said = conditions(args)
    print(said)
    if args.json:
        write_json(args.json, as_dict(tables, said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
