"""A second, slow and simple implementation of what validator and simulator compute."""

from __future__ import annotations

from collections import Counter
from itertools import product

from megatron_ext.schedules import Action, Costs, Schedule


def needs(schedule: Schedule, action: Action) -> list[list[Action]]:
    """Actions that come before an action: one of each list."""
    stage, kind, *number = action
    microbatch, part = number
    if kind == "W":
        return [[Action(stage, "I", *number)]]
    needed = []
    if kind == "F":
        if stage:
            needed.append([Action(stage - 1, "F", *number)])
        if part:
            needed.append([Action(stage, "F", microbatch, part - 1)])
        return needed
    needed.append([Action(stage, "F", *number)])
    if stage + 1 < schedule.num_stages:
        needed.append([Action(stage + 1, kind, *number) for kind in ("B", "I")])  # type: ignore[arg-type]
    if part + 1 < schedule.num_slices:
        needed.append([Action(stage, kind, microbatch, part + 1) for kind in ("B", "I")])  # type: ignore[arg-type]
    return needed


def is_cover(schedule: Schedule) -> bool:
    """Whether each rank has exactly the actions of its stages."""
    if len(schedule.rows) != schedule.placement.num_ranks:
        return False
    for rank, row in enumerate(schedule.rows):
        counts = Counter(row)
        for stage in schedule.placement.stages_of[rank]:
            for number in product(range(schedule.num_microbatches), range(schedule.num_slices)):
                done = "".join(
                    kind * counts.pop(Action(stage, kind, *number), 0) for kind in "FBIW"
                )
                if done not in ("FB", "FIW"):
                    return False
        if counts:
            return False
    return True


def end_times(schedule: Schedule, costs: Costs) -> dict[Action, float] | None:
    """When each action ends, or None if the ranks wait for each other for ever."""
    durations = costs.durations(schedule)
    hops = schedule.placement.hops
    ends: dict[Action, float] = {}
    rows = [list(row) for row in schedule.rows]
    free = [0.0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while row:
                action = row[0]
                inputs = [
                    [option for option in options if option in ends]
                    for options in needs(schedule, action)
                ]
                if not all(inputs):
                    break
                start = free[rank]
                for [option] in inputs:
                    crosses = option.stage != action.stage
                    hop = hops[min(option.stage, action.stage)] if crosses else "local"
                    arrival = ends[option] + (costs.latency if hop != "local" else 0.0)
                    start = max(start, arrival)
                ends[action] = free[rank] = (
                    start
                    + durations[action.kind][action.stage]
                    * (costs.slice_factors(schedule.slices)[action.kind][action.slice])
                )
                row.pop(0)
                progress = True
    return None if any(rows) else ends


def is_correct(schedule: Schedule) -> bool:
    """Whether the table computes each gradient once and ends."""
    return is_cover(schedule) and end_times(schedule, Costs()) is not None
