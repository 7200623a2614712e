"""Compares schedules by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import (
    CSV_PREFIX,
    Generator,
    generate,
    get,
    registered,
)
from megatron_ext.schedules.search.simulate import Timeline, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.validation import check_actions
from megatron_ext.schedules.text_table import aligned

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option, Schedule

__all__ = ["compare", "evaluate", "figures", "table", "training_flags", "variants"]


def evaluate(schedule: Schedule, costs: Costs) -> Timeline:
    """Check and simulate a schedule.

    Raises:
        ScheduleError: The table is wrong.
    """
    check_actions(schedule)
    return simulate(schedule, costs)


def compare(
    name: str,
    pp: int | None,
    num_microbatches: int | None,
    costs: Costs,
    chunks: int | None = None,
    options: Mapping[str, Mapping[str, Option]] | None = None,
) -> tuple[list[Timeline], list[str]]:
    """Simulate one schedule, or with `all` every schedule that the sizes allow.

    Args:
        name: A registered schedule, `csv:FILE`, or `all`.
        pp: Ranks of the pipeline world.
        num_microbatches: Micro-batches of that world in one step.
        costs: Durations of actions and latencies of links.
        chunks: Stages on each rank; with `all`, for schedules that leave their number open.
        options: Further options by the name of the schedule.

    Returns:
        The simulations, shortest first, and with `all` the reasons why others are left out.

    Raises:
        ScheduleError: The schedule, or with `all` every schedule, is impossible for these sizes.
    """
    options = options or {}
    if name != "all":
        schedule = generate(name, pp, num_microbatches, chunks, costs, **options.get(name, {}))
        return [evaluate(schedule, costs)], []
    found: list[Timeline] = []
    left_out: list[str] = []
    for generator in registered().values():
        for variant in variants(generator, chunks, options.get(generator.name, {})):
            try:
                schedule = generate(generator.name, pp, num_microbatches, costs=costs, **variant)  # type: ignore[arg-type]
            except ScheduleError as error:
                left_out.append(str(error))
                continue
            found.append(evaluate(schedule, costs))
    reasons = list(dict.fromkeys(left_out))  # variants share reasons
    if not found:
        raise ScheduleError("no schedule can run with these sizes:\n" + "\n".join(reasons))
    found.sort(key=lambda timeline: (timeline.makespan, timeline.peak_activations))
    return found, reasons


def variants(
    generator: Generator, chunks: int | None, chosen: Mapping[str, Option]
) -> list[dict[str, Option]]:
    """Return the options of each variant of a schedule to show, with the user's choices fixed."""
    fixed = dict(chosen)
    if generator.free_chunks and chunks is not None:
        fixed["chunks"] = chunks
    variants: list[dict[str, Option]] = []
    for variant in generator.variants:
        wanted = {**variant, **fixed}
        if wanted not in variants:
            variants.append(wanted)
    return variants


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a simulation under the keys of `plan --json`."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "pp": schedule.pp,
        "num_microbatches": schedule.total_microbatches,
        "makespan": _number(timeline.makespan),
        "ideal": _number(timeline.ideal),
        "bubble": _number(timeline.bubble),
        "bubble_ratio": round(timeline.bubble_ratio, 6),
        "peak_activations": _number(timeline.peak_activations),
        "peak_activations_per_rank": [_number(p) for p in timeline.peak_activations_per_rank],
        "weight_copies": schedule.weight_copies,
        "p2p_messages": timeline.messages,
    }


def _number(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded


def training_flags(schedule: Schedule, costs: Costs = UNIT) -> str:
    """Return the training flags of a schedule for given costs."""
    if schedule.name.startswith(CSV_PREFIX):
        chosen = f"--pipeline-schedule {schedule.name}"
    else:
        chosen = get(schedule.name).chosen_by(schedule)
    made_for = "" if costs == UNIT else f" --pipeline-costs {costs}"
    size = schedule.num_stages if schedule.disaggregated else schedule.pp
    return f"--pipeline-model-parallel-size {size} {chosen}{made_for}"


_HEADS = ("schedule", "makespan", "ideal", "bubble", "bubble %", "peak act.", "weights", "messages")


def table(timelines: Sequence[Timeline]) -> str:
    """Return the comparison as text, in the order given."""
    rows = [_HEADS, *map(_table_row, timelines)]
    return aligned(rows)


def _table_row(timeline: Timeline) -> tuple[str, ...]:
    return (
        timeline.schedule.label,
        f"{timeline.makespan:g}",
        f"{timeline.ideal:g}",
        f"{timeline.bubble:g}",
        f"{100 * timeline.bubble_ratio:.1f}",
        f"{timeline.peak_activations:g}",
        f"{timeline.schedule.weight_copies}x",
        str(timeline.messages),
    )
