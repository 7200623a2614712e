"""Draws a simulated schedule as a text grid with one line per rank.

    0|F0 F1 F2 F3 .  .  .  .  .  B0--- B1--- B2--- B3---

Time runs from left to right. `F0` is the forward pass for micro-batch 0, `B0---` is a backward pass
that takes as long as two forward passes, and `.` is idle time. Lower case marks a rank's second
chunk. If ranks have more than two chunks, cells show the stage instead, as in `5F0`. If a schedule
has twins, both directions are drawn. Micro-batches in the second direction are numbered after those
in the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.drawing.palette import KINDS, NAMES, ansi
from megatron_ext.schedules.table.transforms import chunk_on_screen, table_rank

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Action, Schedule

# A cell, including a long bar's dashes or a pair's second action.
_CELL = re.compile(r"\b\d*([FBIWRfbiwr])\d+\S*")
_KIND_IN_LEGEND = re.compile(r"\b([FBIWR])(?= [a-z])")


def picture(
    timeline: Timeline,
    width: int = 100,
    *,
    coloured: bool = False,
) -> str:
    """Return the caption, grid and legend for a terminal that is `width` columns wide."""
    body = grid(timeline, width)
    legend = _legend(timeline)
    if coloured:
        body = _CELL.sub(_painted, body)
        legend = _KIND_IN_LEGEND.sub(_painted, legend)
    return f"{caption(timeline)}\n{body}\n{legend}"


def _painted(cell: re.Match[str]) -> str:
    """Return a cell in its kind's colour, in the pale shade if the letter is lower case."""
    kind = cell[1]
    even, odd = KINDS[kind.upper()]
    if kind.islower():
        return ansi(cell[0], odd)
    return ansi(cell[0], even)


def caption(timeline: Timeline) -> str:
    """Return a simulation's figures on one line."""
    schedule = timeline.schedule
    return (
        f"{schedule.label}: pp {schedule.pp}, m {schedule.total_microbatches}, makespan "
        f"{timeline.makespan:g}, bubble {timeline.bubble:g} ({100 * timeline.bubble_ratio:.1f} %), "
        f"peak {timeline.peak_activations:g}"
    )


# A column is as wide as the shortest action, so a single tiny duration could make the
# grid exhaust the memory.
_MAX_CELLS = 1 << 20


def check_drawable(timeline: Timeline) -> None:
    """Check that a picture's grid is not too large.

    Raises:
        ScheduleError: The picture has too many columns.
    """
    pp = timeline.schedule.pp
    slot = slot_time(timeline)
    columns = timeline.makespan / slot
    if columns * pp > _MAX_CELLS:
        raise ScheduleError(
            f"{timeline.schedule.label} on {pp} ranks needs {columns:.3g} columns of {slot:g}, but "
            f"at most {_MAX_CELLS // pp} can be drawn; use fewer micro-batches, or --costs that "
            f"differ less from each other"
        )


def _legend(timeline: Timeline) -> str:
    schedule = timeline.schedule
    kinds = drawn_kinds(schedule)
    parts = []
    for kind, name in NAMES.items():
        if kind in kinds:
            parts.append(f"{kind} {name}")
    if schedule.pairs:
        parts.append("F+B pair")
    if schedule.num_slices > 1:
        parts.append("F0.1 slice 1 of micro-batch 0")
    if _num_chunks(schedule) == 2:
        parts.append("lower case: second chunk")
    if schedule.placement.twins == 2:
        parts.append(f"second direction from {schedule.num_microbatches}")
    parts.append(f"one column: {slot_time(timeline):g}")
    return ", ".join(parts)


def drawn_kinds(schedule: Schedule) -> set[str]:
    """Return the kinds of actions in a table that a picture shows."""
    kinds: set[str] = set()
    for row in schedule.rows:
        kinds.update(action.kind for action in row)
    if schedule.ships_activations:
        # If activations are shipped, R takes no time, so it is not drawn.
        kinds.discard("R")
    return kinds


def unit_of_time(timeline: Timeline) -> str:
    """Return the meaning of 1 on the time axis."""
    if timeline.costs.forward == 1:
        return "1 = forward of one micro-batch on 1/pp of the model"
    return "in the unit of --costs"


