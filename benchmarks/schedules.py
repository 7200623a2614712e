"""Pipeline schedules and runtimes side by side, on emulated stages or on an emulated device.

    python benchmarks/schedules.py [--pp P ...] [--microbatches M] [--forward-ms T] [--steps N]
        [--only TEXT ...] [--json FILE] [--quick]
    python benchmarks/schedules.py --device [--scenario NAME ...] [--repetitions N] ...

Every system runs the same model in real processes with real messages, and stages emulate
computation by sleeping. With several sizes, all systems run at the first size, and the other sizes
skip this package's schedules over gloo, unless `--only` selects some. The run takes 15 minutes.
`--device` uses the tests' emulated device (tests/fake_musa/README.md), which runs behind its host
and needs a C++ compiler; this takes three minutes. docs/results-schedules.md and
docs/results-devices.md explain the columns.

With `--scenario`, ops take random times, and each of the `--steps` is a different draw, which is
the same for all systems. With `--repetitions`, only the shortest time of each draw counts, because
other load only adds time. `dynamic_order.py` compares orders this way.

Sleeping ops say nothing about kernels, memory bandwidth, or collectives that share a GPU with them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks
from benchmarks.harness.command import chosen, options, write_json
from benchmarks.harness.comparison import (
    ON_DEVICE,
    ON_HOST,
    Compared,
    compare,
    report_failures,
    table,
)
from benchmarks.harness.ops import SCENARIOS, Sizes
from benchmarks.harness.systems import Own, System, all_systems, device_systems

_QUICK = ("megatron-core 1F1B", "gloo: 1f1b", "communicator: 1f1b", "ipc: 1f1b")


def main() -> int:
    """Measure, print the results, and return 1 if a system failed."""
    parser = options(
        __doc__,
        "only a few systems, with few and short actions",
        only=True,
        figures=True,
    )
    add = parser.add_argument
    add(
        "--device",
        action="store_true",
        help="use the emulated device, which runs behind its host",
    )
    add(
        "--pp",
        type=int,
        nargs="+",
        help="pipeline ranks (default: 4 8, or 4 with --device)",
    )
    add("--microbatches", type=int, help="micro-batches per step (default: 4 per rank)")
    add(
        "--steps",
        type=int,
        default=4,
        help="number of measured steps, after two warm-up steps",
    )
    add("--repetitions", type=int, default=1, help="repetitions of all steps")
    add("--forward-ms", type=float, help="forward of 1/pp of the model; each gradient takes the "
        "same time (default: 160/pp, or 10 with --device)")  # fmt: skip
    add("--scenario", nargs="+", choices=list(SCENARIOS), metavar="NAME",
        help=f"disturb ops: {', '.join(SCENARIOS)}")  # fmt: skip
    args = parser.parse_args()
    scenarios = _scenarios(parser, args)
    available = all_systems()
    pps = [4, 8]
    if args.device:
        available = device_systems()
        pps = [4]
    systems = chosen(parser, available, args.only)
    ranks.clean_up_when_terminated()
    measured: list[Compared] = []
    for pp in args.pp or pps:
        # The first size already shows the effect of gloo.
        leaves_gloo_out = bool(measured) and not args.only
        selection = []
        for system in systems:
            if not (leaves_gloo_out and _is_over_gloo(system)):
                names = _scenarios_of(system, scenarios, on_device=args.device)
                selection.append((system, names))
        sizes = _sizes(args, pp)
        environment = ranks.emulated_device(sizes) if args.device else {}
        measured.append(compare(selection, sizes, args.repetitions, **environment))
    columns = ON_DEVICE if args.device else ON_HOST
    texts = []
    for compared in measured:
        texts.append(
            f"```text\n{table([compared], columns)}\n```\n\n{compared.conditions}."
        )
    print(
        "<!-- measured: begin -->\n" + "\n\n".join(texts) + "\n<!-- measured: end -->"
    )
    write_json(args.json, {"measured": [compared.as_json() for compared in measured]})
    return report_failures(measured)


def _scenarios(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the scenarios to run. With `--quick`, also make everything else small."""
    scenarios = args.scenario or ["quiet"]
    if args.device and args.scenario is None:
        scenarios = ["quiet", "jitter-0.3"]
    if args.device and any(SCENARIOS[name].delays_messages for name in scenarios):
        parser.error(
            "the device's messages are never late; choose a scenario that disturbs ops"
        )
    if args.quick:
        args.pp, args.microbatches, args.forward_ms, args.steps = [2], 4, 2.0, 1
        args.only, scenarios = args.only or _QUICK, ["quiet"]
    return scenarios


def _sizes(args: argparse.Namespace, pp: int) -> Sizes:
    """Return the sizes for a measurement with `pp` ranks."""
    default_ms = 10 if args.device else 160 / pp
    forward_ms = args.forward_ms or default_ms
    warmup = 1 if args.quick else 2
    return Sizes(pp, args.microbatches or 4 * pp, forward_ms / 1e3, warmup, args.steps)


def _is_over_gloo(system: System) -> bool:
    return isinstance(system, Own) and system.config.wire == "torch"


def _scenarios_of(
    system: System, scenarios: list[str], *, on_device: bool
) -> list[str]:
    """Return a system's scenarios. On a device, only dynamic orders and their table have them."""
    varies = isinstance(system, Own) and (system.config.dynamic or system.splits)
    return scenarios if varies or not on_device else ["quiet"]


if __name__ == "__main__":
    sys.exit(main())
