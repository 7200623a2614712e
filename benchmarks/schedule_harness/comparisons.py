"""The comparisons of orders: systems, references, scenarios and targets.

A comparison is fair if both sides hold equally many activations: `+0` is the cap of the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import expected, scenarios
from .noise import SCENARIOS
from .ops import Sizes
from .scenarios import Cell, Measured
from .systems import Own, System, disturbed_systems

__all__ = ["PARTS", "Comparison", "Part", "markdown", "measure", "simulate"]

_UPSTREAM = "megatron-core interleaved, overlapped P2P"
_WHOLE, _SPLIT = "interleaved chunks=2, static", "interleaved chunks=2, static, split"
_HINTS = ("interleaved chunks=2, hint +0", "interleaved chunks=2, hint +1")
_GREEDY = ("interleaved chunks=2, breadth-first", "interleaved chunks=2, depth-first")
_TORCH = ("torch InterleavedZeroBubble", "torch ZBVZeroBubble")
_ZBV = "zb-v, static"
_ZBV_HINTS = ("zb-v, hint +0", "zb-v, hint +1")
_BITPIPE = "bitpipe order=paper, static, split"
_BITPIPE_HINTS = ("bitpipe order=paper, hint +0", "bitpipe order=paper, hint +1")
_MAIN = ("quiet", "jitter-0.3", "microbatch-0.5", "link-0.5")
_ALL = tuple(SCENARIOS)


@dataclass(frozen=True)
class Comparison:
    """One table of the documentation: scenarios down, systems across."""

    title: str
    reference: str
    """The system whose time is divided by those of the others."""
    others: Sequence[str]
    scenarios: Sequence[str]
    aims: Mapping[tuple[str, str], float]
    """(system, scenario) -> speed."""
    stand_in: str | None = None
    """A system of ours with the same order, where the reference cannot be simulated."""

    @property
    def systems(self) -> list[str]:
        """All of them, the reference first."""
        return [self.reference, *self.others]


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

    @property
    def name(self) -> str:
        """The size in words."""
        return f"{self.pp} ranks, {self.num_microbatches} micro-batches"

    @property
    def wanted(self) -> list[tuple[System, list[str]]]:
        """Return each system with its scenarios, so that it is measured once."""
        names: dict[str, dict[str, None]] = {}
        for comparison in self.comparisons:
            for name in comparison.systems:
                names.setdefault(name, {}).update(dict.fromkeys(comparison.scenarios))
        systems = {system.name: system for system in disturbed_systems()}
        return [(systems[name], list(found)) for name, found in names.items()]

    def sizes(self, draws: int, forward_ms: float | None = None) -> Sizes:
        """Return what is run of each scenario."""
        forward_s = (forward_ms or self.forward_ms) / 1e3
        return Sizes(self.pp, self.num_microbatches, forward_s, 2, draws, timeout_s=60.0)


def _against_upstream(others: Sequence[str], names: Sequence[str], variance: float) -> Comparison:
    aims = {(_HINTS[1], "quiet"): 1.0, (_HINTS[1], "microbatch-0.5"): variance}
    title = "Megatron's own interleaved schedule"
    return Comparison(title, _UPSTREAM, others, names, aims, stand_in=_WHOLE)


PARTS = (
    Part(
        4,
        16,
        8.0,
        (
            _against_upstream((*_HINTS, _SPLIT, _ZBV, *_GREEDY, *_TORCH), _MAIN, 1.10),
            Comparison(
                "the interleaved table with split backwards, in its own order",
                _SPLIT,
                _HINTS,
                _ALL,
                {
                    (_HINTS[0], "quiet"): 0.99,
                    (_HINTS[0], "link-0.5"): 1.05,
                    (_HINTS[1], "link-0.5"): 1.10,
                },
            ),
            Comparison(
                "zb-v in its own order, which leaves no room while nothing is late",
                _ZBV,
                _ZBV_HINTS,
                ("quiet", "jitter-0.3", "link-0.5"),
                {(_ZBV_HINTS[0], "quiet"): 0.99},
            ),
            Comparison(
                "BitPipe's published table with split backwards, in its own order",
                _BITPIPE,
                _BITPIPE_HINTS,
                _ALL,
                {(_BITPIPE_HINTS[1], name): 1.05 for name in _ALL if name != "quiet"},
            ),
        ),
    ),
    Part(
        8,
        32,
        10.0,
        (
            _against_upstream((*_HINTS, _SPLIT, _ZBV), ("quiet", "microbatch-0.5"), 1.15),
            Comparison(
                "zb-v in its own order, which leaves no room while nothing is late",
                _ZBV,
                _ZBV_HINTS[:1],
                ("quiet",),
                {(_ZBV_HINTS[0], "quiet"): 0.99},
            ),
        ),
    ),
    Part(
        4,
        16,
        40.0,
        (
            Comparison(
                "the interleaved table with split backwards, in its own order",
                _SPLIT,
                _HINTS[1:],
                ("quiet", "jitter-0.3"),
                {},
            ),
        ),
        most_overhead=0.02,
    ),
)


@dataclass
class Found:
    """Figures of one part."""

    part: Part
    measured: Measured
    how: str
    """The conditions."""
    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    """(reference, scenario) -> how much faster any order of its actions can be, simulated."""


def measure(part: Part, sizes: Sizes, rounds: int) -> Found:
    """Run all systems of a part, one after the other."""
    found = Found(part, Measured(3 * sizes.forward_s * sizes.num_microbatches), "")
    rounds = rounds if part.most_overhead is None else 1
    for system, names in part.wanted:
        scenarios.add(found.measured, system, sizes, names, rounds)
    _add_limits(found, sizes)
    worst = max(
        (c.inflation for by in found.measured.cells.values() for c in by.values()), default=0
    )
    load = found.measured.load
    found.how = (
        f"forward = input gradient = weight gradient = {1e3 * sizes.forward_s:g} ms, {sizes.steps} "
        f"draws, each the shortest of {rounds} repetitions, load average {min(load):.1f} to "
        f"{max(load):.1f}, ops at most {100 * worst:.1f} % longer than they sleep"
    )
    return found


def simulate(part: Part, sizes: Sizes) -> Found:
    """Compute what to expect of the systems of this package, with the same draws."""
    how = f"simulated, {sizes.steps} draws"
    found = Found(part, Measured(3.0 * sizes.num_microbatches), how)
    wanted = part.wanted
    by_name = {system.name: system for system in disturbed_systems()}
    for comparison in part.comparisons:
        if comparison.stand_in is not None:
            wanted.append((by_name[comparison.stand_in], list(comparison.scenarios)))
    for system, names in wanted:
        expected.add(found.measured, [system], sizes, names)
    _add_limits(found, sizes)
    return found


def _add_limits(found: Found, sizes: Sizes) -> None:
    systems = {system.name: system for system in disturbed_systems()}
    for comparison in found.part.comparisons:
        reference = systems[comparison.stand_in or comparison.reference]
        assert isinstance(reference, Own)
        for name in comparison.scenarios:
            limit = statistics.median(expected.limits(reference, sizes, name))
            found.limits[comparison.reference, name] = limit


def markdown(found: Found) -> str:
    """Return all tables of a part, and what of the aims was reached."""
    part = found.part
    texts = [f"{part.name} ({found.how})."]
    for comparison in part.comparisons:
        texts.append(f"Against {comparison.title}:")
        texts.append(_rows_as_markdown(_table(found, comparison)))
    if any(comparison.aims for comparison in part.comparisons):
        texts.append(_rows_as_markdown(_aims(found)))
    if part.most_overhead is not None:
        texts.append(f"What the runtime added, in % (aim: {100 * part.most_overhead:g}):")
        texts.append(_rows_as_markdown(_overheads(found)))
    texts += [f"{name} failed: {why}" for name, why in found.measured.failures.items()]
    return "\n\n".join(texts)


def _overheads(found: Found) -> Iterator[list[str]]:
    """Say what runtime and messages added to the orders that ran, with their ops as they were."""
    measured = {n: c for n, c in found.measured.cells.items() if not SCENARIOS[n].delays_messages}
    yield ["order", *measured]
    for system in next(iter(measured.values())):
        added = ([100 * part for part in cells[system].overhead()] for cells in measured.values())
        yield [system, *(scenarios.spread(percents, 2) for percents in added)]


def _rows_as_markdown(rows: Iterator[list[str]]) -> str:
    heading, *others = rows
    lines = [heading, ["---"] * len(heading), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(found: Found, comparison: Comparison) -> Iterator[list[str]]:
    cells = found.measured.cells
    reference = _reference(found, comparison)
    shown = [n for n in comparison.others if n != reference and n in cells["quiet"]]
    yield ["scenario", f"{reference}: T/ideal", *shown, "any order at most"]
    for name in comparison.scenarios:
        base = cells[name][reference]
        ideal = [seconds / found.measured.ideal_s for seconds in base.best()]
        speeds = (scenarios.speeds(base, cells[name][system]) for system in shown)
        limit = found.limits[comparison.reference, name]
        yield [name, scenarios.spread(ideal), *map(scenarios.spread, speeds), f"{limit:.3f}"]
    peaks = (_peak(found, comparison, system) for system in [reference, *shown])
    yield ["activations", *(f"{peak:g}" for peak in peaks), ""]


def _reference(found: Found, comparison: Comparison) -> str:
    if comparison.reference in found.measured.cells["quiet"]:
        return comparison.reference
    assert comparison.stand_in is not None
    return comparison.stand_in


def _peak(found: Found, comparison: Comparison, system: str) -> float:
    cells: list[Cell] = [found.measured.cells[name][system] for name in comparison.scenarios]
    return max(cell.peak_live for cell in cells)


def _aims(found: Found) -> Iterator[list[str]]:
    """Say of every aim what was found, and whether it can be reached at all."""
    yield ["order", "scenario", "aim", "found", "any order at most", "reached"]
    for comparison in found.part.comparisons:
        for (system, name), aim in comparison.aims.items():
            cells = found.measured.cells[name]
            if system not in cells:
                continue
            speeds = scenarios.speeds(cells[_reference(found, comparison)], cells[system])
            speed, limit = statistics.median(speeds), found.limits[comparison.reference, name]
            reached = "yes" if speed >= aim else "no" if limit >= aim else "no order can"
            yield [system, name, f"{aim:g}", f"{speed:.3f}", f"{limit:.3f}", reached]
