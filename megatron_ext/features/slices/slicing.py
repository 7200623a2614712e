"""Tables whose micro-batches run through the pipeline in slices of their sequence.

A pipeline fills with slices the same way it fills with micro-batches, but with k slices per
micro-batch, filling takes 1/k of the time, and each stored activation has 1/k of the size. A table
with k times as many micro-batches is therefore almost a table with slices. Only the order of
backward passes differs: a micro-batch's slices run their backward passes in reverse order, and the
first of these has to wait for k - 1 more forward passes. To compensate, all forward passes move
ahead by k - 1 places.

    1f1b, last rank, m 4            1f1b, last rank, m 2 in 2 slices
    F0 B0 F1 B1 F2 B2 F3 B3         F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1

The idea is from SlimPipe (arXiv 2504.14519) and Seq1F1B (arXiv 2406.03488), which do not split
backward passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.greedy import Problem, Variant, search, spread
from megatron_ext.schedules.search.simulate import fastest, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.table_change import TableChange
from megatron_ext.schedules.table.transforms import ahead
from megatron_ext.schedules.table.validation import check_actions
from megatron_ext.schedules.table.walk import stuck

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Kind, Row, Schedule, SliceSizes


class SliceChange(TableChange):
    """Implements the `slices` option of `generate`: the number of slices per micro-batch."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._num_slices = int(options.get("slices", 1))
        self._has_pairs = bool(options.get("pairs", False))

    def of_file(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return a file's table with slices of equal cost. The file determines how many there are.

        Raises:
            ScheduleError: The file has a different number of slices.
        """
        # 1 is the default and means that the caller has not requested a number.
        if self._num_slices not in (1, schedule.num_slices):
            raise ScheduleError(
                f"{schedule.name}: the file fixes the number of slices at "
                f"{schedule.num_slices}, got {self._num_slices}; do not set their number"
            )
        shares = shares_of_equal_cost(schedule.num_slices, costs.attention)
        return replace(schedule, slices=shares)

    def check(self, name: str) -> None:
        """Reject an invalid number of slices before it multiplies the size of the table.

        Raises:
            ScheduleError: Pairs are requested as well, or there are too many slices.
        """
        if self._has_pairs and self._num_slices > 1:
            raise ScheduleError(
                f"{name}: slices cannot run as pairs; disable slices or pairs"
            )
        shares_of_equal_cost(self._num_slices)

    def num_passes(self, num_microbatches: int) -> int:
        """Return the number of slices in a step."""
        return num_microbatches * self._num_slices

    def change(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        alternates: bool,
    ) -> Schedule:
        """Return the table with slices."""
        if self._num_slices == 1:
            return schedule
        return sliced(schedule, self._num_slices, costs)

    def flags(self, schedule: Schedule) -> list[str]:
        """Return the flag for this many slices."""
        if schedule.num_slices == 1:
            return []
        return [f"--pipeline-slices {schedule.num_slices}"]


class LengthChange(TableChange):
    """Implements the `slice_sizes` option of `generate`: the sizes of each micro-batch's slices."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._slice_sizes: SliceSizes = options.get("slice_sizes", ())

    def num_passes(self, num_microbatches: int) -> int:
        """Return the number of slices in a step."""
        if not self._slice_sizes:
            return num_microbatches
        return sum(map(len, self._slice_sizes))

    def change(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        alternates: bool,
    ) -> Schedule:
        """Return the table with slices."""
        if not self._slice_sizes:
            return schedule
        return sliced_by_length(schedule, self._slice_sizes, costs)


def sliced(schedule: Schedule, num_slices: int, costs: Costs = UNIT) -> Schedule:
    """Return a table whose micro-batches run in slices of equal cost.

    `schedule` is a table with as many micro-batches as there are slices in a step. The result is
    the candidate with the shortest step under `costs` without jitter. Ties go to the candidate that
    uses the least memory.

    Raises:
        ScheduleError: Forward and backward passes are on different ranks, or no order was found.
    """
    num_microbatches = schedule.num_microbatches // num_slices
    table = replace(
        schedule,
        num_microbatches=num_microbatches,
        rows=_rows_of_slices(schedule, [num_slices] * num_microbatches),
        slices=shares_of_equal_cost(num_slices),
        options={**schedule.options, "slices": num_slices},
    )
    # For tables without chunks and for interleaved tables, this costs k - 1 slices of
    # memory.
    moved_table = _moved_ahead(table)
    candidates: list[Sequence[Row]] = []
    if not stuck(moved_table):
        candidates.append(moved_table.rows)
    # In folded tables, chunks need different leads. If the step takes longer (beyond
    # rounding) than 1/k of a step with one whole micro-batch per slice, also search for
    # another order with the same memory cap.
    even_costs = replace(costs, attention=0.0)
    whole_costs = replace(even_costs, latency=num_slices * costs.latency)
    least_makespan = simulate(schedule, whole_costs).makespan / num_slices
    shares = shares_of_equal_cost(num_slices, costs.attention)
    needs_search = True
    if candidates:
        makespan = simulate(moved_table, even_costs).makespan
        needs_search = makespan > least_makespan * (1 + 1e-6)
    if needs_search:
        try:
            table_with_shares = replace(table, slices=shares)
            problem = _problem(schedule, table_with_shares, costs)
            # Later variants limit the number of slices in flight, with increasing bounds.
            variants = [Variant()]
            for limit in spread(num_slices, num_slices + schedule.pp):
                variants.append(Variant(limit))
            candidates.append(search(problem, variants))
        except ScheduleError:
            if not candidates:
                raise
    tables = []
    for rows in candidates:
        tables.append(replace(table, rows=tuple(rows), slices=shares))
    return fastest(tables, costs)


def sliced_by_length(
    schedule: Schedule,
    slice_sizes: SliceSizes,
    costs: Costs = UNIT,
) -> Schedule:
    """Return a table whose micro-batches have different numbers of slices.

    `schedule` is a table with as many micro-batches as there are slices in the step. All slices
    should have about the same cost.

    Raises:
        ScheduleError: Forward and backward passes are on different ranks, or no order was found.
    """
    table = replace(
        schedule,
        num_microbatches=len(slice_sizes),
        rows=(),
        slice_sizes=slice_sizes,
    )
    # Every step has a different table, so this must be fast. Run a search only for
    # folded tables, whose chunks need different leads, and try only one variant.
    if schedule.placement.name not in ("v", "w"):
        nums_slices = list(map(len, slice_sizes))
        rows = _rows_of_slices(schedule, nums_slices)
        moved_table = _moved_ahead(replace(table, rows=rows))
        if not stuck(moved_table):
            return moved_table
    problem = _problem(schedule, table, costs)
    largest = max(map(max, slice_sizes))
    # The search starts a slice whenever memory is below the cap, so a slice that is
    # larger than the mean may exceed the cap by the difference. The third cap has room
    # for the same number of slices of the largest size, which is enough if all slices
    # take equally long. If later slices are slower because of attention, the search may
    # get stuck, so give it more room, one slice at a time.
    excess = largest - 1 / table.num_slices
    enough = problem.cap * table.num_slices * largest
    caps = [problem.cap - excess, problem.cap]
    most_more = 2 * max(table.num_slices, schedule.pp)
    for num_more in range(most_more + 1):
        caps.append(enough + num_more * largest)
    for cap in caps[:-1]:
        with suppress(ScheduleError):
            return _searched(table, problem, cap)
    return _searched(table, problem, caps[-1])


def _searched(table: Schedule, problem: Problem, cap: float) -> Schedule:
    """Return the table with the order that a search with this memory cap finds."""
    capped_problem = replace(problem, cap=cap)
    rows = search(capped_problem, [Variant()])
    return replace(table, rows=rows)


def _moved_ahead(table: Schedule) -> Schedule:
    """Return a sliced table with forward passes moved far enough ahead of backward passes."""
    lead = max(map(_lead, table.rows))
    moved_rows = tuple(ahead(row, lead) for row in table.rows)
    moved_table = replace(table, rows=moved_rows)
    check_actions(moved_table)
    return moved_table


def _problem(schedule: Schedule, table: Schedule, costs: Costs) -> Problem:
    """Return a search problem whose memory cap is the peak memory of the moved table.

    `schedule` has one micro-batch per slice in `table`.
    """
    num_slices = table.num_slices
    chunks = max(map(len, schedule.placement.stages_of))
    peak = max(map(most_alive, schedule.rows))
    num_more = chunks * (num_slices - 1)
    backward: tuple[Kind, ...] = ("B",)
    if schedule.splits_backward:
        backward = ("I", "W")
    return Problem(
        schedule.placement,
        table.num_microbatches,
        (peak + num_more) / num_slices,
        costs,
        table.slices,
        backward,
        table.slice_sizes,
    )


def _rows_of_slices(
    schedule: Schedule,
    nums_slices: Sequence[int],
) -> tuple[Row, ...]:
    """Return a table's rows, with each micro-batch replaced by a slice.

    `nums_slices` gives the number of slices per micro-batch in the result.
    """
    # [micro-batch of `schedule`] -> (micro-batch, slice) that replaces it.
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    for microbatch, num_slices in enumerate(nums_slices):
        slices = [(microbatch, slice_index) for slice_index in range(num_slices)]
        forwards += slices
        # A micro-batch's backward passes start with its last slice, which attends to all keys and
        # values.
        backwards += reversed(slices)
    rows: list[Row] = []
    for row in schedule.rows:
        moved_row = []
        for action in row:
            if action.kind == "F":
                microbatch, slice_index = forwards[action.microbatch]
            else:
                microbatch, slice_index = backwards[action.microbatch]
            moved_action = action._replace(microbatch=microbatch, slice=slice_index)
            moved_row.append(moved_action)
        rows.append(tuple(moved_row))
    return tuple(rows)


def _lead(row: Row) -> int:
    """Return how many places a row's forward passes have to move ahead."""
    # (stage, micro-batch) -> number of forward passes in the row up to that of its last slice.
    forwards_needed: dict[tuple[int, int], int] = {}
    num_forwards = 0
    for action in row:
        if action.kind == "F":
            num_forwards += 1
            forwards_needed[action.stage, action.microbatch] = num_forwards
    lead = 0
    num_ran = 0
    for action in row:
        if action.kind == "F":
            num_ran += 1
        else:
            key = (action.stage, action.microbatch)
            needed = forwards_needed.get(key, 0)
            lead = max(lead, needed - num_ran)
    return lead
