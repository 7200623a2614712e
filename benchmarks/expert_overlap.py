"""How much of the experts' all-to-all is hidden by pairs, and the resulting step time.

    python benchmarks/expert_overlap.py [--forward-ms T] [--connections N] [--only TEXT ...]
        [--imbalance X ... [--microbatches M] [--waiting N] [--waves N] [--exchange-share S]]
        [--quick]

Uses the emulated device that runs behind its host, like schedules.py --device. Needs a C++ compiler
and megatron-core 0.19 or later, because earlier releases can only plan their own models. Each layer
computes attention, exchanges tokens, computes experts and exchanges tokens again, and the two ranks
of an expert group meet in every exchange. Both actions of a pair run through Megatron's own plans,
with exchanges in a separate stream. Exchanges take a given share of the time of the same layer's
computation, in the forward and in the input gradient. Columns:

    work/T       one rank's computation over T, the shortest step, from when the first rank begins
                 until all devices are idle; at most 1 for any order
    T/bound      T over the table's simulated time, where a pair takes the larger of the two
    hidden %     of what pairs could hide: for each, the smaller of computation and all-to-all
    of all %     of all all-to-all, including that of warm-up and cool-down, which has no partner
    gain         simulated time of the same table without pairs over T
    upstream     T over that of Megatron's own overlap under its interleaved schedule
    activations  on the worst rank, in units of one micro-batch on 1/pp of the model

With `--imbalance`, experts get unequal numbers of tokens, and kernels share the device, which runs
one at a time, picks the highest priority among those that are ready, and never interrupts one.
Weight gradients consist of several kernels (`--waves`), because a GPU chooses between streams
whenever thread blocks finish. Exchanges use a share of the device. The imbalance is the largest
load among a layer's expert ranks over their mean. All orders run random loads with each imbalance,
half of whose deviation stays the same for the whole step, and the eight workloads from
Megatron-LM#7488, W0 (balanced) to W7. By default, a step has 64 micro-batches, because the floor
ignores the filling and draining of the pipeline, during which no pairs run. Columns:

    T/work       T over a rank's mean work
    T/busiest    T over the busiest rank's work, which is the floor for all orders
    gain         T of the same pairs without waiting weight gradients over T
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks, uneven
from benchmarks.harness.command import chosen, figure, machine, markdown, options
from benchmarks.harness.loads import Size
from benchmarks.harness.metrics import peak, seconds_of
from benchmarks.harness.ops import LAYERS, ExpertTimes, Sizes, Step
from benchmarks.harness.systems import VARIANTS, Own, Peer, System, loop2, own
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Costs, simulate
from megatron_ext.upstream import releases
from tests.ranks import RanksFailed

_EXPERTS = 2
"""Number of ranks that exchange tokens."""
_UPSTREAM = "megatron-core interleaved, overlap"


def systems() -> list[System]:
    """Return Megatron's own overlap and all our tables with pairs."""
    compared: list[System] = [
        Peer(_UPSTREAM, "megatron_core", "interleaved-overlap, experts", loop2)
    ]
    for label in VARIANTS:
        if label != "gpipe":  # runs no backward before the last forward
            compared.append(
                own(f"{label}, pairs", label, transport="torch", pairs=True)
            )
    return compared


@dataclass(frozen=True)
class Overlap:
    """One system's figures for one share of all-to-all, from its shortest step.

    Other load on the machine only adds time.
    """

    step_s: float
    """Time from when the first rank starts until all devices are idle."""
    bound_s: float | None
    """The table's simulated time, where a pair takes the larger of computation and all-to-all."""
    plain_s: float | None
    """The table's simulated time without pairs."""
    hidden: float | None
    """Fraction of the hideable all-to-all that pairs hid, or None if there are no pairs."""
    of_all: float
    """Fraction of all all-to-all that was hidden behind computation."""
    activations: float
    """Activations on the worst rank in any step, in units of one micro-batch on 1/pp of the
    model."""


