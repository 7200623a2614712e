"""The time to generate, validate and simulate large schedules.

    python benchmarks/schedule_tables.py [--pp P] [--microbatches M] [--repeats N] [--json FILE]

Times are CPU seconds of this process (best of N), so other load hardly matters. The target is 2 s
in total for interleaved with 64 ranks, 1024 micro-batches and 2 chunks.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json
from megatron_ext.schedules import generate, simulate, validate

PHASES = ("generate", "validate", "simulate")


def measure_s(name: str, pp: int, num_microbatches: int) -> list[float]:
    """Return the CPU seconds of generating, validating and simulating one schedule."""
    ticks = [time.process_time()]
    schedule = generate(name, pp, num_microbatches)
    ticks.append(time.process_time())
    for phase in (validate, simulate):
        phase(schedule)
        ticks.append(time.process_time())
    return [end - begin for begin, end in itertools.pairwise(ticks)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--schedules", nargs="+", default=["interleaved", "1f1b", "zb-v"])
    parser.add_argument("--repeats", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()

    figures = {}
    print(f"pp {args.pp}, {args.microbatches} micro-batches: CPU seconds, best of {args.repeats}")
    print(f"{'schedule':<14}" + "".join(f"{phase:>10}" for phase in (*PHASES, "together")))
    for name in args.schedules:
        runs = [measure_s(name, args.pp, args.microbatches) for _ in range(args.repeats)]
        best = min(runs, key=sum)
        figures[name] = dict(zip(PHASES, best, strict=True)) | {"together": sum(best)}
        print(f"{name:<14}" + "".join(f"{seconds:>10.2f}" for seconds in figures[name].values()))
    if args.json:
        content = {"pp": args.pp, "num_microbatches": args.microbatches, "cpu_s": figures}
        write_json(args.json, content)


if __name__ == "__main__":
    main()
