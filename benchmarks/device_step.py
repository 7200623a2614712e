"""Steps on a device that runs behind its host: our tables, dynamic order, Megatron's own schedules.

    python benchmarks/device_step.py [--pp P] [--microbatches M] [--forward-ms T] [--steps N]
        [--repetitions N] [--connections N] [--scenario NAME ...] [--only TEXT ...] [--quick]
        [--json FILE]

Runs on the emulated device of the tests (tests/fake_musa/README.md), which needs a C++ compiler:
processes, launches, events, copies and messages are real, and a kernel takes the time of an action
without using the processor. A device's clock may lag one forward behind its host's, so a thread of
the emulation that wakes late delays no kernel. The defaults take three minutes. Columns:

    T ms          median step time, from the first rank's begin until all devices are idle
    T/ideal       T over the undisturbed work of one rank
    T/order       T over the time of the order that ran, simulated with exact ops and free messages
    runtime %     what host, events and messages added to that order with its ops as they were
    ops %         excess of ops over their time
    waits/action  how often the host waited for its device, for each action
    speed         of a dynamic order: time of its table over its own, at the same draw
    of orders     the same of the simulated times of both orders that ran

Megatron's own schedules and tables over the communicator use the emulated MCCL, which orders its
operations as NCCL does; ipc copies from device to device. With `--scenario` ops take random times,
and every step of `--steps` is another draw, the same for all systems. With `--repetitions` the
shortest time of each draw counts, as in dynamic_order.py, since other load only adds time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import add_only, chosen, machine
from benchmarks.schedule_harness import device, launch
from benchmarks.schedule_harness.device import DeviceFigures, Row
from benchmarks.schedule_harness.noise import SCENARIOS
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.systems import Own, device_systems
from megatron_ext.errors import ScheduleError
from tests.fake_musa.build import NoCompiler
from tests.fake_musa.queued import queued
from tests.ranks import RanksFailed

_COSTS = {"copy_us": 10.0, "copied_per_us": 20_000.0, "message_us": 30.0}
"""A copy from device to device and an operation of a communicator, beside their launch."""

_QUICK = ("megatron-core 1F1B", "communicator: 1f1b", "ipc: 1f1b")
_OPS = [name for name, scenario in SCENARIOS.items() if not scenario.delays_messages]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=4, help="processes, the ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=16, help="in one step")
    parser.add_argument(
        "--forward-ms", type=float, default=10.0, help="forward of 1/pp of the model"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two others")
    parser.add_argument("--repetitions", type=int, default=1, help="of all steps")
    parser.add_argument("--connections", type=int, default=8, help="hardware queues of a device")
    parser.add_argument(
        "--scenario",
        nargs="+",
        default=["quiet", "jitter-0.3"],
        choices=_OPS,
        metavar="NAME",
        help=f"disturb ops of dynamic orders and their table: {', '.join(_OPS)}",
    )
    add_only(parser)
    parser.add_argument("--quick", action="store_true", help="three systems, a few short actions")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for every wait")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.pp, args.microbatches, args.forward_ms, args.steps = 2, 4, 2.0, 1
        args.scenario = ["quiet"]
    args.systems = chosen(parser, device_systems(), args.only)
    if args.quick:
        args.systems = [system for system in device_systems() if system.name in _QUICK]
    return args


def tables() -> dict[str, str]:
    """Return the table of each dynamic order."""
    own = [system for system in device_systems() if isinstance(system, Own)]
    return {
        dynamic.name: table.name
        for dynamic in own
        for table in own
        if dynamic.dynamic and table.splits and table.schedule == dynamic.schedule
    }


def measure(args: argparse.Namespace, sizes: Sizes) -> tuple[dict[Row, DeviceFigures], list[str]]:
    """Run all systems in all their scenarios; return the figures and what failed."""
    costs = {**_COSTS, "lag_us": 1e3 * args.forward_ms}
    env = queued(connections=args.connections, stuck_s=args.timeout_s / 2, **costs)
    compared = {name for pair in tables().items() for name in pair}
    found, failed = {}, []
    for system in args.systems:
        for scenario in args.scenario if system.name in compared else ["quiet"]:
            row = Row(system.name, scenario)
            print(f"{system.name}, {scenario}", file=sys.stderr)
            try:
                system.check(sizes.pp, sizes.num_microbatches)
                steps = launch.run(
                    device.measure_on_device, system, sizes, scenario, args.repetitions,
                    repeats=args.repetitions, device="musa", env=env,
                )  # fmt: skip
            except (ScheduleError, RanksFailed) as error:
                failed.append(f"{system.name}, {scenario}: {error}")
                continue
            found[row] = device.device_figures(steps, system, sizes, scenario)
    return found, failed


def conditions(args: argparse.Namespace, before: str) -> str:
    """Return what was measured, and on what machine, as it was before."""
    return (
        f"pp {args.pp}, {args.microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {args.forward_ms:g} ms, {args.connections} hardware queues, a copy "
        f"{_COSTS['copy_us']:g} us and {_COSTS['copied_per_us'] / 1e3:g} GB/s, a message of a "
        f"communicator {_COSTS['message_us']:g} us, median of {args.steps} steps, each the "
        f"shortest of {args.repetitions}; {before} before"
    )


def main() -> int:
    """Measure and print; 1 if a system failed."""
    args = parse()
    launch.clean_up_when_terminated()
    before = machine()
    sizes = Sizes(
        pp=args.pp,
        num_microbatches=args.microbatches,
        forward_s=args.forward_ms / 1e3,
        warmup=1 if args.quick else 2,
        steps=args.steps,
        timeout_s=args.timeout_s,
    )
    try:
        found, failed = measure(args, sizes)
    except NoCompiler as error:
        raise SystemExit(f"device_step.py: the emulated device cannot be built: {error}") from None
    faster = device.speeds(found, tables())
    text = conditions(args, before)
    print(f"{device.device_table(found, faster)}\n\n{text}.")
    for reason in failed:
        print(f"\n{reason}", file=sys.stderr)
    if args.json:
        rows = [
            {**row._asdict(), **asdict(figures), "speed": faster.get(row)}
            for row, figures in found.items()
        ]
        write_json(args.json, {"conditions": text, "measured": rows, "failures": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