def overlap(
    steps: Sequence[Sequence[Step]], system: System, sizes: Sizes, part: float
) -> Overlap:
    """Return the figures of a measurement.

    Args:
        steps: For each rank of the world, the steps with one share of all-to-all.
        system: The system that was measured.
        sizes: The sizes of the measurement.
        part: The share of all-to-all.
    """
    times = ExpertTimes(sizes.forward_s, system.share(sizes.pp), all_to_all=part)
    by_step: list[tuple[float, float | None, float]] = []
    most_activations = 0.0
    for of_step in zip(*steps, strict=True):
        hidden_s = hideable_s = exchange_total_s = 0.0
        for step in of_step:
            most_activations = max(most_activations, times.share * peak(step.ops))
            exchange_total_s += sum(map(times.exchange_s, step.ops))
            for first, second in pairwise(step.ops):
                if first.kind == "F" and first.begin_s == second.begin_s:
                    exchange_s = times.exchange_s(first) + times.exchange_s(second)
                    work_s = sum(
                        times.seconds(op.kind, op.stage, 0) for op in (first, second)
                    )
                    hidden_s += exchange_s + work_s - first.duration_s
                    hideable_s += min(exchange_s, work_s)
        hidden = hidden_s / hideable_s if hideable_s else None
        by_step.append(
            (
                seconds_of(of_step),
                hidden,
                hidden_s / exchange_total_s if exchange_total_s else 0.0,
            )
        )
    bound_s = plain_s = None
    if isinstance(system, Own):
        costs = Costs(1 + part, 1 + part, 1, all_to_all=part / (1 + part))
        without_pairs = replace(system, config=replace(system.config, pairs=False))
        steps_s = []
        for variant in (system, without_pairs):
            table = variant.pipeline(sizes.pp, sizes.num_microbatches).full
            steps_s.append(sizes.forward_s * simulate(table, costs).makespan)
        bound_s, plain_s = steps_s
    step_s, hidden, of_all = min(by_step, key=itemgetter(0))
    return Overlap(step_s, bound_s, plain_s, hidden, of_all, most_activations)


_HEADER = (
    "order",
    "work/T",
    "T/bound",
    "hidden %",
    "of all %",
    "gain",
    "upstream",
    "activations",
)


def table(overlaps: dict[str, Overlap], work_s: float) -> str:
    """Return the figures for one share of all-to-all as a Markdown table."""
    rows = []
    for name, figures in overlaps.items():
        step_s = figures.step_s
        rows.append((
            name,
            f"{work_s / step_s:.3f}",
            "" if figures.bound_s is None else f"{step_s / figures.bound_s:.3f}",
            figure(figures.hidden, ".1f", 100),
            f"{100 * figures.of_all:.1f}",
            figure(figures.plain_s, ".3f", 1 / step_s),
            f"{step_s / overlaps[_UPSTREAM].step_s:.3f}" if _UPSTREAM in overlaps else "",
            f"{figures.activations:g}",
        ))  # fmt: skip
    return markdown(_HEADER, rows)


def _check_release() -> None:
    """Exit if Megatron cannot run plans for emulated models."""
    if (releases.installed_release() or (0, 19)) < (0, 19):
        raise SystemExit(
            f"expert_overlap.py: megatron-core {releases.core_version()} only makes plans for its "
            "own models, not for emulated ones; install 0.19 or later"
        )


