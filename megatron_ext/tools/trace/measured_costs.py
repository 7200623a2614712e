"""The schedule of a traced run, and the measured costs of its actions and messages.

The table is beside the traces, as `schedule.json`. Costs are medians: of each action on each stage,
including the runtime's overhead, and of the latency of messages.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules import commands
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.text_file import read_text
from megatron_ext.tools.trace.detect import link_speeds
from megatron_ext.tracing.records import ACTION_NAMES, SCHEDULE_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tools.trace.aggregate import Run

__all__ = ["StageCosts", "load_schedule", "measured_costs", "planned"]

_MAX_BYTES = 64 << 20
_MAX_STAGES = 10_000


@dataclass(frozen=True)
class StageCosts:
    """Seconds of each stage's actions, and of a message."""

    forward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    latency_s: float
    jitter: float
    """Sigma of the logarithm of an action's time."""

    def resampled(self, num_stages: int) -> StageCosts:
        """Return the costs of the same model cut into another number of equal stages."""
        return StageCosts(
            _resample(self.forward_s, num_stages),
            _resample(self.input_s, num_stages),
            _resample(self.weight_s, num_stages),
            self.latency_s,
            self.jitter,
        )

    def costs(self, pp: int, num_stages: int, *, jitter: bool = False) -> Costs:
        """Return what the simulator takes, in seconds, for a cut of the model."""
        cut = self.resampled(num_stages)
        totals = [
            sum(stage) for stage in zip(cut.forward_s, cut.input_s, cut.weight_s, strict=True)
        ]
        mean = statistics.fmean(totals)
        return Costs(
            sum(cut.forward_s) / pp,
            sum(cut.input_s) / pp,
            sum(cut.weight_s) / pp,
            latency=self.latency_s,
            stage_scale=tuple(total / mean for total in totals),
            jitter=self.jitter if jitter else 0.0,
        )


def _resample(times: Sequence[float], count: int) -> tuple[float, ...]:
    """Spread the time of each stage evenly over its part of the model, and split again."""
    old = len(times)
    found = []
    for stage in range(count):
        begin, end = stage * old / count, (stage + 1) * old / count
        total = 0.0
        for index in range(int(begin), min(old, int(end) + 1)):
            total += times[index] * max(0.0, min(end, index + 1) - max(begin, index))
        found.append(total)
    return tuple(found)


def load_schedule(directory: Path) -> Schedule | None:
    """Return the table of a run, or None if the run wrote none.

    Raises:
        DataError: The file is damaged or of impossible size.
    """
    path = directory / SCHEDULE_FILE
    try:
        schedule = table_files.from_json(read_text(path, _MAX_BYTES))
        placement = schedule.placement
        if not (0 < placement.num_ranks <= _MAX_STAGES and placement.num_stages <= _MAX_STAGES):
            raise ScheduleError(f"it has {placement.num_stages} stages")
        commands.evaluate(schedule, Costs())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ScheduleError, ValueError, RecursionError, TypeError, IndexError) as error:
        raise DataError(f"{path} is damaged: {error}; delete it, or trace the run again") from error
    return schedule


def measured_costs(run: Run, schedule: Schedule) -> StageCosts:
    """Return the measured costs of a run's actions.

    The time of an unsplit backward is divided equally between input and weight gradient.

    Raises:
        DataError: The actions of some stage were not traced.
    """
    times: dict[tuple[str, int], list[int]] = defaultdict(list)
    sigmas = []
    for survey in run.surveys:
        for key, sample in survey.actions.items():
            times[key].append(sample.median_ns)
            sigmas.append(sample.sigma)

    def median_s(kind: str, stage: int) -> float | None:
        found = times.get((ACTION_NAMES[kind], stage))
        return statistics.median(found) / 1e9 if found else None

    rows: list[tuple[float, float, float]] = []
    for stage in range(schedule.num_stages):
        forward, whole = median_s("F", stage), median_s("B", stage)
        split = median_s("I", stage), median_s("W", stage)
        if split[0] and split[1]:
            backward = split[0], split[1]
        elif whole:
            backward = whole / 2, whole / 2
        else:
            backward = None
        if not forward or backward is None:
            raise DataError(
                f"{run.directory}: the trace has no forward and backward of stage {stage}; plans "
                f"need the traces of all pipeline ranks, with more than one iteration"
            )
        rows.append((forward, *backward))
    forwards, inputs, weights = zip(*rows, strict=True)
    delays = [speed.delay_ns for speed in link_speeds(run) if speed.delay_ns is not None]
    latency_s = statistics.median(delays) / 1e9 if delays else 0.0
    return StageCosts(forwards, inputs, weights, latency_s, statistics.median(sigmas or [0.0]))


def planned(run: Run, schedule: Schedule) -> Timeline:
    """Return the table of a run, simulated with measured costs; times in seconds."""
    costs = measured_costs(run, schedule).costs(schedule.pp, schedule.num_stages)
    return commands.evaluate(schedule, costs)
