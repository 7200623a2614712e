"""The overhead of the executor on top of Megatron's forward and backward steps.

    python benchmarks/executor_overhead.py [--microbatches M] [--steps N] [--json FILE]

The stages are those of benchmarks/schedules.py, with ops that take no time. Reported is the time of
a step outside of Megatron's `forward_step` and `backward_step` (or, for W, of the split), for each
action: on one rank, which sends no messages, and on two, where most actions receive or send one. It
is CPU time of the thread that runs the schedule, so waits do not count; the best of N steps. The
same method measures Megatron's own schedules. The target is 50 us on one rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import launch, rank  # noqa: E402
from benchmarks.schedule_harness.ops import Sizes  # noqa: E402
from benchmarks.schedule_harness.systems import System, all_systems  # noqa: E402

_OWN = ("gpipe", "1f1b", "zb-h1")
SYSTEMS = ("megatron-core 1F1B", *(f"megatron_ext, gloo: {name}" for name in _OWN))


def measure_us(system: System, num_ranks: int, num_microbatches: int, steps: int) -> float:
    """Return the microseconds for each action on the rank that takes longest."""
    sizes = Sizes(num_ranks, num_microbatches, 0.0, warmup=2, steps=steps, timeout_s=60.0)
    return 1e6 * max(launch.run(rank.measure_overhead, system, sizes))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    add_json(parser)
    args = parser.parse_args()
    launch.clean_up_when_terminated()

    figures: dict[str, dict[str, float]] = {}
    print(f"{'us for each action':<24}{'one rank':>12}{'two ranks':>12}")
    for system in (system for system in all_systems() if system.name in SYSTEMS):
        one, two = (measure_us(system, n, args.microbatches, args.steps) for n in (1, 2))
        figures[system.name] = {"one_rank_us": one, "two_ranks_us": two}
        print(f"{system.name:<24}{one:>12.0f}{two:>12.0f}")
    if args.json:
        content = {"num_microbatches": args.microbatches, "systems": figures}
        write_json(args.json, content)


if __name__ == "__main__":
    main()
