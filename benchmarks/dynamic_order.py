"""The gain of a dynamic order: all comparisons of docs/results-dynamic-orders.md.

    python benchmarks/dynamic_order.py [--simulate] [--draws N] [--quick] [--json FILE]

Processes and messages are real; stages emulate computation by sleeping (see schedules.py). All
systems get the same draws of noise. The numbers are speed-ups, the time of the reference over that
of the system: the median of the draws (lowest .. highest). Each draw counts with its shortest
repetition, since other load only adds time. The defaults take 25 minutes on two idle cores.

A comparison is fair if both sides hold equally many activations: `+0` is the cap of the table. The
final table is the overhead of runtime and messages, with ops of the length of schedules.py: the
measured time over that of a replay of the same order with the measured ops.

`--simulate` computes the same tables without processes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.harness import ranks, scenarios
from benchmarks.harness.command import markdown, options, ratios, spread, write_json
from benchmarks.harness.comparison import Compared, compare, report_failures
from benchmarks.harness.ops import SCENARIOS, Sizes
from benchmarks.harness.systems import OVERLAPPED, PEERS, ordered

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
    """A part that has run, or was simulated."""

    part: Part
    simulated: bool
    compared: Compared
    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    """(reference, scenario) -> how much faster any order of its actions can be, simulated."""


def run(part: Part, sizes: Sizes, repetitions: int | None) -> Found:
    """Run all systems of a part, each once in all its scenarios; without repetitions, simulate."""
    wanted: dict[str, dict[str, None]] = {}
    limits = {}
    for comparison in part.comparisons:
        systems = [comparison.reference, *comparison.others]
        if repetitions is None:
            systems = [name for name in (*systems, comparison.stand_in) if name not in PEERS]
        for name in filter(None, systems):
            wanted.setdefault(name, {}).update(dict.fromkeys(comparison.names))
        order = ordered(comparison.stand_in or comparison.reference)
        for name in comparison.names:
            limit = statistics.median(scenarios.limits(order, sizes, name))
            limits[comparison.reference, name] = limit
    compared = compare(
        [(PEERS.get(name) or ordered(name), list(names)) for name, names in wanted.items()],
        sizes, repetitions or 1, simulates=repetitions is None,
    )  # fmt: skip
    return Found(part, repetitions is None, compared, limits)


def text_of(found: Found) -> str:
    """Return all tables of a part, and under which conditions it ran."""
    part, sizes, figures = found.part, found.compared.sizes, found.compared.figures
    measured = {system for system, _ in figures}
    ideal_s, how = sizes.work_s, f"simulated, {sizes.steps} draws"
    if found.simulated:
        ideal_s /= sizes.forward_s  # these times are in forwards
    else:
        late = max((each.op_inflation for each in figures.values()), default=0)
        how = f"{found.compared.conditions}, ops at most {100 * late:.1f} % longer than they sleep"
    texts = [f"{part.pp} ranks, {part.num_microbatches} micro-batches ({how})."]
    for comparison in part.comparisons:
        reference = comparison.reference
        if reference not in measured:
            reference = comparison.stand_in
        shown = [name for name in comparison.others if name != reference and name in measured]
        rows = []
        for name in comparison.names:
            took_s = figures[reference, name].seconds
            ideal = [seconds / ideal_s for seconds in took_s]
            columns = (spread(ratios(took_s, figures[system, name].seconds)) for system in shown)
            limit = found.limits[comparison.reference, name]
            rows.append([name, spread(ideal), *columns, f"{limit:.3f}"])
        peaks = (
            max(each.peak_of_order for (name, _), each in figures.items() if name == system)
            for system in (reference, *shown)
        )
        rows.append(["activations", *(f"{peak:g}" for peak in peaks), ""])
        head = ["scenario", f"{reference}: T/ideal", *shown, "any order at most"]
        texts += [f"Against {comparison.title}:", markdown(head, rows)]
    if part.most_overhead is not None:
        names = part.comparisons[0].names
        rows = [
            [system, *(spread([100 * each for each in figures[system, name].overheads], 2)
                       for name in names)]
            for system in dict.fromkeys(system for system, _ in figures)
        ]  # fmt: skip
        texts.append(f"What the runtime added, in % (aim: {100 * part.most_overhead:g}):")
        texts.append(markdown(["order", *names], rows))
    return "\n\n".join(texts)


def main() -> int:
    """Measure and print; 1 if a system failed."""
    parser = options(__doc__, "one draw of the last tables", figures=True)
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
    write_json(args.json, {"parts": [each.compared.as_json() for each in found]})
    return report_failures(each.compared for each in found)


if __name__ == "__main__":
    sys.exit(main())
