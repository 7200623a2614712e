"""A slow, simple reference implementation of validator and simulator, and of programs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from megatron_ext.schedules import Action, Costs, Schedule, Timeline
from megatron_ext.schedules.table.communication import Transfer, exchanges


def needs(schedule: Schedule, action: Action) -> list[list[Action]]:
    """Return lists of actions: one of each list must come before this action."""
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
        needed.append(
            [Action(stage, kind, microbatch, part + 1) for kind in ("B", "I")]
        )  # type: ignore[arg-type]
    return needed


def is_cover(schedule: Schedule) -> bool:
    """Whether each rank has exactly the actions of its stages."""
    if len(schedule.rows) != schedule.placement.num_ranks:
        return False
    for rank, row in enumerate(schedule.rows):
        counts = Counter(row)
        for stage in schedule.placement.stages_of[rank]:
            for number in product(
                range(schedule.num_microbatches), range(schedule.num_slices)
            ):
                done = "".join(
                    kind * counts.pop(Action(stage, kind, *number), 0)
                    for kind in "FBIW"
                )
                if done not in ("FB", "FIW"):
                    return False
        if counts:
            return False
    return True


def end_times(schedule: Schedule, costs: Costs) -> dict[Action, float] | None:
    """Return when each action ends, or None if the ranks deadlock."""
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


def ends_with_slots(schedule: Schedule, slots: int) -> bool:
    """Whether all ranks finish if each link holds at most `slots` unused messages."""
    hops, rank_of = schedule.placement.hops, schedule.placement.rank_of

    def link(source: int, target: int, kind: str) -> tuple[int, int, str] | None:
        low = min(source, target)
        if kind == "W" or not 0 <= low < len(hops) or hops[low] == "local":
            return None
        return rank_of[source], rank_of[target], "F" if kind == "F" else "B"

    unused: Counter[tuple[int, int, str]] = Counter()
    ends: set[Action] = set()
    position = [0] * len(schedule.rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while position[rank] < len(row):
                first = position[rank]
                num_actions = 2 if first in schedule.pairs_of(rank) else 1
                actions_of_pair = row[first : first + num_actions]
                steps = [
                    (1 if action.kind == "F" else -1, action)
                    for action in actions_of_pair
                ]
                leaving = [link(a.stage, a.stage + step, a.kind) for step, a in steps]
                has_inputs = all(
                    any(option in ends for option in options)
                    for action in actions_of_pair
                    for options in needs(schedule, action)
                )
                # A pair needs both slots at once, because it sends when both actions have ended.
                if not has_inputs or any(to and unused[to] >= slots for to in leaving):
                    break
                coming = [link(a.stage - step, a.stage, a.kind) for step, a in steps]
                unused.update(filter(None, leaving))
                unused.subtract(filter(None, coming))
                ends.update(actions_of_pair)
                position[rank] += len(actions_of_pair)
                progress = True
    return position == list(map(len, schedule.rows))


def is_correct(schedule: Schedule) -> bool:
    """Whether the table computes each gradient once and completes."""
    return is_cover(schedule) and end_times(schedule, Costs()) is not None


def lower(schedule: Schedule) -> list[list[Action | Transfer]]:
    """Return the program of each rank: its actions in the table's order, with all messages."""
    programs: list[list[Action | Transfer]] = [[] for _ in schedule.rows]
    for rank, program in enumerate(programs):
        for exchange in exchanges(schedule, rank):
            # A local tensor is listed once, as the output of its producer.
            program += (
                transfer for transfer in exchange.all_inputs if transfer.verb == "RECV"
            )
            program += (*exchange.actions, *exchange.all_outputs)
    return programs


def text(step: Action | Transfer) -> str:
    """Return the form of torch.distributed.pipelining, where a SEND names the sending stage."""
    if isinstance(step, Action):
        return str(step)
    kind, stage, microbatch, part = step.message[:4]
    if step.verb == "SEND":
        stage += -1 if kind == "F" else 1
    return f"{stage}{step.verb}_{kind}{microbatch}{f'.{part}' if part else ''}"


def span(timeline: Timeline) -> float:
    """Return the longest time between the first start and the last end of a rank."""
    rows = zip(timeline.starts, timeline.ends, strict=True)
    return max(ends[-1] - starts[0] for starts, ends in rows if starts)
