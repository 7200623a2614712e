"""Statistics of a run: idle time, actions out of table order, peak activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_ext.runtime.observer import Executed, Observer

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.runtime.rank_table import Table

__all__ = ["Measured", "StepMeasure", "in_words", "num_out_of_order"]

_CHANGE = {"F": 1, "R": 1, "B": -1, "I": 0, "W": -1}
"""Change in live activations by kind of action. An activation lives until B or W ends."""


@dataclass
class Measured:
    """Statistics of one rank over its training steps."""

    steps: int = 0
    actions: int = 0
    out_of_order: int = 0
    """Actions that ran before an earlier action of the table."""
    busy_s: float = 0.0
    """Time in actions, in seconds of host time."""
    wall_s: float = 0.0
    """Time in steps, in seconds."""
    peak_live: int = 0
    """Peak number of live stage activations."""

    def add(self, other: Measured) -> None:
        """Add the statistics of another rank or of further steps."""
        self.steps = max(self.steps, other.steps)
        self.actions += other.actions
        self.out_of_order += other.out_of_order
        self.busy_s += other.busy_s
        self.wall_s += other.wall_s
        self.peak_live = max(self.peak_live, other.peak_live)


@dataclass
class StepMeasure(Observer):
    """Adds one step of one rank to `into` when the step ends."""

    table: Table
    into: Measured

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Add a finished step."""
        into = self.into
        into.steps += 1
        into.wall_s += wall_s
        into.actions += len(executed)
        into.busy_s += sum(duration_s for _, _, duration_s in executed)
        into.out_of_order += num_out_of_order(executed)
        live = accumulate(_CHANGE[action.kind] for _, action, _ in executed)
        into.peak_live = max(into.peak_live, *live)


def num_out_of_order(executed: Sequence[Executed]) -> int:
    """Return how many actions of a complete step ran before an earlier action of the table."""
    positions = [position for position, _, _ in executed]
    if positions == sorted(positions):  # every static order: spare it the loop
        return 0
    done = bytearray(len(positions))
    head = found = 0
    for position in positions:
        done[position] = 1
        if position == head:
            head = done.find(0, head)
        else:
            found += 1
    return found


def in_words(together: Measured, pipeline: Pipeline, device: str, where: str = "") -> str:
    """Format the statistics of a run as one line.

    Args:
        together: The sum over all ranks.
        pipeline: The pipeline that ran.
        device: Type of the compute device. Idle time is reported for "cpu" only: times are host
            times, and any other device still computes when the launching call returns.
        where: Qualifier if `together` does not cover all ranks.
    """
    schedule = pipeline.full
    order = "table" if pipeline.dynamic is None else pipeline.dynamic.policy
    figures = [f"{100 * together.out_of_order / together.actions:.1f} % of actions out of order"]
    if device == "cpu":
        figures.append(f"{100 * (1 - together.busy_s / together.wall_s):.1f} % of the time idle")
    figures.append(
        f"at most {together.peak_live * schedule.pp / schedule.num_stages:g} activations"
    )
    return (
        f"pipeline schedule: {schedule.label}, order by {order}, measured over {together.steps} "
        f"steps{where}: {', '.join(figures)}"
    )
