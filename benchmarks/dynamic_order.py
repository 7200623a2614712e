"""Gain from a dynamic order: all comparisons in docs/results-dynamic-orders.md.

    python benchmarks/dynamic_order.py [--simulate] [--draws N] [--quick] [--json FILE]

Processes and messages are real, and stages emulate computation by sleeping (see schedules.py). All
systems get the same draws of noise. The numbers are speed-ups: the reference's time divided by the
system's, as the median over the draws (lowest..highest). Only the shortest repetition of each draw
counts, because other load only adds time. With the defaults, this takes 25 minutes on two idle
cores.

A comparison is fair if both sides keep the same number of activations: `+0` is the table's cap.
Column titles omit the name of the table that a comparison is about. The last table shows only the
overhead of the runtime and messages, with ops as long as in schedules.py: the measured time divided
by the time of a replay of the same order with the measured ops.

`--simulate` computes the same tables without running processes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks, scenarios
from benchmarks.harness.command import options, ratios, spread, write_json
from benchmarks.harness.comparison import Compared, compare, report_failures
from benchmarks.harness.ops import SCENARIOS, Sizes
from benchmarks.harness.systems import OVERLAPPED, PEERS, ordered
from megatron_ext.text_table import aligned

_WHOLE, _SPLIT = "interleaved chunks=2, static", "interleaved chunks=2, static, split"
_HINTS = ("interleaved chunks=2, hint +0", "interleaved chunks=2, hint +1")
_GREEDY = ("interleaved chunks=2, breadth-first", "interleaved chunks=2, depth-first")
_TORCH = "torch ZBVZeroBubble"
"""Torch's fastest schedule."""
_ZBV = "zb-v, static"
_ZBV_HINTS = ("zb-v, hint +0", "zb-v, hint +1")
_BITPIPE = "bitpipe order=paper, static, split"
_BITPIPE_HINTS = ("bitpipe order=paper, hint +0", "bitpipe order=paper, hint +1")
_ALL = tuple(name for name in SCENARIOS if name not in ("jitter-0.1", "spikes"))
"""Omits two scenarios in which a dynamic order gains as little as in `quiet` and `uneven`."""


@dataclass(frozen=True)
class Comparison:
    """One table in the documentation, with scenarios as rows and systems as columns."""

    title: str
    reference: str
    """The system whose time is divided by the others' times."""
    rivals: Sequence[str]
    names: Sequence[str]
    """Names of the scenarios."""
    stand_in: str = ""
    """One of our systems with the same order, in case the reference cannot be simulated."""


@dataclass(frozen=True)
class Part:
    """Comparisons at one size."""

    pp: int
    num_microbatches: int
    forward_ms: float
    """Forward of 1/pp of the model, long enough for two cores to run all ranks while the others
    sleep."""
    comparisons: Sequence[Comparison]
    most_overhead: float | None = None
    """Bound on the runtime's overhead relative to the order that ran, if that is all the part
    measures. Ops are then as long as in schedules.py, and each draw runs once."""


