"""Pipeline schedules and runtimes side by side, on emulated stages, or on an emulated device.

    python benchmarks/schedules.py [--pp P ...] [--microbatches M] [--forward-ms T] [--steps N]
        [--only TEXT ...] [--json FILE] [--svg FILE] [--quick]
    python benchmarks/schedules.py --device [--scenario NAME ...] [--repetitions N] ...

Every system runs the same model in real processes with real messages; stages emulate computation by
sleeping. Each rank is bound to CPUs of its own, or shares one if there are too few. All figures of
the documentation come from one run with `--svg docs/images/measured.svg`: 4 and 8 ranks, 15
minutes. With several sizes the first runs all systems, the others leave out this package's
schedules over gloo, unless `--only` selects systems.

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

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import add_only, chosen, machine, ratios
from benchmarks.schedule_harness import launch, scenarios
from benchmarks.schedule_harness.noise import SCENARIOS
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.systems import Own, System, all_systems, device_systems
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.commands import aligned
from tests.fake_musa.build import NoCompiler
from tests.fake_musa.queued import queued
from tests.ranks import RanksFailed

if TYPE_CHECKING:
    from benchmarks.schedule_harness.metrics import Figures

_NOISY = 0.05
"""Ops that took longer than this above their time: the machine was too busy."""
_ANSWER_S = 60.0
_DEVICE = {"connections": 8, "copy_us": 10.0, "copied_per_us": 20_000.0, "message_us": 30.0}
"""Its hardware queues; what a copy between devices and an operation of a communicator take beside
their launch."""


def wakeup_s(idle_s: float, num_samples: int = 25) -> float:
    """Return the median time from a write to a pipe until its reader, asleep, goes on.

    No message costs less. Reader and writer are on different CPUs if there are several, and idle
    for `idle_s` before each sample.

    Raises:
        TimeoutError: The reader does not answer.
    """
    context = multiprocessing.get_context("fork")
    there, here = context.Pipe(duplex=True)
    reader = context.Process(target=_read, args=(there, num_samples), daemon=True)
    reader.start()
    there.close()
    found_s = []
    for _ in range(num_samples):
        time.sleep(idle_s)
        begin_s = time.perf_counter()
        here.send_bytes(b"wake up")
        if not here.poll(_ANSWER_S):
            raise TimeoutError(f"a process did not answer within {_ANSWER_S:g} s of a write to it")
        found_s.append(here.recv() - begin_s)
    reader.join(_ANSWER_S)
    here.close()
    return statistics.median(found_s)


def _read(connection: Connection, num_samples: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for _ in range(num_samples):
        connection.recv_bytes()
        connection.send(time.perf_counter())  # the clock is the machine's


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

    @property
    def ideal_s(self) -> float:
        """Undisturbed work of a rank."""
        return 3 * self.sizes.forward_s * self.sizes.num_microbatches

    def speeds(self, key: Key) -> tuple[float, float] | None:
        """Return how much faster a dynamic order was than its table, and should have been.

        Medians over the draws, as measured and with the simulated times of both orders that ran;
        None for other systems, or without a table.
        """
        name, scenario = key
        dynamic, mine = self.systems[name], self.figures[key]
        if not (isinstance(dynamic, Own) and dynamic.dynamic):
            return None
        for other, system in self.systems.items():
            is_table = isinstance(system, Own) and system.splits
            table = self.figures.get((other, scenario))
            if is_table and system.schedule == dynamic.schedule and table is not None:
                return (
                    statistics.median(ratios(table.seconds, mine.seconds)),
                    statistics.median(ratios(table.order_s, mine.order_s)),
                )
        return None


def compare(
    systems: list[System], sizes: Sizes, names: list[str], repetitions: int, **where: Any
) -> Measured:
    """Run all systems in turn; all but dynamic orders and their table undisturbed on a device."""
    found = Measured(sizes, {system.name: system for system in systems})
    before = machine()
    for system in systems:
        fixed = where and not (isinstance(system, Own) and (system.dynamic or system.splits))
        try:
            each = scenarios.measure(
                system, sizes, ["quiet"] if fixed else names, repetitions, **where
            )
        except (ScheduleError, RanksFailed) as error:
            found.failures[system.name] = str(error)
            continue
        found.figures.update({(system.name, name): figures for name, figures in each.items()})
    if where:
        what = (
            f"{_DEVICE['connections']} hardware queues, a copy {_DEVICE['copy_us']:g} us and "
            f"{_DEVICE['copied_per_us'] / 1e3:g} GB/s, a message of a communicator "
            f"{_DEVICE['message_us']:g} us"
        )
    else:
        pipe_us = 1e6 * wakeup_s(sizes.forward_s)
        what = f"peers over gloo, {pipe_us:.0f} us to wake a process by a pipe"
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
        "T/ideal": f"{found.median_s / measured.ideal_s:.3f}",
        "order": f"{found.optimum_s / measured.ideal_s:.3f}",
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
        "speed": "" if speed is None else f"{speed:.3f}",
        "of orders": "" if of_orders is None else f"{of_orders:.3f}",
    }


def table(measured: Measured, columns: Sequence[str]) -> str:
    """Return the comparison as text."""
    every = [cells(measured, key, found) for key, found in measured.figures.items()]
    return aligned([columns, *([row[name] for name in columns] for row in every)])


def _parts(found: Figures) -> list[tuple[str, float, str]]:
    """Return what a step takes beyond ideal: name, seconds, and what that is."""
    replay_s = statistics.median(found.replays_s)
    return [
        ("order", found.optimum_s - found.ideal_s, "bubble of the order that ran"),
        ("ops", replay_s - found.optimum_s, "ops that took longer"),
        ("replay", found.median_s - replay_s, "runtime and messages"),
    ]


_ROW, _TOP, _NAME, _SCALE, _BAR = 22, 46, 290, 600, 15
_STYLE = """\
text { font: 12px sans-serif; fill: #1f2328 }
.axis { stroke: #8888; stroke-width: 1 }
.order { fill: #79b8ff } .ops { fill: #d0d7de } .replay { fill: #f9b384 }
.own .order { fill: #388bfd } .own .ops { fill: #afb8c1 } .own .replay { fill: #e5714b }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }"""


def draw(measured: list[Measured]) -> str:
    """Return bars as SVG: what each system takes beyond ideal, as a share of it."""
    every = [found for one in measured for found in one.figures.values()]
    scale = _SCALE / max([0.1, *(found.ratio - 1 for found in every)])
    title, width = "time beyond ideal, measured", _NAME + _SCALE + 60
    height = _TOP + _ROW * (len(every) + 2 * len(measured)) + 34
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<text x="4" y="17">{title}</text>',
    ]
    bottom = _TOP
    for one in measured:
        size = f"pp {one.sizes.pp}, {one.sizes.num_microbatches} micro-batches"
        parts.append(f'<text x="4" y="{bottom + 12}" font-weight="bold">{size}</text>')
        top = bottom + _ROW
        bottom = top + _ROW * len(one.figures)
        for index, ((name, _), found) in enumerate(one.figures.items()):
            parts += _bar(name, found, top + _ROW * index, scale)
        parts.append(f'<path class="axis" d="M{_NAME} {top - 6}V{bottom}"/>')
        bottom += _ROW
    for index, (kind, _, text) in enumerate(_parts(every[0]) if every else ()):
        left = _NAME + 210 * index
        parts.append(f'<rect class="{kind}" x="{left}" y="{bottom + 8}" width="12" height="12"/>')
        parts.append(f'<text x="{left + 17}" y="{bottom + 18}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, found: Figures, y: int, scale: float) -> Iterator[str]:
    style, x = ' class="own"' if name.startswith("megatron_ext") else "", float(_NAME)
    yield f"<g{style}>"
    yield f'<text x="4" y="{y + 12}">{escape(name)}</text>'
    reached_s = until_s = found.ideal_s
    for kind, took_s, _ in _parts(found):  # a part may be negative
        until_s += took_s
        length = scale * max(0.0, until_s - reached_s) / found.ideal_s
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_BAR}"/>'
        x, reached_s = x + length, max(reached_s, until_s)
    yield f'<text x="{x + 5:.1f}" y="{y + 12}">+{100 * (found.ratio - 1):.1f} %</text>'
    yield "</g>"


_QUICK = ("megatron-core 1F1B", "gloo: 1f1b", "communicator: 1f1b", "ipc: 1f1b")


def main() -> int:
    """Measure and print; 1 if a system failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    add("--svg", type=Path, help="also draw them to this file")
    add("--quick", action="store_true", help="few systems, few and short actions")
    add_only(parser)
    add_json(parser)
    args = parser.parse_args()
    names = args.scenario or ["quiet", *["jitter-0.3"] * args.device]
    if args.device and any(SCENARIOS[name].delays_messages for name in names):
        parser.error("messages of the device are not late; give a scenario that disturbs ops")
    if args.quick:
        args.pp, args.microbatches, args.forward_ms, args.steps = [2], 4, 2.0, 1
        args.only, names = args.only or _QUICK, ["quiet"]
    systems = chosen(parser, device_systems() if args.device else all_systems(), args.only)
    launch.clean_up_when_terminated()
    measured = []
    for pp in args.pp or ([4] if args.device else [4, 8]):
        count, forward_ms = args.microbatches or 4 * pp, 10 if args.device else 160 / pp
        forward_ms = args.forward_ms or forward_ms
        sizes = Sizes(pp, count, forward_ms / 1e3, 1 if args.quick else 2, args.steps, 60.0)
        where: dict[str, Any] = {}
        if args.device:
            env = queued(stuck_s=sizes.timeout_s, lag_us=1e3 * forward_ms, **_DEVICE)
            where = {"device": "musa", "env": env}
        # Gloo's share shows at the first size already.
        shown = [s for s in systems if args.only or not measured or not _is_over_gloo(s)]
        try:
            measured.append(compare(shown, sizes, names, args.repetitions, **where))
        except NoCompiler as error:
            raise SystemExit(f"the emulated device cannot be built: {error}") from None
    columns = _ON_DEVICE if args.device else _ON_HOST
    texts = [f"```text\n{table(m, columns)}\n```\n\n{m.conditions}." for m in measured]
    print("<!-- measured: begin -->\n" + "\n\n".join(texts) + "\n<!-- measured: end -->")
    for found in measured:
        for name, reason in found.failures.items():
            print(f"\n{name}: {reason}", file=sys.stderr)
    if args.json:
        write_json(args.json, {"measured": [
            {"conditions": found.conditions, "pp": found.sizes.pp, "failures": found.failures,
             "systems": [{"system": name, "scenario": scenario, **asdict(figures),
                          "speeds": found.speeds((name, scenario))}
                         for (name, scenario), figures in found.figures.items()]}
            for found in measured
        ]})  # fmt: skip
    if args.svg:
        args.svg.write_text(draw(measured), encoding="utf-8")
    return 1 if any(found.failures for found in measured) else 0


def _is_over_gloo(system: System) -> bool:
    return isinstance(system, Own) and system.transport == "torch"


if __name__ == "__main__":
    sys.exit(main())
