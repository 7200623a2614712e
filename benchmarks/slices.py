"""Schedules in slices of a sequence beside those of whole micro-batches, on emulated stages.

    python benchmarks/slices.py [--size PPxM ...] [--slices K ...] [--attention SHARE ...]
        [--only TEXT ...] [--forward-ms T] [--steps N] [--simulate] [--join] [--json FILE]

Stages sleep, processes and messages are real, as in `schedules.py`. A forward of a micro-batch on
1/pp of the model is the unit of time; its two gradients take as long. With a share of attention in
a forward, slices have equal cost. Columns:

    bubble     T less the work of a rank: of the simulated order, and measured
    over       measured T over that of the simulated order, minus 1
    peak act.  peak of live activations on the worst rank, in micro-batches on 1/pp of the model:
               simulated, and measured as tensors in memory
    weights    copies of each weight

`--simulate` leaves the measurement out. `--join` measures instead what attention of a slice pays to
join its keys and values with those before it, beside attention itself, on a CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import launch, rank  # noqa: E402
from benchmarks.schedule_harness.metrics import evaluate  # noqa: E402
from benchmarks.schedule_harness.ops import SEQUENCE_LENGTH, Sizes  # noqa: E402
from benchmarks.schedule_harness.systems import Own, System, all_systems  # noqa: E402
from megatron_ext.errors import ScheduleError  # noqa: E402
from megatron_ext.schedules import Costs, generate  # noqa: E402
from megatron_ext.schedules.search.simulate import simulate  # noqa: E402
from megatron_ext.schedules.table.memory import measure as memory  # noqa: E402
from tests.ranks import RanksFailed  # noqa: E402

WORK = 3
"""Of a micro-batch on a rank, in forwards."""


@dataclass
class Line:
    """One schedule at one size; times in forwards."""

    pp: int
    num_microbatches: int
    attention: float
    name: str
    weights: int
    of_order: float | None = None
    """Simulated bubble; None for somebody else's runtime."""
    peak_of_order: float | None = None
    bubble: float | None = None
    """Measured, the median of the steps."""
    over: float | None = None
    peak: float | None = None

    def cells(self) -> list[str]:
        """Return the text of each column."""
        figures = (self.of_order, self.bubble, self.over and 100 * self.over)
        peaks = (self.peak_of_order, self.peak)
        return [
            self.name,
            *("" if value is None else f"{value:.2f}" for value in (*figures, *peaks)),
            f"{self.weights}x",
        ]


def systems(slices: list[int], attention: float) -> list[System]:
    """Return what is compared: the rivals with whole micro-batches, then ours in slices."""
    peers = [s for s in all_systems() if s.name.startswith("megatron-core")]
    whole: list[System] = [
        Own("1f1b", "1f1b", transport="shm"),
        Own("zb-v", "zb-v", transport="shm"),
        Own("bitpipe order=zb", "bitpipe", {"order": "zb"}, transport="shm"),
    ]
    sliced = [
        Own(f"{name} slices={k}", name, transport="shm", slices=k, attention=attention)
        for name in ("1f1b", "zb-h1", "zb-v")
        for k in slices
        if k > 1 or name == "zb-h1"
    ]
    return [*peers, *whole, *sliced]


def line_of(system: System, sizes: Sizes, attention: float, *, simulates: bool) -> Line | None:
    """Return a line; None if there is no such schedule of this size."""
    line = Line(sizes.pp, sizes.num_microbatches, attention, system.name, system.weight_copies)
    work = WORK * sizes.num_microbatches
    try:
        system.check(sizes.pp, sizes.num_microbatches)
        if isinstance(system, Own):
            costs = Costs(attention=attention)
            table = generate(
                system.schedule,
                sizes.pp,
                sizes.num_microbatches,
                costs=costs,
                slices=system.slices,
                **system.options,
            )
            line.of_order = simulate(table, costs).makespan - work
            line.peak_of_order = max(memory(table).activations)
        if simulates:
            return line if isinstance(system, Own) else None
        steps = launch.run(rank.measure, system, sizes)
    except (ScheduleError, RanksFailed) as error:
        print(f"{system.name}: {error}", file=sys.stderr)
        return None
    found = evaluate(steps, system.placement(sizes.pp), system.times(sizes))
    line.bubble = found.median_s / sizes.forward_s - work
    if line.of_order is not None:
        line.over = (line.bubble + work) / (line.of_order + work) - 1
    line.peak = found.peak_live
    return line


