"""Pipeline schedules and runtimes side by side, on emulated stages, or on an emulated device.

    python benchmarks/schedules.py [--pp P ...] [--microbatches M] [--forward-ms T] [--steps N]
        [--only TEXT ...] [--json FILE] [--quick]
    python benchmarks/schedules.py --device [--scenario NAME ...] [--repetitions N] ...

Every system runs the same model in real processes with real messages; stages emulate computation by
sleeping. Each rank is bound to CPUs of its own, or shares one if there are too few. All figures of
the documentation come from one run: 4 and 8 ranks, 15 minutes. With several sizes the first runs
all systems, the others leave out this package's schedules over gloo, unless `--only` selects some.

`--device` runs on the emulated device of the tests (tests/fake_musa/README.md), which is behind its
host and needs a C++ compiler: processes, launches, events, copies and messages are real, and a
kernel takes the time of an action without using the processor. A device's clock may lag one forward
behind its host's, so a thread of the emulation that wakes late delays no kernel. Megatron's own
schedules and tables over the communicator use the emulated MCCL, which orders its operations as
NCCL does; ipc copies from device to device. Three minutes.

With `--scenario` ops take random times, and every step of `--steps` is another draw, the same for
all systems. With `--repetitions` the shortest time of each draw counts, since other load only adds
time. `dynamic_order.py` compares orders so. Columns of the tables:

    T ms       median step time, from the start of the first rank to the end of the last, or until
               all devices are idle
    T/ideal    T over the undisturbed work of one rank, which is the time without any bubble
    order      T/ideal of the order that ran, with exact ops and free messages
    T/order    T over the time of that order
    replay %   overhead of runtime and messages over that order with the measured ops
    ops %      excess of ops over their time; marked ! above 5: the machine is too busy
    peak act.  peak of live activations, as tensors in memory, on the worst rank; the unit is the
               activations of one micro-batch on 1/pp of the model
    of order   activations that the order must hold
    weights    copies of each weight
    ops        actions of a rank
    hops       messages on the longest path of the order: their latency extends the step
    gap us     from the end of an op to the start of the next on its rank, if it waits for nothing
    hop us     from the end of an op to the start of one on another rank that waits for it
    cpu %      CPU time of a rank over T: beyond cores/pp ranks wait for cores
    waits      how often a host waited for its device, for each action
    speed      of a dynamic order: time of its table over its own, at the same draw
    of orders  the same of the simulated times of both orders that ran

Sleeping ops say nothing about kernels, memory bandwidth or collectives that share a GPU with them.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.harness import ranks, scenarios
from benchmarks.harness.command import chosen, figure, machine, options, ratios, write_json
from benchmarks.harness.metrics import Figures
from benchmarks.harness.ops import SCENARIOS, Sizes
from benchmarks.harness.systems import Own, System, all_systems, device_systems
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.commands import aligned
from tests.ranks import RanksFailed

_NOISY = 0.05
"""Ops that took longer than this above their time: the machine was too busy."""
Key = tuple[str, str]
"""System and scenario."""


@dataclass
class Measured:
    """All systems at one size."""

    sizes: Sizes
    systems: dict[str, System]
    conditions: str = ""
    figures: dict[Key, Figures] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def speeds(self, key: Key) -> tuple[float, float] | None:
        """Return how much faster a dynamic order was than its table, and should have been.

        Medians over the draws, as measured and with the simulated times of both orders that ran;
        None for other systems, or without a table.
        """
        (name, scenario), mine = key, self.figures[key]
        dynamic, own = self.systems[name], [s for s in self.systems.values() if isinstance(s, Own)]
        if not (isinstance(dynamic, Own) and dynamic.dynamic):
            return None
        tables = (s.name for s in own if s.splits and s.schedule == dynamic.schedule)
        table = self.figures.get((next(tables, ""), scenario))
        return None if table is None else (
            statistics.median(ratios(table.seconds, mine.seconds)),
            statistics.median(ratios(table.order_s, mine.order_s)),
        )  # fmt: skip


def compare(
    systems: list[System], sizes: Sizes, names: list[str], repetitions: int, *, on_device: bool
) -> Measured:
    """Run all systems in turn; all but dynamic orders and their table undisturbed on a device."""
    found = Measured(sizes, {system.name: system for system in systems})
    before = machine()
    where, what = ranks.emulated_device(sizes) if on_device else ({}, "peers over gloo")
    for system in systems:
        fixed = on_device and not (isinstance(system, Own) and (system.dynamic or system.splits))
        try:
            each = scenarios.measure(
                system, sizes, ["quiet"] if fixed else names, repetitions, **where
            )
        except (ScheduleError, RanksFailed) as error:
            found.failures[system.name] = str(error)
            continue
        found.figures.update({(system.name, name): figures for name, figures in each.items()})
    found.conditions = (
        f"pp {sizes.pp}, {sizes.num_microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {1e3 * sizes.forward_s:g} ms, {what}, median of {sizes.steps} steps, each the "
        f"shortest of {repetitions}; {before} before"
    )
    return found


_ON_HOST = ("system", "T ms", "T/ideal", "order", "replay %", "ops %", "peak act.", "of order",
            "weights", "ops", "hops", "gap us", "hop us", "cpu %")  # fmt: skip
_ON_DEVICE = ("system", "T ms", "T/ideal", "order", "T/order", "replay %", "ops %", "waits",
              "speed", "of orders")  # fmt: skip


def cells(measured: Measured, key: Key, found: Figures) -> dict[str, str]:
    """Return the text of every column."""
    name, scenario = key
    speed, of_orders = measured.speeds(key) or (None, None)
    return {
        "system": name if scenario == "quiet" else f"{name}, {scenario}",
        "T ms": f"{1e3 * found.median_s:.0f}",
        "T/ideal": f"{found.median_s / measured.sizes.work_s:.3f}",
        "order": f"{found.optimum_s / measured.sizes.work_s:.3f}",
        "T/order": f"{statistics.median(ratios(found.seconds, found.order_s)):.3f}",
        "replay %": f"{100 * statistics.median(found.overheads):.1f}",
        "ops %": f"{'!' * (found.op_inflation > _NOISY)}{100 * found.op_inflation:.1f}",
        "peak act.": f"{found.peak_live:g}",
        "of order": f"{found.peak_of_order:g}",
        "weights": f"{measured.systems[name].weight_copies}x",
        "ops": f"{found.num_ops}",
        "hops": f"{found.hops:g}",
        "gap us": f"{1e6 * found.gap_s:.0f}",
        "hop us": f"{1e6 * found.hop_s:.0f}",
        "cpu %": f"{100 * found.cpu_s / found.median_s:.1f}",
        "waits": f"{found.waits_per_action:.2f}",
        "speed": figure(speed, ".3f"),
        "of orders": figure(of_orders, ".3f"),
    }


_QUICK = ("megatron-core 1F1B", "gloo: 1f1b", "communicator: 1f1b", "ipc: 1f1b")


def main() -> int:
    """Measure and print; 1 if a system failed."""
    parser = options(__doc__, "few systems, few and short actions", only=True)
    add = parser.add_argument
    add("--device", action="store_true", help="on the emulated device, which is behind its host")
    add("--pp", type=int, nargs="+", help="ranks of the pipeline (default: 4 8, or 4)")
    add("--microbatches", type=int, help="in one step; default: 4 for each rank")
    add("--steps", type=int, default=4, help="measured steps, after two others")
    add("--repetitions", type=int, default=1, help="of all steps")
    add("--forward-ms", type=float, help="forward of 1/pp of the model; either gradient takes as "
        "long; default: 160/pp, or 10")  # fmt: skip
    add("--scenario", nargs="+", choices=list(SCENARIOS), metavar="NAME",
        help=f"disturb ops: {', '.join(SCENARIOS)}")  # fmt: skip
    args = parser.parse_args()
    names = args.scenario or ["quiet", *["jitter-0.3"] * args.device]
    if args.device and any(SCENARIOS[name].delays_messages for name in names):
        parser.error("messages of the device are not late; give a scenario that disturbs ops")
    if args.quick:
        args.pp, args.microbatches, args.forward_ms, args.steps = [2], 4, 2.0, 1
        args.only, names = args.only or _QUICK, ["quiet"]
    systems = chosen(parser, device_systems() if args.device else all_systems(), args.only)
    ranks.clean_up_when_terminated()
    measured: list[Measured] = []
    for pp in args.pp or ([4] if args.device else [4, 8]):
        forward_ms = args.forward_ms or (10 if args.device else 160 / pp)
        warmup, count = 1 if args.quick else 2, args.microbatches or 4 * pp
        sizes = Sizes(pp, count, forward_ms / 1e3, warmup, args.steps)
        shown = systems
        if measured and not args.only:  # gloo's share shows at the first size already
            shown = [s for s in systems if not (isinstance(s, Own) and s.transport == "torch")]
        measured.append(compare(shown, sizes, names, args.repetitions, on_device=args.device))
    columns = _ON_DEVICE if args.device else _ON_HOST
    texts = []
    for one in measured:
        every = [cells(one, key, found) for key, found in one.figures.items()]
        rows = [columns, *([row[name] for name in columns] for row in every)]
        texts.append(f"```text\n{aligned(rows)}\n```\n\n{one.conditions}.")
        for name, reason in one.failures.items():
            print(f"\n{name}: {reason}", file=sys.stderr)
    print("<!-- measured: begin -->\n" + "\n\n".join(texts) + "\n<!-- measured: end -->")
    write_json(args.json, {"measured": [
        {"conditions": found.conditions, "pp": found.sizes.pp, "failures": found.failures,
         "systems": [{"system": name, "scenario": scenario, **asdict(figures),
                      "speeds": found.speeds((name, scenario))}
                     for (name, scenario), figures in found.figures.items()]}
        for found in measured
    ]})  # fmt: skip
    return 1 if any(found.failures for found in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
