"""What tracing costs, and how well `plan --from-trace` predicts, with stages that take known times.

    python benchmarks/tracing.py                                 # about four minutes
    python benchmarks/tracing.py --pp 2 --microbatches 4 --steps 2 --only 1f1b zb-h1

Every system runs twice in each round, traced and not, in the harness of `benchmarks/schedules.py`.
The trace of 1f1b alone predicts the steps of all others; nothing else is told to the planner.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.schedule_harness import launch, traced
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.systems import Own, all_systems
from megatron_ext.trace.planner import forecast
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from benchmarks.schedule_harness.systems import System

TRACED = "1f1b"


def step_s(system: System, sizes: Sizes, directory: Path | None = None) -> float:
    """Return the median step of the slowest rank; with a directory, traced into it."""
    limit_s = sizes.timeout_s + 12 * sizes.forward_s * sizes.num_microbatches * sizes.steps
    by_rank = run_ranks(sizes.pp, traced.measure, system, sizes, directory, timeout_s=limit_s)
    return statistics.median(max(times) for times in zip(*by_rank, strict=True))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="schedules by name")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    args = parse()
    launch.clean_up_when_terminated()
    sizes = Sizes(args.pp, args.microbatches, args.forward_ms / 1e3, 2, args.steps, timeout_s=60)
    systems = [
        system
        for system in all_systems()
        if isinstance(system, Own)
        and system.transport == "torch"
        and not system.costs.latency
        and (args.only is None or system.schedule in (*args.only, TRACED))
    ]
    with tempfile.TemporaryDirectory(prefix="megatron_ext_tracing_") as scratch:
        plain: dict[str, list[float]] = {system.name: [] for system in systems}
        with_traces: dict[str, list[float]] = {system.name: [] for system in systems}
        for number in range(args.rounds):
            for system in systems:
                folder = Path(scratch) / str(number) / system.name.replace(" ", "-")
                plain[system.name].append(step_s(system, sizes))
                with_traces[system.name].append(step_s(system, sizes, folder))
        run = (
            Path(scratch)
            / "0"
            / next(s.name.replace(" ", "-") for s in systems if s.schedule == TRACED)
        )
        predicted = {p.label: p.step_s for p in forecast(run).predictions}
    print(f"pp {args.pp}, {args.microbatches} micro-batches, forward {args.forward_ms:g} ms; "
          f"median steps in ms, best of {args.rounds} rounds")  # fmt: skip
    print(f"{'system':42} {'step':>8} {'traced':>8} {'cost %':>7} {'predicted':>10} {'off %':>6}")
    for system in systems:
        label = system.choice(args.pp, args.microbatches).schedule(
            args.microbatches // system.weight_copies
        ).label  # fmt: skip
        step, with_trace = min(plain[system.name]), min(with_traces[system.name])
        guess = predicted[label]
        print(f"{system.name:42} {1e3 * step:8.1f} {1e3 * with_trace:8.1f} "
              f"{100 * (with_trace / step - 1):7.1f} {1e3 * guess:10.1f} "
              f"{100 * (guess / step - 1):6.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
