"""Pipeline schedules and runtimes side by side, on emulated stages.

    python benchmarks/schedules.py [--pp P] [--microbatches M] [--only TEXT ...] [--steps N]
        [--rounds N] [--forward-ms T] [--json FILE] [--svg FILE] [--markdown]

Every system runs the same model in real processes with real messages; computation is emulated by
sleeping. Columns of the table:

    T ms       median time of a step, from the first rank's begin to the last rank's end
    T/ideal    the same over the work of one rank, the time without any bubble
    order      what T/ideal would be for the order that ran, with exact ops and free messages
    replay %   what the runtime and its messages added to that order with the ops as they were
    ops %      how much longer ops took than they sleep; marked ! above 5: a machine too busy
    peak act.  activations alive at once, as tensors in memory, on the worst rank; in those of
               one micro-batch on 1/pp of the model
    of order   activations that the order must keep
    weights    how often each weight is stored

With `--scenario NAME ...` (or `all`) ops and messages take random times, and orders that ranks
choose by themselves are compared with fixed ones. Every step of the `--steps` is another draw, the
same for all systems, and `--rounds` repeats the draws. Then the columns are, as median (lowest ..
highest) of the draws:

    T/ideal    as above, over the work of a rank that nothing disturbs
    speed      T of the first system over T, at the same draw: above 1 is faster

Sleeping ops say nothing about kernels, memory bandwidth or collectives that share a GPU with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.schedule_harness import expected, launch, rank, report, scenarios  # noqa: E402
from benchmarks.schedule_harness.metrics import Figures, evaluate  # noqa: E402
from benchmarks.schedule_harness.noise import SCENARIOS  # noqa: E402
from benchmarks.schedule_harness.ops import OpTimes, Sizes, Step  # noqa: E402
from benchmarks.schedule_harness.systems import (  # noqa: E402
    System,
    all_systems,
    disturbed_systems,
)
from megatron_ext.errors import ScheduleError  # noqa: E402
from tests.ranks import RanksFailed  # noqa: E402


@dataclass
class Result:
    """What is known of one system so far."""

    steps: list[list[Step]] = field(default_factory=list)
    """By rank."""
    failure: str | None = None

    def measure(self, system: System, sizes: Sizes) -> None:
        """Run a system on as many processes as the pipeline has ranks, unless it failed before."""
        if self.failure is not None:
            return
        try:
            system.check(sizes.pp, sizes.num_microbatches)
            steps = launch.run(rank.measure, system, sizes)
        except (ScheduleError, RanksFailed) as error:
            self.failure = str(error)
            return
        earlier = self.steps or [[] for _ in steps]
        self.steps = [old + new for old, new in zip(earlier, steps, strict=True)]


def measure(systems: list[System], sizes: Sizes, rounds: int) -> dict[str, Result]:
    """Run all systems in turn, round after round, so that a drift of the machine hits all alike."""
    results = {system.name: Result() for system in systems}
    for number in range(rounds):
        for index, system in enumerate(systems):
            place = f"round {number + 1} of {rounds}, {index + 1} of {len(systems)}"
            print(f"{place}: {system.name}", file=sys.stderr)
            results[system.name].measure(system, sizes)
    return results


def figures_of(results: dict[str, Result], sizes: Sizes) -> dict[str, Figures]:
    """Return the figures of the systems that ran."""
    systems = [s for s in all_systems() if s.name in results and results[s.name].steps]
    return {
        system.name: evaluate(
            results[system.name].steps,
            system.placement(sizes.pp),
            OpTimes(sizes.forward_s, system.share(sizes.pp)),
        )
        for system in systems
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=4, help="processes, the ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, help="in one step; default: 4 for each rank")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="systems whose name has one of these"
    )
    parser.add_argument(
        "--scenario",
        nargs="+",
        default=[],
        metavar="NAME",
        choices=["all", *SCENARIOS],
        help=f"disturb ops and messages: all, or of {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="with --scenario: compute what to expect of our own schedules instead of measuring",
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two others")
    parser.add_argument("--rounds", type=int, default=1, help="how often all of that is done")
    parser.add_argument(
        "--forward-ms",
        type=float,
        help="forward of 1/pp of the model; either gradient takes as long; default: 160/pp",
    )
    parser.add_argument("--timeout-s", type=float, default=60.0, help="for every wait")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--svg", type=Path, help="also draw them to this file")
    parser.add_argument(
        "--markdown", action="store_true", help="print the section of the documentation instead"
    )
    args = parser.parse_args(argv)
    if not chosen(args):
        names = "; ".join(system.name for system in systems_of(args))
        parser.error(f"no system has {' or '.join(args.only)} in its name; there are: {names}")
    if args.simulate and not args.scenario:
        parser.error("--simulate is for scenarios; add --scenario all")
    if "all" in args.scenario:
        args.scenario = list(SCENARIOS)
    args.microbatches = args.microbatches or 4 * args.pp
    args.forward_ms = args.forward_ms or 160 / args.pp
    return args


def systems_of(args: argparse.Namespace) -> list[System]:
    """Return all systems that can be compared in this way."""
    return disturbed_systems() if args.scenario else all_systems()


def chosen(args: argparse.Namespace) -> list[System]:
    """Return the systems to measure, those of the options."""
    return [
        system
        for system in systems_of(args)
        if not args.only or any(text in system.name for text in args.only)
    ]


def conditions(args: argparse.Namespace, load: float) -> str:
    """Say under which conditions the figures were taken."""
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    return (
        f"pp {args.pp}, {args.microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {args.forward_ms:g} ms, gloo, median of {args.steps * args.rounds} steps; "
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores, load average "
        f"{load:.1f}"
    )


def write(args: argparse.Namespace, figures: dict[str, Figures], failures: dict[str, str]) -> None:
    """Print the table and write the files that were asked for."""
    weights = {system.name: system.weight_copies for system in all_systems()}
    text = conditions(args, os.getloadavg()[1])
    lines = report.table(figures, weights)
    if args.markdown:
        print(f"<!-- measured: begin -->\n```text\n{lines}\n```\n\n{text}.\n<!-- measured: end -->")
    else:
        print(f"{text}\n\n{lines}")
    for name, reason in failures.items():
        print(f"\n{name}: {reason}", file=sys.stderr)
    if args.json:
        content: dict[str, Any] = {
            "conditions": text,
            "pp": args.pp,
            "num_microbatches": args.microbatches,
            "forward_s": args.forward_ms / 1e3,
            "systems": {n: {**f.as_dict(), "weights": weights[n]} for n, f in figures.items()},
            "failures": failures,
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.svg:
        title = f"time beyond ideal, measured: pp {args.pp}, {args.microbatches} micro-batches"
        args.svg.write_text(report.draw(figures, title), encoding="utf-8")


def compare_disturbed(args: argparse.Namespace, sizes: Sizes) -> int:
    """Measure and print the scenarios; 1 if a system failed."""
    if args.simulate:
        measured = expected.expect(chosen(args), sizes, args.scenario)
        text = f"pp {args.pp}, {args.microbatches} micro-batches, simulated, {args.steps} draws"
    else:
        measured = scenarios.measure(chosen(args), sizes, args.scenario, args.rounds)
        text = conditions(args, os.getloadavg()[1])
    write_as = scenarios.summary if args.markdown else scenarios.tables
    print(f"{text}\n\n{write_as(measured)}")
    if args.json:
        content = {"conditions": text, **measured.as_dict()}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if measured.failures else 0


def main() -> int:
    """Measure and print; 1 if a system failed."""
    args = parse()
    launch.clean_up_when_terminated()
    sizes = Sizes(
        pp=args.pp,
        num_microbatches=args.microbatches,
        forward_s=args.forward_ms / 1e3,
        warmup=2,
        steps=args.steps,
        timeout_s=args.timeout_s,
    )
    if args.scenario:
        return compare_disturbed(args, sizes)
    results = measure(chosen(args), sizes, args.rounds)
    figures = figures_of(results, sizes)
    failures = {name: found.failure for name, found in results.items() if found.failure}
    write(args, figures, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
