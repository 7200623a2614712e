"""The cost of tracing, and the accuracy of `plan --trace-dir` on stages of known durations.

    python benchmarks/tracing.py                                 # about five minutes
    python benchmarks/tracing.py --pp 2 --microbatches 4 --steps 2 --only 1f1b zb-h1

The harness of `benchmarks/schedules.py` traces every second step; the cost is the median difference
between a traced step and the one before it. The planner predicts the steps of all systems from the
trace of 1f1b alone. CPU time and file size of an event are measured separately, since one step has
too few events to show them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.schedule_harness import launch, rank
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.systems import Own, all_systems
from megatron_ext.tools.trace.forecast import forecast
from megatron_ext.tracing.recorder import Recorder, Sampling
from megatron_ext.tracing.records import Header

TRACED = "1f1b"


def measure_event(directory: Path, count: int = 1000, rounds: int = 50) -> tuple[float, float]:
    """Return the seconds of the processor and the bytes of the file that an event takes."""
    header = Header(0, 0, 0, 0, (1, 1, 1), "host", "boot", 1, 1)
    recorder = Recorder(lambda: (directory, header), sampling=Sampling(rounds, rounds))
    best_s = float("inf")
    for _ in range(rounds):
        recorder.begin_iteration()
        begin_s = time.process_time()
        for number in range(count):
            about = {"from": 2, "for": "F", "stage": 3, "microbatch": number, "bytes": 8 << 20}
            recorder.add("receive", recorder.stamp(), about)
        recorder.end_iteration()
        best_s = min(best_s, time.process_time() - begin_s)  # with the write of its iteration
    recorder.close()
    [path] = directory.iterdir()
    return best_s / count, path.stat().st_size / (count * rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=5, help="pairs of steps")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="schedules by name")
    args = parser.parse_args()
    launch.clean_up_when_terminated()
    sizes = Sizes(args.pp, args.microbatches, args.forward_ms / 1e3, 1, args.steps, timeout_s=60)
    systems = [
        system
        for system in all_systems()
        if isinstance(system, Own)
        and system.transport == "torch"
        and not system.costs.latency
        and (args.only is None or system.schedule in (*args.only, TRACED))
    ]
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="megatron_ext_tracing_") as scratch:
        for system in systems:
            folder = Path(scratch) / system.schedule / str(len(found))
            by_rank = launch.run(rank.measure_traced, system, sizes, folder, repeats=2)
            # A step is as long as on its slowest rank.
            steps = [
                (max(plain_s for plain_s, _ in pair), max(traced_s for _, traced_s in pair))
                for pair in zip(*by_rank, strict=True)
            ]
            found[system.name] = (
                statistics.median(plain_s for plain_s, _ in steps),
                statistics.median(traced_s / plain_s - 1 for plain_s, traced_s in steps),
            )
        [run] = (Path(scratch) / TRACED).iterdir()
        predicted = {p.label: p.step_s for p in forecast(run).predictions}
        event_s, event_bytes = measure_event(Path(scratch) / "events")
    print(f"```text\npp {args.pp}, {args.microbatches} micro-batches, forward {args.forward_ms:g} "
          f"ms; medians of {args.steps} pairs of steps")  # fmt: skip
    print(f"{'system':42} {'step ms':>8} {'tracing %':>9} {'predicted':>10} {'off %':>6}")
    for system in systems:
        per_replica = args.microbatches // system.weight_copies
        pipeline = system.pipeline(args.pp, args.microbatches)
        (step_s, cost), guess_s = (
            found[system.name],
            predicted[pipeline.schedule(per_replica).label],
        )
        print(f"{system.name:42} {1e3 * step_s:8.1f} {100 * cost:9.1f} {1e3 * guess_s:10.1f} "
              f"{100 * (guess_s / step_s - 1):6.1f}")  # fmt: skip
    print(f"an event: {1e6 * event_s:.1f} us of the processor, {event_bytes:.0f} bytes of the file")
    print("```")


if __name__ == "__main__":
    main()