def slot_time(timeline: Timeline) -> float:
    """Return the duration of one column, which is the duration of the shortest action."""
    durations: list[float] = []
    for row in timeline.bars:
        for _, start, end in row:
            # If activations are shipped, R takes no time.
            if end > start:
                durations.append(end - start)
    return min(durations)


def _num_chunks(schedule: Schedule) -> int:
    # The last stage has the highest chunk number.
    return 1 + chunk_on_screen(schedule, schedule.num_stages - 1)


def cell_label(schedule: Schedule, action: Action) -> str:
    """Return the text for an action's cell."""
    if _num_chunks(schedule) > 2:
        return str(action)
    text = f"{action.kind}{action.microbatch}"
    if schedule.num_slices > 1:
        text += f".{action.slice}"
    if chunk_on_screen(schedule, action.stage):
        return text.lower()
    return text


def grid(timeline: Timeline, width: int = 100) -> str:
    """Return the lines of all ranks, broken into blocks of at most `width` columns."""
    rows = _cells(timeline)
    rank_width = len(str(len(rows) - 1))
    num_columns = len(rows[0])
    cell_width = len(rows[0][0])
    # Break the grid into blocks, because a terminal would wrap every long line
    # separately.
    columns_per_block = num_columns
    # The separator after the rank takes one column, and the trailing space is stripped.
    if rank_width + num_columns * cell_width > width:
        cells_width = width - rank_width - 1
        columns_per_block = max(1, cells_width // cell_width)
    blocks = []
    for first in range(0, num_columns, columns_per_block):
        end = first + columns_per_block
        lines = []
        for rank, row in enumerate(rows):
            cells = "".join(row[first:end])
            line = f"{rank:>{rank_width}}|{cells}"
            lines.append(line.rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


class _Bar(NamedTuple):
    """An action or a pair on the grid."""

    label: str
    first: int
    """The first column."""
    end: int
    """The column after the last."""


def _cells(timeline: Timeline) -> list[list[str]]:
    """Return the text in every cell, by rank and column, padded to the same width."""
    schedule = timeline.schedule
    slot = slot_time(timeline)
    check_drawable(timeline)
    bars_by_rank: list[list[_Bar]] = []
    cell_width = 0
    for rank, row in enumerate(timeline.bars):
        labels = [cell_label(schedule, action) for action, _, _ in row]
        for label in labels:
            cell_width = max(cell_width, len(label) + 1)
        # Draw a pair as one bar, at the position of its forward pass.
        source = table_rank(schedule, rank)
        for index in schedule.pairs_of(source):
            _, start, end = row[index]
            label = f"{labels[index]}+{labels[index + 1]}"
            labels[index] = label
            labels[index + 1] = ""
            # A pair's label may span all of its columns.
            num_columns = max(1, _column(end - start, slot))
            width_per_column = math.ceil((len(label) + 1) / num_columns)
            cell_width = max(cell_width, width_per_column)
        bars = []
        for label, (_, start, end) in zip(labels, row, strict=True):
            if label:
                first_column = _column(start, slot)
                end_column = _column(end, slot)
                bars.append(_Bar(label, first_column, end_column))
        bars_by_rank.append(bars)
    # The last action may end between two columns, so round the grid's width just like
    # the bars.
    num_columns = _column(timeline.makespan, slot)
    return [_row_of_cells(bars, num_columns, cell_width) for bars in bars_by_rank]


def _row_of_cells(
    bars: Sequence[_Bar],
    num_columns: int,
    cell_width: int,
) -> list[str]:
    """Return the text in every cell of a rank. Labels extend across their bar's columns."""
    idle_cell = ".".ljust(cell_width)
    cells = [idle_cell] * num_columns
    for bar in bars:
        # The last character is a space that separates the bars.
        length = (bar.end - bar.first) * cell_width - 1
        label = bar.label[:length]
        text = label.ljust(length, "-") + " "
        for column in range(bar.first, bar.end):
            start = (column - bar.first) * cell_width
            end = start + cell_width
            cells[column] = text[start:end]
    return cells


def _column(time: float, slot: float) -> int:
    # `round` rounds halves to even, so a bar from 0.5 to 1.5 would get two columns, and a bar from
    # 1.5 to 2.5 would get none.
    return int(time / slot + 0.5)
