"""The figures of a run in a few lines of text."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.tools.trace.survey import RankSurvey

__all__ = ["Figures", "figures", "text"]

_MAX_LINES = 16
"""Ranks that have a line of their own."""


@dataclass(frozen=True)
class Figures:
    """Summary of the steps of one or more ranks; times in nanoseconds."""

    step_ns: float
    """Median time of an iteration."""
    pipeline_ns: float
    """Median of the time from the first to the last action."""
    busy_ns: float
    """Mean per step in actions."""
    idle_ns: dict[str, float]
    """Mean per step, by cause."""
    after_ns: float
    """Mean per step after the last action."""
    memory_bytes: int
    peak_live: int
    peak_kept: float
    out_of_order_ratio: float

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline's time that is in no action."""
        total = self.busy_ns + sum(self.idle_ns.values())
        return sum(self.idle_ns.values()) / total if total else 0.0


def figures(surveys: Iterable[RankSurvey]) -> Figures:
    """Summarise the steps of some ranks, without each rank's first step, which warms up."""
    steps = [step for survey in surveys for step in survey.complete_steps]
    if not steps:
        return Figures(0, 0, 0, {}, 0, 0, 0, 0, 0)
    idle: dict[str, float] = defaultdict(float)
    for step in steps:
        for cause, time_ns in step.idle_ns.items():
            idle[cause] += time_ns / len(steps)
    actions = sum(step.actions for step in steps)
    return Figures(
        step_ns=statistics.median(step.duration_ns for step in steps),
        pipeline_ns=statistics.median(step.pipeline_ns for step in steps),
        busy_ns=statistics.fmean(step.busy_ns for step in steps),
        idle_ns=dict(sorted(idle.items(), key=lambda item: -item[1])),
        after_ns=statistics.fmean(step.after_ns for step in steps),
        memory_bytes=max(step.memory_bytes for step in steps),
        peak_live=max(step.peak_live for step in steps),
        peak_kept=max(step.peak_kept for step in steps),
        out_of_order_ratio=sum(step.out_of_order for step in steps) / actions if actions else 0.0,
    )


def text(surveys: Sequence[RankSurvey]) -> str:
    """Return the figures of a run: all ranks together, then what each waits for."""
    total = figures(surveys)
    spans = sum(survey.spans for survey in surveys)
    lines = [
        f"{len(surveys)} ranks, {max(s.iterations for s in surveys)} iterations, {spans} spans",
        (
            f"step {total.step_ns / 1e6:.1f} ms, bubble {100 * total.bubble_ratio:.1f} % of the "
            f"pipeline's time, {100 * total.out_of_order_ratio:.1f} % of the actions out of order"
        ),
    ]
    for survey in surveys[:_MAX_LINES]:
        mine = figures([survey])
        causes = ", ".join(
            f"{cause} {time_ns / 1e6:.1f} ms" for cause, time_ns in list(mine.idle_ns.items())[:3]
        )
        lines.append(
            f"  {survey.header.label}: busy {mine.busy_ns / 1e6:.1f} ms; {causes or 'never idle'}; "
            f"peak memory {mine.memory_bytes / 2**30:.2f} GiB"
        )
    if len(surveys) > _MAX_LINES:
        lines.append(f"  and {len(surveys) - _MAX_LINES} further ranks")
    return "\n".join(lines)
