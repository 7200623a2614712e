"""The figures of steps on a device, and their table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .metrics import overhead, replay
from .noise import SCENARIOS, NoisyTimes

if TYPE_CHECKING:
    from .device_rank import DeviceStep
    from .ops import Sizes
    from .systems import System

__all__ = ["DeviceFigures", "Row", "device_figures", "device_table", "speeds"]


class Row(NamedTuple):
    """The key of one row of the table."""

    system: str
    scenario: str


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of one system in one scenario.

    Lists have one item for each draw, that of its shortest repetition: other load only adds time.
    """

    seconds: list[float]
    """Of the step, from its first rank's begin until all devices are idle."""
    order_s: list[float]
    """Time of the order that ran with exact ops and free messages."""
    overheads: list[float]
    """Share of that order, with its ops as they were, that runtime and messages added."""
    op_inflation: float
    """Time in ops over the time that they should take, minus 1."""
    ideal_s: float
    """Work of one rank in a step without noise."""
    num_actions: int
    """Of all ranks in all steps, all repetitions included."""
    host_waits: dict[str, int]
    """How often a host waited for its device in these, by line."""

    @property
    def of_order(self) -> float:
        """Median over the draws of the time of a step over that of its order."""
        return statistics.median(
            step_s / order_s for step_s, order_s in zip(self.seconds, self.order_s, strict=True)
        )

    @property
    def waits_per_action(self) -> float:
        """How often a host waited for its device, for each action."""
        return sum(self.host_waits.values()) / self.num_actions


def device_figures(
    steps: Sequence[Sequence[DeviceStep]], system: System, sizes: Sizes, scenario: str
) -> DeviceFigures:
    """Return the figures of a measurement.

    Args:
        steps: By rank of the world, then by step. All draws, and again for each repetition.
        system: What was measured.
        sizes: How much was run.
        scenario: Name of the disturbance.
    """
    placement, share = system.placement(sizes.pp), system.share(sizes.pp)
    by_draw: list[list[tuple[float, float, float]]] = [[] for _ in range(sizes.steps)]
    spent_s, nominal_s = 0.0, 0.0
    waits: Counter[str] = Counter()
    num_actions = 0
    for position, ranks in enumerate(zip(*steps, strict=True)):
        number = position % sizes.steps
        times = NoisyTimes(
            sizes.forward_s, share, SCENARIOS[scenario], placement.rank_of, 0, number
        )
        rows = [rank.step.ops for rank in ranks]
        nominal = {op: times.seconds(op.kind, op.stage, op.microbatch) for r in rows for op in r}
        begin_s = min(rank.step.begin_s for rank in ranks)
        took_s = max(rank.step.end_s for rank in ranks) - begin_s
        order_s = replay(rows, placement, nominal.__getitem__)
        by_draw[number].append((took_s, order_s, overhead(rows, placement)))
        spent_s += sum(op.duration_s for op in nominal)
        nominal_s += sum(nominal.values())
        num_actions += len(nominal)
        for rank in ranks:
            waits.update(rank.host_waits)
    seconds, orders_s, overheads = zip(*map(min, by_draw), strict=True)
    return DeviceFigures(
        seconds=list(seconds),
        order_s=list(orders_s),
        overheads=list(overheads),
        op_inflation=spent_s / nominal_s - 1,
        ideal_s=3 * sizes.forward_s * sizes.num_microbatches,
        num_actions=num_actions,
        host_waits=dict(waits),
    )


def speeds(
    found: Mapping[Row, DeviceFigures], tables: Mapping[str, str]
) -> dict[Row, tuple[float, float]]:
    """Return, of each dynamic order, how much faster than its table it was, and should have been.

    Args:
        found: All figures.
        tables: Name of a dynamic system -> that of its table.

    Returns:
        Medians over the draws: the time of the table over that of the dynamic order, as measured,
        and with the simulated times of both orders that ran.
    """
    made = {}
    for row, dynamic in found.items():
        table = found.get(Row(tables.get(row.system, ""), row.scenario))
        if table is not None:
            made[row] = (
                _median_ratio(table.seconds, dynamic.seconds),
                _median_ratio(table.order_s, dynamic.order_s),
            )
    return made


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


_HEADER = (
    "system", "scenario", "T ms", "T/ideal", "T/order", "runtime %", "ops %", "waits/action",
    "speed", "of orders",
)  # fmt: skip


def device_table(
    found: Mapping[Row, DeviceFigures], faster: Mapping[Row, tuple[float, float]]
) -> str:
    """Return the figures as a Markdown table."""
    lines = [_HEADER, ("---", "---", *["---:"] * (len(_HEADER) - 2))]
    for row, figures in found.items():
        step_s = statistics.median(figures.seconds)
        lines.append(
            (
                *row,
                f"{1e3 * step_s:.0f}",
                f"{step_s / figures.ideal_s:.3f}",
                f"{figures.of_order:.3f}",
                f"{100 * statistics.median(figures.overheads):.1f}",
                f"{100 * figures.op_inflation:.1f}",
                f"{figures.waits_per_action:.2f}",
                *(f"{ratio:.3f}" for ratio in faster.get(row, ())),
                *[""] * (0 if row in faster else 2),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
