"""Pipeline schedules and runtimes side by side, on emulated stages.

    python benchmarks/schedules.py [--pp P ...] [--microbatches M] [--only TEXT ...] [--steps N]
        [--rounds N] [--forward-ms T] [--json FILE] [--svg FILE] [--markdown]

All figures of the documentation come from one run of `--markdown --svg docs/images/measured.svg`: 4
and 8 ranks, 15 minutes. With several sizes the first runs all systems, the others leave out this
package's schedules over gloo, unless `--only` selects systems.

Every system runs the same model in real processes with real messages; stages emulate computation by
sleeping. Each rank is bound to CPUs of its own, or shares one if there are too few. Columns of the
table:

    T ms       median step time, from the start of the first rank to the end of the last
    T/ideal    T over the work of one rank, which is the time without any bubble
    order      T/ideal of the order that ran, with exact ops and free messages
    replay %   overhead of runtime and messages over that order with the measured ops
    ops %      excess of ops over their sleep; marked ! above 5: the machine is too busy
    peak act.  peak of live activations, as tensors in memory, on the worst rank; the unit is the
               activations of one micro-batch on 1/pp of the model
    of order   activations that the order must hold
    weights    copies of each weight
    ops        actions of a rank
    hops       messages on the longest path of the order: their latency extends the step
    gap us     from the end of an op to the start of the next on its rank, if it waits for nothing
    hop us     from the end of an op to the start of one on another rank that waits for it
    cpu %      CPU time of a rank over T: beyond cores/pp ranks wait for cores

With `--scenario NAME ...` (or `all`) ops and messages take random times, and dynamic orders are
compared with static ones. Every step of `--steps` is another draw, the same for all systems, and
`--rounds` repeats the draws. Then the columns are, as median (lowest .. highest) of the draws:

    T/ideal    as above, over the undisturbed work of a rank
    speed      T of the first system over T, at the same draw: above 1 is faster

Sleeping ops say nothing about kernels, memory bandwidth or collectives that share a GPU with them.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import expected, launch, rank, report, scenarios  # noqa: E402
from benchmarks.schedule_harness.metrics import Figures, evaluate  # noqa: E402
from benchmarks.schedule_harness.noise import SCENARIOS  # noqa: E402
from benchmarks.schedule_harness.ops import Sizes, Step  # noqa: E402
from benchmarks.schedule_harness.systems import (  # noqa: E402
    Own,
    System,
    all_systems,
    disturbed_systems,
)
from benchmarks.schedule_harness.wakeup import wakeup_s  # noqa: E402
from megatron_ext.errors import ScheduleError  # noqa: E402
from tests.ranks import RanksFailed  # noqa: E402


@dataclass
class Result:
    """Figures of one system so far."""

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


@dataclass
class Measured:
    """All systems at one size."""

    sizes: Sizes
    conditions: str
    figures: dict[str, Figures]
    failures: dict[str, str]

    @property
    def size(self) -> str:
        """The size in words."""
        return f"pp {self.sizes.pp}, {self.sizes.num_microbatches} micro-batches"

    def as_dict(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        weights = _weights()
        return {
            "conditions": self.conditions,
            "pp": self.sizes.pp,
            "num_microbatches": self.sizes.num_microbatches,
            "forward_s": self.sizes.forward_s,
            "systems": {n: {**f.as_dict(), "weights": weights[n]} for n, f in self.figures.items()},
            "failures": self.failures,
        }


def _weights() -> dict[str, int]:
    return {system.name: system.weight_copies for system in all_systems()}


def figures_of(results: dict[str, Result], sizes: Sizes) -> dict[str, Figures]:
    """Return the figures of the systems that ran."""
    systems = [s for s in all_systems() if s.name in results and results[s.name].steps]
    return {
        system.name: evaluate(
            results[system.name].steps,
            system.placement(sizes.pp),
            system.times(sizes),
        )
        for system in systems
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pp",
        type=int,
        nargs="+",
        default=[],
        help="processes, the ranks of the pipeline; default: 4 8, with --scenario 4",
    )
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
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two others")
    parser.add_argument("--rounds", type=int, default=1, help="how often all of that is done")
    parser.add_argument(
        "--forward-ms",
        type=float,
        help="forward of 1/pp of the model; either gradient takes as long; default: 160/pp",
    )
    parser.add_argument("--timeout-s", type=float, default=60.0, help="for every wait")
    add_json(parser)
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
    args.pp = args.pp or ([4] if args.scenario else [4, 8])
    if args.scenario and len(args.pp) > 1:
        parser.error("--scenario takes one --pp")
    return args


def sizes_of(args: argparse.Namespace, pp: int) -> Sizes:
    """Return how much is run on so many ranks."""
    return Sizes(
        pp=pp,
        num_microbatches=args.microbatches or 4 * pp,
        forward_s=(args.forward_ms or 160 / pp) / 1e3,
        warmup=2,
        steps=args.steps,
        timeout_s=args.timeout_s,
    )


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


def chosen_at(args: argparse.Namespace, pp: int) -> list[System]:
    """Return those of one size: beyond the first, ours over gloo are left out."""
    systems = chosen(args)
    if args.only or pp == args.pp[0]:
        return systems
    return [s for s in systems if not (isinstance(s, Own) and s.transport == "torch")]


def conditions(args: argparse.Namespace, sizes: Sizes, load: float) -> str:
    """Say under which conditions the figures were taken."""
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    woken_us = 1e6 * wakeup_s(sizes.forward_s)
    return (
        f"pp {sizes.pp}, {sizes.num_microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {1e3 * sizes.forward_s:g} ms, peers over gloo, median of "
        f"{args.steps * args.rounds} steps; {packages}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, load average {load:.1f}, "
        f"{woken_us:.0f} us to wake a process by a pipe"
    )


def write(args: argparse.Namespace, measured: list[Measured]) -> None:
    """Print the tables and write the files that were asked for."""
    texts = []
    for found in measured:
        lines = report.table(found.figures, _weights())
        if args.markdown:
            lines = f"```text\n{lines}\n```"
        texts.append(f"{lines}\n\n{found.conditions}.\n\n{report.explain(found.figures)}")
        for name, reason in found.failures.items():
            print(f"\n{name}: {reason}", file=sys.stderr)
    text = "\n\n".join(texts)
    print(f"<!-- measured: begin -->\n{text}\n<!-- measured: end -->" if args.markdown else text)
    if args.json:
        content = {"measured": [found.as_dict() for found in measured]}
        write_json(args.json, content)
    if args.svg:
        args.svg.write_text(report.draw({m.size: m.figures for m in measured}), encoding="utf-8")


def compare_disturbed(args: argparse.Namespace, sizes: Sizes) -> int:
    """Measure and print the scenarios; 1 if a system failed."""
    if args.simulate:
        measured = expected.expect(chosen(args), sizes, args.scenario)
        text = (
            f"pp {sizes.pp}, {sizes.num_microbatches} micro-batches, simulated, {args.steps} draws"
        )
    else:
        measured = scenarios.measure(chosen(args), sizes, args.scenario, args.rounds)
        text = conditions(args, sizes, os.getloadavg()[1])
    write_as = scenarios.summary if args.markdown else scenarios.tables
    print(f"{text}\n\n{write_as(measured)}")
    if args.json:
        content = {"conditions": text, **measured.as_dict()}
        write_json(args.json, content)
    return 1 if measured.failures else 0


def compare(args: argparse.Namespace, pp: int) -> Measured:
    """Measure the schedules at one size."""
    sizes = sizes_of(args, pp)
    results = measure(chosen_at(args, pp), sizes, args.rounds)
    failures = {name: found.failure for name, found in results.items() if found.failure}
    text = conditions(args, sizes, os.getloadavg()[1])
    return Measured(sizes, text, figures_of(results, sizes), failures)


def main() -> int:
    """Measure and print; 1 if a system failed."""
    args = parse()
    launch.clean_up_when_terminated()
    if args.scenario:
        return compare_disturbed(args, sizes_of(args, args.pp[0]))
    measured = [compare(args, pp) for pp in args.pp]
    write(args, measured)
    return 1 if any(found.failures for found in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