_UPSTREAM_TITLE = (
    "Megatron's own interleaved schedule, orders of the interleaved table in 2 chunks"
)
_IN_ITS_ORDER = "the interleaved table with split backwards, in its own order"
_NO_SLACK = "zb-v in its own order, which has no slack while nothing is late"
_OF_BITPIPE = "BitPipe's published table with split backwards, in its own order"
PARTS = (
    Part(4, 16, 8.0, (
        Comparison(_UPSTREAM_TITLE, OVERLAPPED, (*_HINTS, _SPLIT, _ZBV, *_GREEDY, _TORCH),
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
class PartResult:
    """The result of a part, measured or simulated."""

    part: Part
    simulated: bool
    compared: Compared
    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    """(reference, scenario) -> how much faster any order of the same actions can be, simulated."""


def run(part: Part, sizes: Sizes, repetitions: int | None) -> PartResult:
    """Run each of a part's systems once in all its scenarios. Without repetitions, simulate."""
    scenarios_by_system: dict[str, dict[str, None]] = {}
    limits = {}
    for comparison in part.comparisons:
        systems = [comparison.reference, *comparison.rivals]
        if repetitions is None:
            systems = [
                name for name in (*systems, comparison.stand_in) if name not in PEERS
            ]
        for name in filter(None, systems):
            scenarios_by_system.setdefault(name, {}).update(
                dict.fromkeys(comparison.names)
            )
        order = ordered(comparison.stand_in or comparison.reference)
        for name in comparison.names:
            limit = statistics.median(scenarios.limits(order, sizes, name))
            limits[comparison.reference, name] = limit
    selection = []
    for name, names in scenarios_by_system.items():
        selection.append((PEERS.get(name) or ordered(name), list(names)))
    compared = compare(
        selection,
        sizes, repetitions or 1, simulates=repetitions is None,
    )  # fmt: skip
    return PartResult(part, repetitions is None, compared, limits)


def text_of(result: PartResult) -> str:
    """Return all of a part's tables and the conditions under which it ran."""
    part = result.part
    sizes = result.compared.sizes
    figures = result.compared.figures
    if result.simulated:
        conditions = f"simulated, {sizes.steps} draws"
    else:
        late = max((figure.op_inflation for figure in figures.values()), default=0)
        conditions = (
            f"{result.compared.conditions}, "
            f"ops at most {100 * late:.1f} % longer than they sleep"
        )
    texts = [f"{part.pp} ranks, {part.num_microbatches} micro-batches ({conditions})."]
    if part.most_overhead is None:
        for comparison in part.comparisons:
            texts += [f"Against {comparison.title}:", _against(comparison, result)]
    else:
        names = part.comparisons[0].names
        rows = []
        for system in dict.fromkeys(system for system, _ in figures):
            row = [system]
            for name in names:
                percents = [100 * share for share in figures[system, name].overheads]
                row.append(spread(percents, 2))
            rows.append(row)
        texts.append(
            f"What the runtime added, in % (aim: {100 * part.most_overhead:g}):"
        )
        texts.append(_as_text([["order", *names], *rows]))
    return "\n\n".join(texts)


def _against(comparison: Comparison, result: PartResult) -> str:
    """Return how much faster each system is than a reference, by scenario."""
    sizes = result.compared.sizes
    figures = result.compared.figures
    measured = {system for system, _ in figures}
    ideal_s = sizes.work_s
    if result.simulated:
        ideal_s /= sizes.forward_s  # simulated times are in forwards
    reference = comparison.reference
    if reference not in measured:
        reference = comparison.stand_in
    rivals = [
        name for name in comparison.rivals if name != reference and name in measured
    ]
    rows = []
    for name in comparison.names:
        reference_s = figures[reference, name].seconds
        row = [name, spread([seconds / ideal_s for seconds in reference_s])]
        for system in rivals:
            row.append(spread(ratios(reference_s, figures[system, name].seconds)))
        row.append(f"{result.limits[comparison.reference, name]:.3f}")
        rows.append(row)
    peaks: dict[str, float] = {}
    for (system, _), figure in figures.items():
        peaks[system] = max(peaks.get(system, 0.0), figure.peak_of_order)
    rows.append(
        ["activations", *(f"{peaks[system]:g}" for system in (reference, *rivals)), "-"]
    )
    table, _, _ = (comparison.stand_in or reference).partition(", ")
    rivals = [name.removeprefix(f"{table}, ") for name in rivals]
    head = ["scenario", "T/ideal", *rivals, "any order at most"]
    return _as_text([head, *rows])


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as a Markdown text block."""
    return f"```text\n{aligned(rows)}\n```"


def main() -> int:
    """Measure, print the results, and return 1 if a system failed."""
    parser = options(__doc__, "only the last tables, with one draw", figures=True)
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="compute the expected results instead of measuring",
    )
    parser.add_argument("--draws", type=int, default=5, help="number of noise seeds")
    args = parser.parse_args()
    ranks.clean_up_when_terminated()
    name = "simulated" if args.simulate else "measured"
    results = []
    parts = [p for p in PARTS if not (args.simulate and p.most_overhead is not None)]
    for part in parts[-1:] if args.quick else parts:
        draws, forward_ms = (1, 8.0) if args.quick else (args.draws, part.forward_ms)
        sizes = Sizes(part.pp, part.num_microbatches, forward_ms / 1e3, 2, draws)
        repetitions = 5 if part.most_overhead is None else 1
        results.append(run(part, sizes, None if args.simulate else repetitions))
    texts = [
        f"{name.capitalize()}; median of the draws (lowest..highest).",
        *map(text_of, results),
    ]
    print(f"<!-- {name}: begin -->\n" + "\n\n".join(texts) + f"\n<!-- {name}: end -->")
    write_json(args.json, {"parts": [result.compared.as_json() for result in results]})
    return report_failures(result.compared for result in results)


if __name__ == "__main__":
    sys.exit(main())
