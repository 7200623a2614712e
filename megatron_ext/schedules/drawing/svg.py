"""Draws simulated schedules as SVG that follows the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.schedules.drawing.palette import KINDS, NAMES, ink, variables
from megatron_ext.schedules.drawing.render import (
    caption,
    check_drawable,
    drawn_kinds,
    unit_of_time,
)
from megatron_ext.schedules.table.transforms import chunk_on_screen, table_rank

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Action, Schedule

# All lengths are in pixels.
# Height of a lane including its gap.
_ROW = 24
# Width of the rank names.
_LEFT = 58
# Height of a title.
_TOP = 30
# Height of a bar.
_BAR = 20
# Height of the axis below a schedule's lanes: ticks, numbers and the name of the unit.
_AXIS = 44
# Width of the longest schedule, unless its labels need more space.
_WIDTH = 1000
# Width of a digit in pixels at a font size of 10px. The reader's font is unknown, so
# this is slightly wider than a digit in most fonts.
_DIGIT = 5.8

_STYLE = f"""\
svg {{ {variables("light")} }}
@media (prefers-color-scheme: dark) {{ svg {{ {variables("dark")} }} }}
text {{ font: 11px sans-serif; fill: var(--text) }}
.title {{ font-weight: bold }} .quiet {{ fill: var(--quiet) }} .n {{ font-size: 10px }}
.n, .tick {{ text-anchor: middle }} .rank {{ text-anchor: end }}
.page {{ fill: var(--page) }} .lane {{ fill: var(--wait) }}
.memory {{ fill: none; stroke: var(--text) }}
.axis {{ stroke: var(--quiet) }} .up {{ stroke: var(--text); stroke-width: 2 }}
"""


def draw(
    *timelines: Timeline,
    unit: str = "",
    memory_gib: Sequence[float] = (),
    limit_gib: float = 0.0,
) -> str:
    """Return an SVG with one lane per rank above a time axis.

    Odd chunks are pale, and actions in the second direction are framed. Multiple schedules are
    drawn one below the other on the same time scale. The picture grows with the table so that every
    number stays legible.

    Args:
        timelines: The schedules, from top to bottom.
        unit: The meaning of 1 on the axis. If empty, `unit_of_time` determines it.
        memory_gib: Memory on each rank, drawn below the schedules. If empty, no memory is drawn.
        limit_gib: Memory limit per rank, which a full-length memory lane represents.
    """
    for timeline in timelines:
        check_drawable(timeline)
    scale = _scale(timelines)
    longest = max(timeline.makespan for timeline in timelines)
    # From top to bottom: every schedule with its axis, then the memory and the legend.
    heights = []
    for timeline in timelines:
        lanes_height = _ROW * timeline.schedule.pp
        heights.append(_TOP + lanes_height + _AXIS)
    memory_height = 0
    if memory_gib:
        memory_height = _TOP + _ROW * len(memory_gib) + 12
    height_above_legend = sum(heights) + memory_height
    legend = _legend(timelines, height_above_legend + 12)
    height = height_above_legend + 24
    longest_width = _LEFT + round(longest * scale) + 24
    width = max(600, legend.width, longest_width)
    captions = "; ".join(map(caption, timelines))
    title = escape(captions)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}{_fills(timelines)}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    y = 0
    for timeline, timeline_height in zip(timelines, heights, strict=True):
        parts.append(
            f'<text class="title" x="4" y="{y + 17}">{escape(caption(timeline))}</text>'
        )
        for rank in range(timeline.schedule.pp):
            lane_y = y + _TOP + _ROW * rank
            parts += _lane(timeline, rank, scale, lane_y)
        axis_unit = unit or unit_of_time(timeline)
        axis_y = y + timeline_height - _AXIS + 2
        parts += _axis(timeline, scale, axis_y, axis_unit)
        y += timeline_height
    if memory_gib:
        parts += _memory(memory_gib, limit_gib, width, y)
    parts += legend.parts
    parts.append("</svg>\n")
    return "\n".join(parts)


def _scale(timelines: Sequence[Timeline]) -> float:
    """Return how many pixels per unit of time make every number legible."""
    legible_scale = 0.0
    shortest_scale = 0.0
    for timeline in timelines:
        for row in timeline.bars:
            for action, start, end in row:
                duration = end - start
                # The R of shipped activations takes no time.
                if duration <= 0:
                    continue
                label = _label(timeline.schedule, action)
                label_width = _DIGIT * len(label) + 4
                legible_scale = max(legible_scale, label_width / duration)
                # The shortest action needs no more than 30 pixels.
                shortest_scale = max(shortest_scale, 30 / duration)
    longest = max(timeline.makespan for timeline in timelines)
    # Do not stretch short tables to the full width.
    scale = min(_WIDTH / longest, shortest_scale)
    return max(scale, legible_scale)


def _fills(timelines: Sequence[Timeline]) -> str:
    """Return CSS with the colours of all kinds of actions that are drawn."""
    present: set[str] = set()
    for timeline in timelines:
        for row in timeline.schedule.rows:
            present.update(action.kind for action in row)
    rules = ""
    for kind, (even, odd) in KINDS.items():
        if kind in present:
            rules += f".{kind} {{ fill: var(--{kind}) }} "
            rules += f".{kind}.odd {{ fill: var(--{kind}-odd) }}\n"
            rules += f".on{kind} {{ fill: {ink(even)} }} .on{kind}.odd {{ fill: {ink(odd)} }}\n"
    return rules


def _memory(
    memory_gib: Sequence[float],
    limit_gib: float,
    width: int,
    y: int,
) -> Iterator[str]:
    """Yield a memory lane for every rank. A full-length lane represents the limit."""
    yield f'<text class="title" x="4" y="{y + 17}">memory, of {limit_gib:g} GiB</text>'
    full = width - _LEFT - 24
    for rank, rank_gib in enumerate(memory_gib):
        top = y + _TOP + _ROW * rank
        share = min(1.0, rank_gib / limit_gib)
        bar = full * share
        yield f'<text class="rank" x="{_LEFT - 6}" y="{top + 14}">rank {rank}</text>'
        yield f'<rect class="lane" x="{_LEFT}" y="{top}" width="{full}" height="{_BAR}"/>'
        yield f'<rect class="memory" x="{_LEFT}" y="{top}" width="{_n(bar)}" height="{_BAR}"/>'
        yield f'<text x="{_LEFT + 4}" y="{top + 14}">{rank_gib:.1f}</text>'


def _label(schedule: Schedule, action: Action) -> str:
    if schedule.num_slices > 1:
        return f"{action.microbatch}.{action.slice}"
    return str(action.microbatch)


def _lane(
    timeline: Timeline,
    rank: int,
    scale: float,
    y: int,
) -> Iterator[str]:
    """Yield a rank's lane, with its actions."""
    schedule = timeline.schedule
    yield f'<text class="rank" x="{_LEFT - 6}" y="{y + 14}">rank {rank}</text>'
    length = timeline.makespan * scale
    yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_n(length)}" height="{_BAR}"/>'
    pairs = schedule.pairs_of(table_rank(schedule, rank))
    for index, (action, start, end) in enumerate(timeline.bars[rank]):
        if start == end:  # the R of shipped activations takes no time
            continue
        x = _LEFT + start * scale
        width = (end - start) * scale
        # A pair's two actions overlap in time, so draw the forward pass above the
        # backward pass.
        top = y
        height = _BAR
        line = 14
        is_upper = index in pairs
        is_lower = index - 1 in pairs
        if is_upper or is_lower:
            height = _BAR // 2
            line = 9
        if is_lower:
            top += height
        odd = " odd" if chunk_on_screen(schedule, action.stage) % 2 else ""
        up = ""
        inset = 0.4
        is_second_direction = action.microbatch >= schedule.num_microbatches
        if is_second_direction:
            up = " up"
            inset = 1.2  # half of a frame's line is outside the rectangle
        yield (
            f'<rect class="{action.kind}{odd}{up}" x="{_n(x + inset)}" y="{top}" '
            f'width="{_n(width - 2 * inset)}" height="{height}"/>'
        )
        yield (
            f'<text class="n on{action.kind}{odd}" x="{_n(x + width / 2)}" y="{top + line}">'
            f"{_label(schedule, action)}</text>"
        )