def _uneven(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure experts with unequal loads and print the results."""
    compared = chosen(parser, uneven.systems(args.waiting), args.only)
    pp, num_microbatches, forward_ms = 2, args.microbatches, args.forward_ms or 160.0
    if num_microbatches < 1:
        parser.error(f"--microbatches {num_microbatches} must be 1 or more; try 64")
    num_ranks = uneven.NUM_EXPERT_RANKS
    size = Size(LAYERS * pp, num_microbatches, num_ranks)
    by_name = uneven.cases(size, args.imbalance)
    if args.quick:
        num_microbatches, forward_ms = 4, 16.0
        size = size._replace(num_microbatches=num_microbatches)
        by_name = uneven.cases(size, args.imbalance[-1:])
        by_name = {name: by_name[name] for name in ("W0 balanced", [*by_name][-1])}
        compared = compared[1:]
    highest = max(args.imbalance)
    if not 1 <= min(args.imbalance) <= highest < num_ranks:
        parser.error(
            f"--imbalance {highest:g}: the largest of {num_ranks} loads must be at least 1 and "
            f"below {num_ranks} times their mean; try 1.66"
        )
    ranks.clean_up_when_terminated()
    before = machine()
    sizes = Sizes(pp, num_microbatches, forward_ms / 1e3, 1, 1, 120.0)
    results, device = uneven.measure(
        compared,
        sizes,
        by_name,
        connections=args.connections,
        exchange_share=args.exchange_share,
        weight_waves=args.waves,
    )
    print(f"{uneven.table(results, by_name, sizes.work_s)}\n")
    print(
        f"pp {pp}, {num_ranks} expert ranks, {num_microbatches} micro-batches, {LAYERS} layers per "
        f"rank, forward = input gradient = weight gradient = {forward_ms:g} ms on average, "
        f"{device}, exchanges that use {args.exchange_share:g} of the device, weight gradients in "
        f"{args.waves} kernels per half layer, one step each; {before} before."
    )
    return 0


def main() -> int:
    """Measure, print the results, and return 1 if a system failed."""
    parser = options(__doc__, "two systems, a few short actions", only=True)
    add = parser.add_argument
    add(
        "--forward-ms",
        type=float,
        help="computation of 1/pp of the model (default: 40, or 160 with --imbalance)",
    )
    add("--imbalance", type=float, nargs="+", metavar="X",
        help="give experts unequal loads, with this ratio of the largest to the mean")  # fmt: skip
    add(
        "--waiting",
        type=int,
        default=8,
        metavar="N",
        help="with --imbalance: number of W that may wait",
    )
    add("--microbatches", type=int, default=64, metavar="M",
        help="with --imbalance: micro-batches per step")  # fmt: skip
    add("--waves", type=int, default=8, metavar="N",
        help="with --imbalance: kernels per weight gradient of half a layer")  # fmt: skip
    add("--exchange-share", type=float, default=0.0, metavar="S",
        help="with --imbalance: share of the device that an exchange uses")  # fmt: skip
    add("--connections", type=int, default=32, help="hardware queues per device; an exchange that "
        "shares a queue with other streams waits for them")  # fmt: skip
    args = parser.parse_args()
    _check_release()
    if args.imbalance is not None:
        return _uneven(parser, args)
    compared = chosen(parser, systems(), args.only)
    args.forward_ms = args.forward_ms or 40.0
    pp = 4
    num_microbatches = 16
    num_steps = 2
    shares = [0.3, 0.6, 1.0]
    if args.quick:
        pp, num_microbatches, num_steps, shares, args.forward_ms = 2, 4, 1, [0.6], 8.0
        compared = [
            system for system in systems() if system.name in (_UPSTREAM, "zb-v, pairs")
        ]
    ranks.clean_up_when_terminated()
    before = machine()
    sizes = Sizes(pp, num_microbatches, args.forward_ms / 1e3, 1, num_steps, 120.0)
    where = ranks.emulated_device(sizes, args.connections)
    device = where.pop("conditions")
    overlaps_by_share: dict[float, dict[str, Overlap]] = {part: {} for part in shares}
    failed = []
    for system in compared:
        print(system.name, file=sys.stderr)
        share = system.share(sizes.pp)
        times = [
            ExpertTimes(sizes.forward_s, share, all_to_all=part) for part in shares
        ]
        try:
            system.check(sizes.pp, sizes.num_microbatches)
            steps = ranks.run(
                ranks.measure, system, sizes, times * sizes.steps,
                repeats=2 * len(shares), replicas=_EXPERTS, **where,
            )  # fmt: skip
        except (ScheduleError, RanksFailed) as error:
            failed.append(f"{system.name}: {error}")
            continue
        for number, part in enumerate(shares):
            with_part = [row[number :: len(shares)] for row in steps]
            overlaps_by_share[part][system.name] = overlap(
                with_part, system, sizes, part
            )
    for part, by_system in overlaps_by_share.items():
        print(f"All-to-all {part:g} of a layer's computation:\n")
        print(f"{table(by_system, sizes.work_s)}\n")
    print(
        f"pp {pp}, {_EXPERTS} expert ranks, {num_microbatches} micro-batches, {LAYERS} layers per "
        f"rank, forward = input gradient = weight gradient = {args.forward_ms:g} ms without the "
        f"exchanges, {device}, the shortest of {num_steps} steps; {before} before."
    )
    for reason in failed:
        print(f"\n{reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
