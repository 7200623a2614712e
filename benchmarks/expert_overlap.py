"""How much of the experts' all-to-all pairs hide, and what a step then takes.

    python benchmarks/expert_overlap.py [--pp P] [--microbatches M] [--experts N] [--forward-ms T]
        [--all-to-all SHARE ...] [--steps N] [--connections N] [--only TEXT ...] [--quick]
        [--json FILE]

Runs on the emulated device that runs behind its host, as schedules.py --device does, with a C++
compiler and megatron-core 0.19 or later: earlier ones make plans of their own models only.
Each layer computes attention, exchanges tokens, computes experts and exchanges tokens again; the
ranks of a group of experts meet in each exchange. Both of a pair run through Megatron's own plans,
the exchanges in their stream. `--all-to-all` is the time of the exchanges over the computation of
the same layer, in the forward and in the input gradient. Columns:

    T ms         the shortest step, from the first rank's begin until all devices are idle
    work/T       computation of one rank over T; no order can have more than 1
    T/bound      T over the simulated time of the table, where a pair takes the larger of both
    hidden %     of what pairs could hide: of each, the smaller of computation and all-to-all
    of all %     of all all-to-all; that of warm-up and cool-down has no partner
    gain         simulated time of the same table without pairs over T
    upstream     T over that of Megatron's own overlap under its interleaved schedule
    activations  on the worst rank, in those of one micro-batch on 1/pp of the model
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import add_only, chosen, machine, markdown
from benchmarks.schedule_harness import expert_steps, launch
from benchmarks.schedule_harness.expert_steps import ExpertFigures, expert_systems
from benchmarks.schedule_harness.ops import Sizes
from megatron_ext.errors import ScheduleError
from megatron_ext.upstream import releases
from tests.fake_musa.build import NoCompiler
from tests.fake_musa.queued import queued
from tests.ranks import RanksFailed

_COSTS = {"copy_us": 10.0, "copied_per_us": 20_000.0, "message_us": 30.0}
"""As with schedules.py --device."""
_UPSTREAM = "megatron-core interleaved, overlap"
_QUICK = (_UPSTREAM, "zb-v, pairs", "zb-v")

Found = Mapping[str, Mapping[float, ExpertFigures]]
"""By system, then by share of all-to-all."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=4, help="ranks of a pipeline")
    parser.add_argument("--microbatches", type=int, default=16, help="in one step")
    parser.add_argument("--experts", type=int, default=2, help="ranks that exchange tokens")
    parser.add_argument(
        "--forward-ms", type=float, default=40.0, help="computation of 1/pp of the model"
    )
    parser.add_argument(
        "--all-to-all",
        type=float,
        nargs="+",
        default=[0.3, 0.6, 1.0],
        metavar="SHARE",
        help="time of the exchanges over that computation",
    )
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after another one")
    parser.add_argument(
        "--connections",
        type=int,
        default=32,
        help="hardware queues of a device; exchanges in one with other streams wait for them",
    )
    add_only(parser)
    parser.add_argument("--quick", action="store_true", help="three systems, a few short actions")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for every wait")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.pp, args.microbatches, args.forward_ms = 2, 4, 8.0
        args.steps, args.all_to_all = 1, [0.6]
    systems = expert_systems(args.experts)
    args.systems = chosen(parser, systems, args.only)
    if args.quick:
        args.systems = [system for system in systems if system.name in _QUICK]
    return args


def measure(args: argparse.Namespace, sizes: Sizes) -> tuple[Found, list[str]]:
    """Run all systems; return the figures and what failed."""
    costs = {**_COSTS, "lag_us": 1e3 * args.forward_ms}
    env = queued(connections=args.connections, stuck_s=args.timeout_s / 2, **costs)
    found, failed = {}, []
    for system in args.systems:
        print(system.name, file=sys.stderr)
        try:
            system.check(sizes.pp, sizes.num_microbatches)
            steps = launch.run(
                expert_steps.measure_experts, system, sizes, args.all_to_all,
                repeats=2 * len(args.all_to_all), replicas=args.experts, device="musa", env=env,
            )  # fmt: skip
        except (ScheduleError, RanksFailed) as error:
            failed.append(f"{system.name}: {error}")
            continue
        found[system.name] = expert_steps.expert_figures(steps, system, sizes, args.all_to_all)
    return found, failed


_HEADER = (
    "order", "T ms", "work/T", "T/bound", "hidden %", "of all %", "gain", "upstream",
    "activations",
)  # fmt: skip


def table(found: Found, part: float) -> str:
    """Return the figures of one share of all-to-all as a Markdown table."""
    rows = []
    upstream = found.get(_UPSTREAM)
    for name, by_share in found.items():
        figures = by_share[part]
        step_s = figures.step_s
        rows.append(
            (
                name,
                f"{1e3 * step_s:.0f}",
                f"{figures.work_s / step_s:.3f}",
                "" if figures.bound_s is None else f"{step_s / figures.bound_s:.3f}",
                "" if figures.hidden is None else f"{100 * figures.hidden:.1f}",
                f"{100 * figures.of_all:.1f}",
                "" if figures.plain_s is None else f"{figures.plain_s / step_s:.3f}",
                "" if upstream is None else f"{step_s / upstream[part].step_s:.3f}",
                f"{figures.activations:g}",
            )
        )
    return markdown(_HEADER, rows, align="---:")


def conditions(args: argparse.Namespace, before: str) -> str:
    """Return what was measured, and on what machine, as it was before."""
    return (
        f"pp {args.pp}, {args.experts} ranks of experts, {args.microbatches} micro-batches, "
        f"{expert_steps.LAYERS} layers on each rank, forward = input gradient = weight gradient = "
        f"{args.forward_ms:g} ms besides the exchanges, {args.connections} hardware queues, a "
        f"message {_COSTS['message_us']:g} us, the shortest of {args.steps} steps; {before} "
        "before"
    )


def main() -> int:
    """Measure and print; 1 if a system failed."""
    args = parse()
    release = releases.installed_release()
    if release is not None and release < (0, 19):
        raise SystemExit(
            f"expert_overlap.py: megatron-core {releases.core_version()} makes plans of its own "
            "models only, not of emulated ones; install 0.19 or later"
        )
    launch.clean_up_when_terminated()
    before = machine()
    sizes = Sizes(
        pp=args.pp,
        num_microbatches=args.microbatches,
        forward_s=args.forward_ms / 1e3,
        warmup=1,
        steps=args.steps,
        timeout_s=args.timeout_s,
    )
    try:
        found, failed = measure(args, sizes)
    except NoCompiler as error:
        raise SystemExit(
            f"expert_overlap.py: the emulated device cannot be built: {error}"
        ) from None
    for part in args.all_to_all:
        print(f"All-to-all {part:g} of a layer's computation:\n\n{table(found, part)}\n")
    text = conditions(args, before)
    print(f"{text}.")
    for reason in failed:
        print(f"\n{reason}", file=sys.stderr)
    if args.json:
        rows = [
            {"system": name, "all_to_all": part, **asdict(figures)}
            for name, by_share in found.items()
            for part, figures in by_share.items()
        ]
        write_json(args.json, {"conditions": text, "measured": rows, "failures": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
