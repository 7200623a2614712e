"""Slices: tables whose micro-batches run through the pipeline in parts of their sequence.

A pipeline fills with slices as it does with micro-batches, but in 1/k of the time, and keeps the
activations of as many slices, each 1/k of a micro-batch. So a table with k times as many
micro-batches is almost the table of slices. Only the order of backwards differs: the backwards of a
micro-batch's slices run in reverse, and start only after its last forward, k - 1 forwards later.

    1f1b, last rank, m 4            the same, m 2 in 2 slices
    F0 B0 F1 B1 F2 B2 F3 B3         F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1

To make up for that, all forwards move ahead by k - 1.

The idea is from SlimPipe (arXiv 2504.14519) and Seq1F1B (arXiv 2406.03488), without split
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.greedy import Problem, Rows, Variant, search, spread
from megatron_ext.schedules.search.simulate import fastest, simulate
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.table_change import TableChange
from megatron_ext.schedules.table.transforms import ahead
from megatron_ext.schedules.table.validation import check_actions
from megatron_ext.schedules.table.walk import stuck

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Kind, Option, Row, Schedule


class SliceChange(TableChange):
    """Implements the option `slices` of `generate`: each micro-batch runs in that many slices."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._num_slices = int(options.get("slices", 1))
        self._has_pairs = bool(options.get("pairs", False))
        self.passes_per_microbatch = self._num_slices

    def of_file(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the table of a file, with slices of equal cost; the file fixes their number.

        Raises:
            ScheduleError: The file has a different number of slices.
        """
        # 1 is the default, which means that the caller requested no number.
        if self._num_slices not in (1, schedule.num_slices):
            raise ScheduleError(
                f"{schedule.name}: the file fixes the number of slices, which is "
                f"{schedule.num_slices}, not {self._num_slices}; leave it out"
            )
        shares = shares_of_equal_cost(schedule.num_slices, costs.attention)
        return replace(schedule, slices=shares)

    def check(self, name: str) -> None:
        """Reject an impossible number before it multiplies the size of the table.

        Raises:
            ScheduleError: Pairs are requested as well, or there are too many slices.
        """
        if self._has_pairs and self._num_slices > 1:
            raise ScheduleError(f"{name}: slices cannot run as pairs yet; leave one of the two out")
        shares_of_equal_cost(self._num_slices)

    def change(self, schedule: Schedule, costs: Costs, *, is_made_for_pairs: bool) -> Schedule:
        """Return the table of slices."""
        if self._num_slices == 1:
            return schedule
        return sliced(schedule, self._num_slices, costs)


def sliced(schedule: Schedule, num_slices: int, costs: Costs = UNIT) -> Schedule:
    """Return the table of micro-batches in slices of equal cost.

    `schedule` is a table with as many micro-batches as there are slices in a step. The result is
    the candidate order with the shortest step for `costs` without jitter and, among equals, the
    lowest memory.

    Raises:
        ScheduleError: Forwards and backwards are on different ranks, or no order was found.
    """
    table = replace(
        schedule,
        num_microbatches=schedule.num_microbatches // num_slices,
        rows=_rows_of_slices(schedule, num_slices),
        slices=shares_of_equal_cost(num_slices),
        options={**schedule.options, "slices": num_slices},
    )
    # In tables without chunks, and in interleaved ones, this costs only k - 1 slices of memory.
    lead = max(map(_lead, table.rows))
    moved_table = replace(table, rows=tuple(ahead(row, lead) for row in table.rows))
    check_actions(moved_table)
    candidates: list[Sequence[Row]] = []
    if not stuck(moved_table):
        candidates.append(moved_table.rows)
    # If the step takes longer, beyond rounding, than 1/k of a step with as many whole micro-batches
    # as there are slices, also place the actions anew under the same memory cap: in folded tables
    # the chunks need different leads.
    even_costs = replace(costs, attention=0.0)
    whole_costs = replace(even_costs, latency=num_slices * costs.latency)
    least_makespan = simulate(schedule, whole_costs).makespan / num_slices
    shares = shares_of_equal_cost(num_slices, costs.attention)
    if not candidates or simulate(moved_table, even_costs).makespan > least_makespan * (1 + 1e-6):
        try:
            candidates.append(_searched_rows(schedule, num_slices, shares, costs))
        except ScheduleError:
            if not candidates:
                raise
    tables = [replace(table, rows=tuple(rows), slices=shares) for rows in candidates]
    return fastest(tables, costs)


def _searched_rows(
    schedule: Schedule, num_slices: int, shares: tuple[float, ...], costs: Costs
) -> Rows:
    """Return the rows found by a search that may use as much memory as the moved table.

    Raises:
        ScheduleError: The search finds no table.
    """
    chunks = max(map(len, schedule.placement.stages_of))
    peak = max(map(most_alive, schedule.rows))
    backward: tuple[Kind, ...] = ("B",)
    if schedule.splits_backward:
        backward = ("I", "W")
    problem = Problem(
        schedule.placement,
        schedule.num_microbatches // num_slices,
        (peak + chunks * (num_slices - 1)) / num_slices,
        costs,
        shares,
        backward,
    )
    variants = [Variant()]
    for limit in spread(num_slices, num_slices + schedule.pp):
        variants.append(Variant(limit))
    return search(problem, variants)


def _rows_of_slices(schedule: Schedule, num_slices: int) -> tuple[Row, ...]:
    """Return the rows with each micro-batch replaced by a slice."""
    rows = []
    for row in schedule.rows:
        rows.append(tuple(_of_slice(action, num_slices) for action in row))
    return tuple(rows)


def _of_slice(action: Action, num_slices: int) -> Action:
    """Return the slice's action that replaces a micro-batch's action."""
    microbatch, slice_index = divmod(action.microbatch, num_slices)
    # Backwards of a micro-batch start with its last slice, which attended to all keys and values.
    if action.kind != "F":
        slice_index = num_slices - 1 - slice_index
    return action._replace(microbatch=microbatch, slice=slice_index)


def _lead(row: Row) -> int:
    """Return by how many places a row's forwards come too late for its backwards."""
    # By stage and micro-batch: the number of forwards in the row up to the one of its last slice.
    forwards_needed: dict[tuple[int, int], int] = {}
    num_forwards = 0
    for action in row:
        if action.kind == "F":
            num_forwards += 1
            forwards_needed[action.stage, action.microbatch] = num_forwards
    lead = num_ran = 0
    for action in row:
        if action.kind == "F":
            num_ran += 1
        else:
            needed = forwards_needed.get((action.stage, action.microbatch), 0)
            lead = max(lead, needed - num_ran)
    return lead
