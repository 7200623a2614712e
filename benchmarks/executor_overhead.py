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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.schedule_harness import launch, rank
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.systems import all_systems

SYSTEMS = (
    "megatron-core 1F1B",
    *(f"megatron_ext, gloo: {name}" for name in ("gpipe", "1f1b", "zb-h1")),
)


def main() -> None:
    """Measure and print the table: microseconds for each action on the slowest rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    add_json(parser)
    args = parser.parse_args()
    launch.clean_up_when_terminated()

    figures: dict[str, dict[str, float]] = {}
    print(f"{'us for each action':<24}{'one rank':>12}{'two ranks':>12}")
    for system in (system for system in all_systems() if system.name in SYSTEMS):
        one, two = (
            1e6 * max(launch.run(rank.measure_overhead, system, Sizes(
                num_ranks, args.microbatches, 0.0, warmup=2, steps=args.steps, timeout_s=60.0
            )))
            for num_ranks in (1, 2)
        )  # fmt: skip
        figures[system.name] = {"one_rank_us": one, "two_ranks_us": two}
        print(f"{system.name:<24}{one:>12.0f}{two:>12.0f}")
    if args.json:
        write_json(args.json, {"num_microbatches": args.microbatches, "systems": figures})


if __name__ == "__main__":
    main()