def text_of(lines: list[Line]) -> str:
    """Return the lines of one size as a table, without columns that are empty."""
    head = ["schedule", "bubble", "measured", "over %", "peak act.", "measured", "weights"]
    columns = list(zip(head, *(line.cells() for line in lines), strict=True))
    filled = [
        [cell.rjust(max(map(len, column))) for cell in column]
        for column in columns[1:]
        if any(column[1:])
    ]
    width = max(map(len, columns[0]))
    rows = zip([cell.ljust(width) for cell in columns[0]], *filled, strict=True)
    return "\n".join("  ".join(row) for row in rows)


def join(length: int, num_slices: int) -> str:
    """Return what joining keys and values costs beside attention, forward and backward."""
    import torch

    from megatron_ext.runtime.sliced_compute import _Joined, _Kept

    torch.set_num_threads(1)
    heads, width = 4, 64
    kept, losses, join_s = (_Kept(), _Kept()), [], 0.0
    begin_s = time.perf_counter()
    for number in range(num_slices):
        size = length * (number + 1) // num_slices - length * number // num_slices
        shape = 3, size, 1, heads, width
        query, key, value = torch.randn(shape, requires_grad=True).unbind()
        join_begin_s = time.perf_counter()
        key, value = (
            _Joined.apply(own, of, number) for own, of in zip((key, value), kept, strict=True)
        )
        join_s += time.perf_counter() - join_begin_s
        heads_first = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        losses.append(torch.nn.functional.scaled_dot_product_attention(*heads_first).sum())
    for loss in reversed(losses):
        loss.backward()
    all_s = time.perf_counter() - begin_s
    whole = 2 * length * heads * width * 4 / 2**20
    return (
        f"{length} tokens in {num_slices} slices, {heads} heads of {width}: keys and values "
        f"{whole:.1f} MiB, joined {whole * (num_slices + 1) / 2:.1f} MiB in {1e3 * join_s:.1f} ms "
        f"of {1e3 * all_s:.1f} ms for attention, forward and backward"
    )


def size(text: str) -> tuple[int, int]:
    """Parse `PPxM`."""
    pp, num_microbatches = map(int, text.split("x"))
    return pp, num_microbatches


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", nargs="+", type=size, default=[(4, 8), (8, 16)], metavar="PPxM",
        help="ranks of a pipeline and its micro-batches (default: 4x8 8x16)",
    )  # fmt: skip
    parser.add_argument("--slices", nargs="+", type=int, default=[1, 4, 8, 16], metavar="K")
    parser.add_argument("--attention", nargs="+", type=float, default=[0.0], metavar="SHARE")
    parser.add_argument("--forward-ms", type=float, default=80, help="forward of 1/pp of the model")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two others")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="lines with this")
    parser.add_argument("--simulate", action="store_true", help="compute what to expect only")
    parser.add_argument("--join", action="store_true", help="measure joining keys and values")
    add_json(parser)
    return parser.parse_args(argv)


def main() -> int:
    """Measure and print."""
    args = parse()
    launch.clean_up_when_terminated()
    if args.join:
        for num_slices in args.slices:
            print(join(4 * SEQUENCE_LENGTH, num_slices))
        return 0
    lines: list[Line] = []
    for pp, num_microbatches in args.size:
        sizes = Sizes(pp, num_microbatches, args.forward_ms / 1e3, 2, args.steps, 60.0)
        for attention in args.attention:
            made = [
                line_of(system, sizes, attention, simulates=args.simulate)
                for system in systems(args.slices, attention)
                if not args.only or any(text in system.name for text in args.only)
            ]
            found = [line for line in made if line is not None]
            lines += found
            print(f"pp {pp}, {num_microbatches} micro-batches, attention {100 * attention:g} %\n")
            print(f"{text_of(found)}\n")
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    print(
        f"forward {args.forward_ms:g} ms, median of {args.steps} steps; {packages}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    )
    if args.json:
        write_json(args.json, {"lines": [asdict(line) for line in lines]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
