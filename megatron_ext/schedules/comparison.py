"""Compares simulated schedules and returns their tables, figures and training flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import (
    CSV_PREFIX,
    generate,
    get,
    registered,
)
from megatron_ext.schedules.search.simulate import Timeline, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.table_change import in_use, take_table_changes
from megatron_ext.schedules.table.validation import check_actions

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option, Schedule


class Choice(NamedTuple):
    """A schedule to compare, with the options that distinguish its variants."""

    name: str
    options: Mapping[str, Any]
    """The generator's options, including `chunks` if the user may choose the number of chunks."""


def evaluate(schedule: Schedule, costs: Costs) -> Timeline:
    """Check and simulate a schedule.

    Raises:
        ScheduleError: The table is invalid.
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
    **feature_options: Any,
) -> tuple[list[Timeline], list[str]]:
    """Simulate a schedule or, if `name` is `all`, every schedule that the sizes allow.

    Args:
        name: A registered schedule, `csv:FILE`, or `all`.
        pp: Number of ranks in the pipeline world.
        num_microbatches: Number of micro-batches that these ranks run per step.
        costs: Durations of actions and latencies of links.
        chunks: Number of stages per rank. With `all`, this applies only to schedules that let the
            user choose it.
        options: Additional options, keyed by schedule name.
        feature_options: Options of features (`feature_list.TABLES`), for all schedules.

    Returns:
        The simulations, shortest step first, and with `all` the reasons why other schedules were
        left out.

    Raises:
        ScheduleError: The schedule, or with `all` every schedule, is impossible for these sizes.
    """
    options = options or {}
    if name != "all":
        schedule = generate(
            name,
            pp,
            num_microbatches,
            chunks,
            costs,
            **in_use(**feature_options),
            **options.get(name, {}),
        )
        return [evaluate(schedule, costs)], []
    schedules, left_out = possible_tables(
        _choices(chunks, options),
        pp,
        num_microbatches,
        costs,
        **feature_options,
    )
    if not schedules:
        reasons = "\n".join(left_out)
        raise ScheduleError(f"no schedule can run with these sizes:\n{reasons}")
    timelines = [evaluate(schedule, costs) for schedule in schedules]
    timelines.sort(key=_time_and_memory)
    return timelines, left_out


def _time_and_memory(timeline: Timeline) -> tuple[float, float]:
    """Return a sort key: of two equally fast tables, the one with less memory comes first."""
    return timeline.makespan, timeline.peak_activations


def _choices(
    chunks: int | None,
    user_options: Mapping[str, Mapping[str, Option]],
) -> list[Choice]:
    """Return the variants of all schedules. The user's options override the variants' options."""
    choices: list[Choice] = []
    for generator in registered().values():
        options_of_user = user_options.get(generator.name, {})
        fixed = dict(options_of_user)
        if generator.free_chunks and chunks is not None:
            fixed["chunks"] = chunks
        for variant in generator.variants:
            options = {**variant, **fixed}
            choice = Choice(generator.name, options)
            # Variants that differed only in an option that the user fixed are now
            # identical.
            if choice not in choices:
                choices.append(choice)
    return choices


def possible_tables(
    choices: Iterable[Choice],
    pp: int | None,
    num_microbatches: int | None,
    costs: Costs,
    **feature_options: Any,
) -> tuple[list[Schedule], list[str]]:
    """Return the tables that these sizes allow and the distinct reasons why others fail."""
    schedules: list[Schedule] = []
    reasons: list[str] = []
    for choice in choices:
        try:
            schedule = generate(
                choice.name,
                pp,
                num_microbatches,
                costs=costs,
                **in_use(**feature_options),
                **choice.options,
            )
        except ScheduleError as error:  # noqa: PERF203 - bad sizes raise
            # A schedule's variants usually all fail for the same reason.
            if str(error) not in reasons:
                reasons.append(str(error))
        else:
            schedules.append(schedule)
    return schedules, reasons


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return a simulation's figures under the keys that `plan --json` prints.

    Times are in the unit of the costs, and activations are in Ma (`table/memory.py`).
    """
    schedule = timeline.schedule
    numbers: dict[str, Any] = {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "pp": schedule.pp,
        "num_microbatches": schedule.total_microbatches,
        "makespan": _number(timeline.makespan),
        "ideal": _number(timeline.ideal),
        "bubble": _number(timeline.bubble),
        "bubble_ratio": round(timeline.bubble_ratio, 6),
        "peak_activations": _number(timeline.peak_activations),
        "peak_activations_per_rank": [
            _number(peak) for peak in timeline.peak_activations_per_rank
        ],
    }
    if schedule.num_slices > 1:
        if schedule.slice_sizes:
            numbers["slice_sizes"] = [list(sizes) for sizes in schedule.slice_sizes]
        else:
            numbers["slices"] = list(schedule.slices)
        numbers["peak_keys_and_values"] = _number(timeline.keys_and_values)
    numbers["weight_copies"] = schedule.weight_copies
    numbers["p2p_messages"] = timeline.messages
    if timeline.costs.all_to_all:
        numbers["all_to_all_hidden"] = _number(timeline.hidden)
    return numbers


def _number(value: float) -> float | int:
    """Round off summation errors and return an integer if the result is a whole number."""
    rounded = round(value, 9)
    if rounded == int(rounded):
        return int(rounded)
    return rounded


def training_flags(schedule: Schedule, costs: Costs = UNIT) -> str:
    """Return the flags for training with this schedule and these costs."""
    # A disaggregated job has a forward and a backward rank per Megatron pipeline rank.
    size = schedule.num_stages if schedule.disaggregated else schedule.pp
    flags = [f"--pipeline-model-parallel-size {size}"]
    by_name = f"--pipeline-schedule {schedule.name}"
    if schedule.name.startswith(CSV_PREFIX):
        flags.append(by_name)
    else:
        generator = get(schedule.name)
        chunks = schedule.num_stages // schedule.placement.num_ranks
        template = generator.flags or by_name
        flags.append(template.format(chunks=chunks))
        # Options with default values need no flag.
        for key, values in generator.options.items():
            default = values[0]
            value = schedule.options.get(key, default)
            if value != default:
                flags.append(f"{generator.flag(key)} {value}")
    # The text form of costs omits the attention and all-to-all shares, which only
    # simulations use.
    if str(costs) != str(UNIT):
        flags.append(f"--pipeline-costs {costs}")
    for change in take_table_changes({}):
        flags += change.flags(schedule)
    return " ".join(flags)
