"""Runs systems one after another, undisturbed or in scenarios, and shows them in one table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_ext.errors import ScheduleError
from megatron_ext.text_table import aligned
from tests.ranks import RanksFailed

from . import scenarios
from .command import figure, machine, ratios
from .metrics import Figures
from .ops import Sizes
from .systems import Own, System

Key = tuple[str, str]
"""System and scenario."""
_NOISY = 0.05
"""If ops exceed their nominal time by more than this fraction, the machine was too busy."""


@dataclass
class Compared:
    """The systems' results at one size."""

    sizes: Sizes
    conditions: str = ""
    systems: dict[str, System] = field(default_factory=dict)
    figures: dict[Key, Figures] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def speeds(self, key: Key) -> tuple[float, float] | None:
        """Return how much faster a dynamic order was than its table, and should have been.

        Both are medians over the draws: as measured, and with the simulated times of the two orders
        that ran. Return None for other systems, without a table, or if nothing ran.
        """
        (name, scenario), figures = key, self.figures[key]
        dynamic = self.systems[name]
        own_systems = [
            system for system in self.systems.values() if isinstance(system, Own)
        ]
        if not (isinstance(dynamic, Own) and dynamic.config.dynamic):
            return None
        schedule = dynamic.config.schedule
        tables = (
            system.name
            for system in own_systems
            if system.splits and system.config.schedule == schedule
        )
        table = self.figures.get((next(tables, ""), scenario))
        return None if table is None or not table.order_s else (
            statistics.median(ratios(table.seconds, figures.seconds)),
            statistics.median(ratios(table.order_s, figures.order_s)),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Return all results for a JSON file."""
        return {
            "conditions": self.conditions,
            "pp": self.sizes.pp,
            "failures": self.failures,
            "systems": [
                {"system": name, "scenario": scenario, **asdict(figures),
                 "speeds": self.speeds((name, scenario))}
                for (name, scenario), figures in self.figures.items()
            ],
        }  # fmt: skip


def compare(
    selection: Iterable[tuple[System, Sequence[str]]],
    sizes: Sizes,
    repetitions: int = 1,
    *,
    conditions: str = "peers over gloo",
    simulates: bool = False,
    **where: Any,
) -> Compared:
    """Run systems one after another. If one fails, record that and run the others.

    Args:
        selection: Systems, each with its scenarios.
        sizes: Sizes of the measurement. `steps` is the number of draws per scenario.
        repetitions: How often to run all draws.
        conditions: Additional description of the machine.
        simulates: Compute the expected times instead of measuring. Only works for our systems.
        where: The ranks' device and environment, see `ranks.run`.
    """
    compared = Compared(sizes)
    before = machine()
    for system, names in selection:
        compared.systems[system.name] = system
        try:
            if simulates:
                figures_by_name = scenarios.expect(system, sizes, names)
            else:
                figures_by_name = scenarios.measure(
                    system, sizes, names, repetitions, **where
                )
        except (ScheduleError, RanksFailed) as error:
            compared.failures[system.name] = str(error)
            continue
        compared.figures.update(
            {(system.name, name): figures for name, figures in figures_by_name.items()}
        )
    compared.conditions = (
        f"pp {sizes.pp}, {sizes.num_microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {1e3 * sizes.forward_s:g} ms, {conditions}, median of {sizes.steps} steps, "
        f"each the shortest of {repetitions}; {before} before"
    )
    return compared


ON_HOST = ("system", "T/ideal", "order", "replay %", "ops %", "peak act.", "weights")
ON_DEVICE = ("system", "T ms", "T/ideal", "order", "T/order", "replay %", "ops %", "waits",
             "speed", "of orders")  # fmt: skip


def cells(measured: Compared, key: Key, figures: Figures) -> dict[str, str]:
    """Return the text for every column. `Figures` and `speeds` explain their meaning."""
    name, scenario = key
    work_s = (
        measured.sizes.work_s
    )  # one rank's undisturbed work: a step without a bubble
    speed, of_orders = measured.speeds(key) or (None, None)
    return {
        "system": name if scenario == "quiet" else f"{name}, {scenario}",
        "T ms": f"{1e3 * figures.median_s:.0f}",
        "T/ideal": f"{figures.median_s / work_s:.3f}",
        # The time of the order that ran, with exact ops and messages that take no time.
        "order": f"{figures.optimum_s / work_s:.3f}",
        "T/order": f"{statistics.median(ratios(figures.seconds, figures.order_s)):.3f}",
        "replay %": f"{100 * statistics.median(figures.overheads):.1f}",
        "ops %": f"{'!' * (figures.op_inflation > _NOISY)}{100 * figures.op_inflation:.1f}",
        "peak act.": f"{figures.peak_live:g}",
        "weights": f"{measured.systems[name].weight_copies}x",
        "waits": f"{figures.waits_per_action:.2f}",
        "speed": figure(speed, ".3f"),
        "of orders": figure(of_orders, ".3f"),
    }


def table(comparisons: Sequence[Compared], columns: Sequence[str] = ON_HOST) -> str:
    """Return the figures of all comparisons as one text table."""
    all_cells = []
    for compared in comparisons:
        for key, figures in compared.figures.items():
            all_cells.append(cells(compared, key, figures))
    return aligned([columns, *([row[name] for name in columns] for row in all_cells)])


def report_failures(comparisons: Iterable[Compared]) -> int:
    """Print which systems failed and why, and return the exit code."""
    failures = [
        failure for compared in comparisons for failure in compared.failures.items()
    ]
    for name, reason in failures:
        print(f"\n{name}: {reason}", file=sys.stderr)
    return 1 if failures else 0