def _axis(
    timeline: Timeline,
    scale: float,
    y: int,
    unit: str,
) -> Iterator[str]:
    """Yield an axis with numbers at round times and the name of its unit."""
    end = _LEFT + timeline.makespan * scale
    # Use the smallest of 1, 2, 5 or 10 times a power of ten that keeps the numbers at
    # least 50 pixels apart.
    power_of_ten = 10 ** math.floor(math.log10(90 / scale))
    steps = (power_of_ten * factor for factor in (1, 2, 5, 10))
    step = next(step for step in steps if step * scale >= 50)
    yield f'<path class="axis" d="M{_LEFT} {y}H{_n(end)}"/>'
    # Without the tolerance, a rounding error could drop the last tick.
    num_steps = int(timeline.makespan / step * (1 + 1e-9))
    for index in range(num_steps + 1):
        x = _n(_LEFT + index * step * scale)
        yield f'<path class="axis" d="M{x} {y}v4"/>'
        yield f'<text class="tick quiet" x="{x}" y="{y + 15}">{index * step:g}</text>'
    yield f'<text class="quiet" x="{_LEFT}" y="{y + 29}">time: {unit}</text>'


class _LegendEntry(NamedTuple):
    """What one kind of rectangle means."""

    classes: str
    """The rectangle's CSS classes."""
    name: str


