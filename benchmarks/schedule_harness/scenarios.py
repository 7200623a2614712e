"""Measures systems in scenarios and compares them."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError
from tests.ranks import RanksFailed

from . import launch, rank
from .metrics import overhead
from .noise import SCENARIOS, NoisyTimes

if TYPE_CHECKING:
    from .ops import Op, Sizes, Step
    from .systems import System

__all__ = ["Cell", "Measured", "add", "measure", "speeds", "spread", "summary", "tables"]


@dataclass
class Cell:
    """One system in one scenario. The lists are by draw, and there by repetition."""

    seconds: list[list[float]]
    """Time of the step, from its first rank's begin to its last rank's end."""
    inflation: float = 0.0
    """Time in ops over what they had to take, minus 1; the worst repetition."""
    peak_live: float = 0.0
    """Activations alive at once, in those of one micro-batch on 1/pp of the model."""
    overheads: list[list[float]] = field(default_factory=list)
    """Time of the step over what the order that ran would take with the same ops and free messages,
    minus 1; not where messages are late."""

    def overhead(self) -> list[float]:
        """Return that of the shortest repetition of each draw."""
        by_draw = zip(self.seconds, self.overheads, strict=True)
        return [min(zip(*repeated, strict=True))[1] for repeated in by_draw]

    def best(self) -> list[float]:
        """Return the shortest time of each draw: what disturbs the machine only adds."""
        return [min(repeated) for repeated in self.seconds]


@dataclass
class Measured:
    """The cells of all systems."""

    ideal_s: float
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    """By scenario, then by system."""
    failures: dict[str, str] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    """Load average while it was measured, from time to time."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        return asdict(self)


def measure(systems: Sequence[System], sizes: Sizes, names: Sequence[str], rounds: int) -> Measured:
    """Run all systems in all scenarios, each system with the same processes from end to end."""
    found = Measured(3 * sizes.forward_s * sizes.num_microbatches)
    for system in systems:
        add(found, system, sizes, names, rounds)
    return found


def add(found: Measured, system: System, sizes: Sizes, names: Sequence[str], rounds: int) -> None:
    """Measure one system in some scenarios.

    Those with late messages are a run of their own: stages or transports wait in them.
    """
    ordered = sorted(names, key=lambda name: SCENARIOS[name].delays_messages)
    for _, group in groupby(ordered, lambda name: SCENARIOS[name].delays_messages):
        together = list(group)
        print(f"pp {sizes.pp}: {system.name}: {', '.join(together)}", file=sys.stderr)
        found.load.append(os.getloadavg()[0])
        if system.name not in found.failures:
            _measure(found, system, sizes, together, rounds)


def _measure(
    found: Measured, system: System, sizes: Sizes, names: Sequence[str], rounds: int
) -> None:
    repeats = 2 * len(names) * rounds
    try:
        system.check(sizes.pp, sizes.num_microbatches)
        by_rank = launch.run(rank.measure_disturbed, system, sizes, names, rounds, repeats=repeats)
    except (ScheduleError, RanksFailed) as error:
        found.failures[system.name] = str(error)
        return
    for index, name in enumerate(names):
        cells = found.cells.setdefault(name, {})
        cell = cells.setdefault(system.name, Cell([[] for _ in range(sizes.steps)]))
        if not SCENARIOS[name].delays_messages:
            cell.overheads = [[] for _ in range(sizes.steps)]
        by_step = list(zip(*(ranks[index] for ranks in by_rank), strict=True))
        for position, ranks in enumerate(by_step):
            number = position % sizes.steps
            seconds = max(s.end_s for s in ranks) - min(s.begin_s for s in ranks)
            cell.seconds[number].append(seconds)
            _count(cell, system, sizes, name, number, ranks)


def _count(
    cell: Cell, system: System, sizes: Sizes, name: str, number: int, ranks: Sequence[Step]
) -> None:
    placement, share = system.placement(sizes.pp), system.share(sizes.pp)
    times = NoisyTimes(sizes.forward_s, share, SCENARIOS[name], placement.rank_of, 0, number)
    ops = [op for step in ranks for op in step.ops]
    slept = sum(times.seconds(op.kind, op.stage, op.microbatch) for op in ops)
    cell.inflation = max(cell.inflation, sum(op.duration_s for op in ops) / slept - 1)
    cell.peak_live = max(cell.peak_live, share * max(_peak(step.ops) for step in ranks))
    if cell.overheads:
        rows = [step.ops for step in ranks]
        cell.overheads[number].append(overhead(rows, placement))


def _peak(ops: Sequence[Op]) -> int:
    live = peak = 0
    for op in ops:
        live += {"F": 1, "I": 0}.get(op.kind, -1)
        peak = max(peak, live)
    return peak


def tables(measured: Measured) -> str:
    """Return one table for each scenario; all speeds are those of the first system over others."""
    texts = []
    if measured.load:
        texts.append(f"load average {min(measured.load):.1f} to {max(measured.load):.1f}")
    for name, cells in measured.cells.items():
        lines = list(_rows(measured, cells))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in lines)
        texts.append(f"{name}\n" + "\n".join(row.rstrip() for row in rows))
    texts += [f"{name}: {reason}" for name, reason in measured.failures.items()]
    return "\n\n".join(texts)


def summary(measured: Measured) -> str:
    """Return the median speeds of all scenarios as one table in Markdown."""
    names = list(measured.cells)
    lines = [["order", "activations", *names], ["---"] * (2 + len(names))]
    for system in next(iter(measured.cells.values())):
        cells = [measured.cells[name][system] for name in names]
        found = (
            speeds(_first(measured.cells[name]), measured.cells[name][system]) for name in names
        )
        peak = max(cell.peak_live for cell in cells)
        lines.append([system, f"{peak:g}", *(f"{statistics.median(s):.3f}" for s in found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(measured: Measured, cells: dict[str, Cell]) -> Iterator[tuple[str, ...]]:
    yield "system", "T/ideal", "speed", "peak act.", "ops %"
    for name, cell in cells.items():
        yield (
            name,
            spread([seconds / measured.ideal_s for seconds in cell.best()]),
            spread(speeds(_first(cells), cell)),
            f"{cell.peak_live:g}",
            f"{100 * cell.inflation:.1f}",
        )


def _first(cells: dict[str, Cell]) -> Cell:
    return next(iter(cells.values()))


def speeds(reference: Cell, cell: Cell) -> list[float]:
    """Return the time of a reference over that of a cell, draw by draw."""
    return [theirs / ours for theirs, ours in zip(reference.best(), cell.best(), strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median and, in brackets, the lowest and the highest value."""
    median, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} .. {high})"
