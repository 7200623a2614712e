"""What a run did with its time: how much of it idle, how much out of the table's order."""

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
"""What an action does to the activations of its rank, in stages: they live until B or W ends."""


@dataclass
class Measured:
    """Of one rank, over its training steps."""

    steps: int = 0
    actions: int = 0
    out_of_order: int = 0
    """Actions that ran while an earlier one of the table was still to be run."""
    busy_s: float = 0.0
    """Time in actions, as the host sees it."""
    wall_s: float = 0.0
    """Time in steps."""
    peak_live: int = 0
    """Most activations of stages that were alive at once."""

    def add(self, other: Measured) -> None:
        """Count another rank, or more steps, in."""
        self.steps = max(self.steps, other.steps)
        self.actions += other.actions
        self.out_of_order += other.out_of_order
        self.busy_s += other.busy_s
        self.wall_s += other.wall_s
        self.peak_live = max(self.peak_live, other.peak_live)


@dataclass
class StepMeasure(Observer):
    """Counts one step of one rank in, when it is over."""

    table: Table
    into: Measured
    _done: bytearray = field(init=False)
    _head: int = field(default=0, init=False)
    _live: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Start with nothing done."""
        self._done = bytearray(len(self.table.exchanges))

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Count a step."""
        self.into.steps += 1
        self.into.wall_s += wall_s
        for position, action, duration_s in executed:
            self.count(position, action, duration_s)

    def count(self, position: int, action: Action, duration_s: float) -> None:
        """Count an action that has run."""
        into = self.into
        into.actions += 1
        into.out_of_order += position != self._head
        into.busy_s += duration_s
        self._done[position] = 1
        while self._head < len(self._done) and self._done[self._head]:
            self._head += 1
        self._live += _CHANGE[action.kind]
        into.peak_live = max(into.peak_live, self._live)


def in_words(together: Measured, pipeline: Pipeline, device: str, where: str = "") -> str:
    """Describe what all ranks of a run did.

    Args:
        together: The sum over the ranks.
        pipeline: What ran.
        where: What to add if it is not all ranks.
        device: Type of the device that computed. Only the host's own time is known here: another
            device still computes when the call that started it returns.
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