class _Legend(NamedTuple):
    """The legend below all schedules."""

    parts: list[str]
    width: int


def _legend(timelines: Sequence[Timeline], y: int) -> _Legend:
    """Return the legend."""
    schedules = [timeline.schedule for timeline in timelines]
    x = _LEFT
    parts = []
    for entry in _legend_entries(schedules):
        parts.append(
            f'<rect class="{entry.classes}" x="{x}" y="{y - 10}" width="12" height="12"/>'
        )
        parts.append(f'<text x="{x + 17}" y="{y}">{entry.name}</text>')
        # 6 pixels per character are enough. The box and the gaps take another 34
        # pixels.
        x += 34 + 6 * len(entry.name)
    notes = []
    if any(schedule.num_slices > 1 for schedule in schedules):
        notes.append("0.1: slice 1 of micro-batch 0")
    if any(schedule.pairs for schedule in schedules):
        notes.append("above each other: a pair")
    if notes:
        text = ", ".join(notes)
        parts.append(f'<text x="{x}" y="{y}">{text}</text>')
        x += 6 * len(text) + 6
    return _Legend(parts, width=x)


def _legend_entries(schedules: Sequence[Schedule]) -> list[_LegendEntry]:
    """Return an entry for everything that is drawn as a rectangle."""
    kinds: set[str] = set()
    has_odd_chunks = False
    has_twins = False
    for schedule in schedules:
        kinds |= drawn_kinds(schedule)
        # The last stage has the highest chunk number.
        last_stage = schedule.num_stages - 1
        if chunk_on_screen(schedule, last_stage):
            has_odd_chunks = True
        if schedule.placement.twins == 2:
            has_twins = True
    entries = []
    for kind, name in NAMES.items():
        if kind in kinds:
            entries.append(_LegendEntry(kind, name))
    entries.append(_LegendEntry("lane", "idle"))
    if has_odd_chunks:
        entries.append(_LegendEntry("F odd", "pale: odd chunks"))
    if has_twins:
        entries.append(_LegendEntry("page up", "framed: second direction"))
    return entries


def _n(number: float) -> str:
    """Format a length in pixels with at most one decimal."""
    return f"{number:.1f}".removesuffix(".0")
