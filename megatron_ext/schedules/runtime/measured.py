"""Statistics of a run: idle time, actions out of table order, peak activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_ext.schedules.runtime.observer import Executed, Observer

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.runtime.rank_table import Table

__all__ = ["Measured", "StepMeasure", "in_words"]

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
    _done: bytearray = field(init=False)
    _head: int = field(default=0, init=False)
    _live: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Mark every action as not done."""
        self._done = bytearray(len(self.table.exchanges))

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Add a finished step."""
        self.into.steps += 1
        self.into.wall_s += wall_s
        for position, action, duration_s in executed:
            self.count(position, action, duration_s)

    def count(self, position: int, action: Action, duration_s: float) -> None:
        """Add a finished action; `position` is its index in table order."""
        into, done = self.into, self._done
        into.actions += 1
        into.busy_s += duration_s
        done[position] = 1
        if position != self._head:
            into.out_of_order += 1
        else:
            self._head = done.find(0, position)
        self._live += _CHANGE[action.kind]
        into.peak_live = max(into.peak_live, self._live)


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
