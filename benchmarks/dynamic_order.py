"""The gain of a dynamic order: all comparisons of docs/results-dynamic-orders.md.

    python benchmarks/dynamic_order.py [--simulate] [--draws N] [--quick] [--json FILE]

Processes and messages are real; stages emulate computation by sleeping (see schedules.py). All
systems get the same draws of noise. The numbers are speed-ups, the time of the reference over that
of the system: the median of the draws (lowest .. highest). Each draw counts with its shortest
repetition, since other load only adds time. The defaults take 25 minutes on two idle cores.

A comparison is fair if both sides hold equally many activations: `+0` is the cap of the table. The
last column is a computed upper bound for any order, with unlimited memory: each rank has to wait
for its first input and do all of its work, and then other ranks have to finish theirs.

The final table is the overhead of runtime and messages, with ops of the length of schedules.py: the
measured time over that of a replay of the same order with the measured ops.

`--simulate` computes the same tables without processes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.harness import ranks, scenarios
from benchmarks.harness.command import machine, markdown, options, ratios, spread, write_json
from benchmarks.harness.metrics import Figures
from benchmarks.harness.ops import SCENARIOS, Sizes
from benchmarks.harness.systems import OVERLAPPED, Own, disturbed_systems
from megatron_ext.errors import ScheduleError
from tests.ranks import RanksFailed

_WHOLE, _SPLIT = "interleaved chunks=2, static", "interleaved chunks=2, static, split"
_HINTS = ("interleaved chunks=2, hint +0", "interleaved chunks=2, hint +1")
_GREEDY = ("interleaved chunks=2, breadth-first", "interleaved chunks=2, depth-first")
_TORCH = ("torch InterleavedZeroBubble", "torch ZBVZeroBubble")
_ZBV, _ZBV_HINTS = "zb-v, static", ("zb-v, hint +0", "zb-v, hint +1")
_BITPIPE = "bitpipe order=paper, static, split"
_BITPIPE_HINTS = ("bitpipe order=paper, hint +0", "bitpipe order=paper, hint +1")
_ALL = tuple(SCENARIOS)


@dataclass(frozen=True)
class Comparison:
    """One table of the documentation: scenarios down, systems across."""

    title: str
    reference: str
    """The system whose time is divided by those of the others."""
    others: Sequence[str]
    names: Sequence[str]
    """Of the scenarios."""
    stand_in: str = ""
    """A system of ours with the same order, where the reference cannot be simulated."""


@dataclass(frozen=True)
class Part:
    """Comparisons of one size."""

    pp: int
    num_microbatches: int
    forward_ms: float
    """Of 1/pp of the model: long enough that two cores run all ranks beside their sleeps."""
    comparisons: Sequence[Comparison]
    most_overhead: float | None = None
    """Bound on the runtime's share of the order that ran, where the part is for that alone. Ops
    are as long as in schedules.py then, and each draw is run once."""


_UPSTREAM_TITLE = "Megatron's own interleaved schedule"
_IN_ITS_ORDER = "the interleaved table with split backwards, in its own order"
_NO_SLACK = "zb-v in its own order, which has no slack while nothing is late"
_OF_BITPIPE = "BitPipe's published table with split backwards, in its own order"
PARTS = (
    Part(4, 16, 8.0, (
        Comparison(_UPSTREAM_TITLE, OVERLAPPED, (*_HINTS, _SPLIT, _ZBV, *_GREEDY, *_TORCH),
                   ("quiet", "jitter-0.3", "microbatch-0.5", "link-0.5"), stand_in=_WHOLE),
        Comparison(_IN_ITS_ORDER, _SPLIT, _HINTS, _ALL),
        Comparison(_NO_SLACK, _ZBV, _ZBV_HINTS, ("quiet", "jitter-0.3", "link-0.5")),
        Comparison(_OF_BITPIPE, _BITPIPE, _BITPIPE_HINTS, _ALL),
    )),
    Part(8, 32, 10.0, (
        Comparison(_UPSTREAM_TITLE, OVERLAPPED, (*_HINTS, _SPLIT, _ZBV),
                   ("quiet", "microbatch-0.5"), stand_in=_WHOLE),
        Comparison(_NO_SLACK, _ZBV, _ZBV_HINTS[:1], ("quiet",)),
    )),
    Part(4, 16, 40.0,
         (Comparison(_IN_ITS_ORDER, _SPLIT, _HINTS[1:], ("quiet", "jitter-0.3")),), 0.02),
)  # fmt: skip


@dataclass
class Found:
    """Figures of one part, and under which conditions."""

    part: Part
    how: str = ""
    ideal_s: float = 1.0
    """Work of a rank."""
    cells: dict[str, dict[str, Figures]] = field(default_factory=dict)
    """By system, then by scenario."""
    failures: dict[str, str] = field(default_factory=dict)
    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    """(reference, scenario) -> how much faster any order of its actions can be, simulated."""

    def reference(self, comparison: Comparison) -> str:
        """Return the reference of a comparison, or what stands in for it."""
        name = comparison.reference
        return name if name in self.cells else comparison.stand_in


def run(part: Part, sizes: Sizes, repetitions: int | None) -> Found:
    """Run all systems of a part, each once in all its scenarios; without repetitions, simulate."""
    found = Found(part)
    systems = {system.name: system for system in disturbed_systems()}
    wanted: dict[str, dict[str, None]] = {}
    for comparison in part.comparisons:
        references = [comparison.reference]
        if repetitions is None and comparison.stand_in:
            references.append(comparison.stand_in)
        for name in [*references, *comparison.others]:
            wanted.setdefault(name, {}).update(dict.fromkeys(comparison.names))
        order = systems[comparison.stand_in or comparison.reference]
        assert isinstance(order, Own)
        for name in comparison.names:
            limit = statistics.median(scenarios.limits(order, sizes, name))
            found.limits[comparison.reference, name] = limit
    for name, names in wanted.items():
        system = systems[name]
        try:
            if repetitions is not None:
                found.cells[name] = scenarios.measure(system, sizes, list(names), repetitions)
            elif isinstance(system, Own):
                found.cells[name] = scenarios.expect(system, sizes, list(names))
        except (ScheduleError, RanksFailed) as error:
            found.failures[name] = str(error)
    found.how = f"simulated, {sizes.steps} draws"
    found.ideal_s = sizes.work  # simulated times are in forwards
    if repetitions is not None:
        found.ideal_s = sizes.work_s
        late = max((c.op_inflation for by in found.cells.values() for c in by.values()), default=0)
        found.how = (
            f"forward = input gradient = weight gradient = {1e3 * sizes.forward_s:g} ms, "
            f"{sizes.steps} draws, each the shortest of {repetitions} repetitions, ops at most "
            f"{100 * late:.1f} % longer than they sleep; {machine()}"
        )
    return found


def text_of(found: Found) -> str:
    """Return all tables of a part."""
    part, cells = found.part, found.cells
    texts = [f"{part.pp} ranks, {part.num_microbatches} micro-batches ({found.how})."]
    for comparison in part.comparisons:
        reference = found.reference(comparison)
        shown = [name for name in comparison.others if name != reference and name in cells]
        rows = []
        for name in comparison.names:
            took_s = cells[reference][name].seconds
            ideal = [seconds / found.ideal_s for seconds in took_s]
            columns = (spread(ratios(took_s, cells[system][name].seconds)) for system in shown)
            limit = found.limits[comparison.reference, name]
            rows.append([name, spread(ideal), *columns, f"{limit:.3f}"])
        peaks = (max(d.peak_of_order for d in cells[name].values()) for name in [reference, *shown])
        rows.append(["activations", *(f"{peak:g}" for peak in peaks), ""])
        head = ["scenario", f"{reference}: T/ideal", *shown, "any order at most"]
        texts += [f"Against {comparison.title}:", markdown(head, rows)]
    if part.most_overhead is not None:
        texts.append(f"What the runtime added, in % (aim: {100 * part.most_overhead:g}):")
        texts.append(markdown(["order", *part.comparisons[0].names], _overheads(found)))
    texts += [f"{name} failed: {why}" for name, why in found.failures.items()]
    return "\n\n".join(texts)


def _overheads(found: Found) -> Iterator[list[str]]:
    for system, by_scenario in found.cells.items():
        percents = ([100 * part for part in d.overheads] for d in by_scenario.values())
        yield [system, *(spread(values, 2) for values in percents)]


def main() -> int:
    """Measure and print; 1 if a system failed."""
    parser = options(__doc__, "one draw of the last tables")
    parser.add_argument("--simulate", action="store_true", help="compute what to expect instead")
    parser.add_argument("--draws", type=int, default=5, help="seeds of the noise")
    args = parser.parse_args()
    ranks.clean_up_when_terminated()
    name = "simulated" if args.simulate else "measured"
    found = []
    parts = [p for p in PARTS if not (args.simulate and p.most_overhead is not None)]
    for part in parts[-1:] if args.quick else parts:
        draws, forward_ms = (1, 8.0) if args.quick else (args.draws, part.forward_ms)
        sizes = Sizes(part.pp, part.num_microbatches, forward_ms / 1e3, 2, draws)
        repetitions = 5 if part.most_overhead is None else 1
        found.append(run(part, sizes, None if args.simulate else repetitions))
    texts = [f"{name.capitalize()}; median of the draws (lowest .. highest).", *map(text_of, found)]
    print(f"<!-- {name}: begin -->\n" + "\n\n".join(texts) + f"\n<!-- {name}: end -->")
    write_json(args.json, {"parts": [
        {"pp": each.part.pp, "how": each.how, "failures": each.failures,
         "cells": {n: {s: asdict(d) for s, d in by.items()} for n, by in each.cells.items()}}
        for each in found
    ]})  # fmt: skip
    return 1 if any(each.failures for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
