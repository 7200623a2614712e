"""Draws simulated schedules as SVG, on a light or a dark page as its reader prefers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from megatron_ext.schedules.drawing.palette import KINDS, NAMES, ink, variables
from megatron_ext.schedules.drawing.render import caption, check_drawable, unit_of_time
from megatron_ext.schedules.table.transforms import chunk_on_screen, table_rank

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Action, Schedule

_ROW, _LEFT, _TOP, _BAR = 24, 58, 30, 20
# Below the lanes of a schedule: ticks, numbers and what they count.
_AXIS = 44
# Of the longest schedule, unless its numbers need more.
_WIDTH = 1000
# Pixels of a digit of 10px: the reader's font is not known, so a little more than most have.
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
    *timelines: Timeline, unit: str = "", memory_gib: Sequence[float] = (), limit_gib: float = 0.0
) -> str:
    """Return an SVG: a lane for each rank over an axis of time.

    Odd chunks are pale, and the second direction is framed. Several schedules are drawn below each
    other on the same time scale. The picture grows with the table: every number can be read.

    Args:
        timelines: What is drawn.
        unit: What 1 on the axis is; by default in the words of `unit_of_time`.
        memory_gib: Memory of each rank, drawn below; none if empty.
        limit_gib: What a rank may hold: the length of a lane of memory.
    """
    for timeline in timelines:
        check_drawable(timeline)
    longest = max(timeline.makespan for timeline in timelines)
    # Of each action that takes time: the length of its number, and its duration.
    numbers = [
        (len(_label(timeline.schedule, action)), end - start)
        for timeline in timelines
        for row in timeline.bars
        for action, start, end in row
        if end > start
    ]
    legible = max((_DIGIT * length + 4) / duration for length, duration in numbers)
    # Short tables are not stretched to the width: 30 pixels for the shortest action are enough.
    scale = max(min(_WIDTH / longest, 30 / min(duration for _, duration in numbers)), legible)
    heights = [_TOP + _ROW * timeline.schedule.pp + _AXIS for timeline in timelines]
    of_memory = _TOP + _ROW * len(memory_gib) + 12 if memory_gib else 0
    legend, legend_width = _legend(timelines, sum(heights) + of_memory + 12)
    height = sum(heights) + of_memory + 24
    width = max(600, legend_width, _LEFT + round(longest * scale) + 24)
    title = escape("; ".join(map(caption, timelines)))
    kinds = {a.kind for t in timelines for row in t.schedule.rows for a in row}
    fills = [
        f".{kind} {{ fill: var(--{kind}) }} .{kind}.odd {{ fill: var(--{kind}-odd) }}\n"
        f".on{kind} {{ fill: {ink(even)} }} .on{kind}.odd {{ fill: {ink(odd)} }}\n"
        for kind, (even, odd) in KINDS.items()
        if kind in kinds
    ]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}{''.join(fills)}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    y = 0
    for timeline, own in zip(timelines, heights, strict=True):
        parts.append(f'<text class="title" x="4" y="{y + 17}">{escape(caption(timeline))}</text>')
        for rank in range(timeline.schedule.pp):
            parts += _lane(timeline, rank, scale, y + _TOP + _ROW * rank)
        parts += _axis(timeline, scale, y + own - _AXIS + 2, unit or unit_of_time(timeline))
        y += own
    if memory_gib:
        parts.append(f'<text class="title" x="4" y="{y + 17}">memory, of {limit_gib:g} GiB</text>')
    for rank, held in enumerate(memory_gib):
        top, full = y + _TOP + _ROW * rank, width - _LEFT - 24
        bar = full * min(1.0, held / limit_gib)
        parts += [
            f'<text class="rank" x="{_LEFT - 6}" y="{top + 14}">rank {rank}</text>',
            f'<rect class="lane" x="{_LEFT}" y="{top}" width="{full}" height="{_BAR}"/>',
            f'<rect class="memory" x="{_LEFT}" y="{top}" width="{_n(bar)}" height="{_BAR}"/>',
            f'<text x="{_LEFT + 4}" y="{top + 14}">{held:.1f}</text>',
        ]
    return "\n".join([*parts, *legend, "</svg>", ""])


def _label(schedule: Schedule, action: Action) -> str:
    part = f".{action.slice}" if schedule.num_slices > 1 else ""
    return f"{action.microbatch}{part}"


def _lane(timeline: Timeline, rank: int, scale: float, y: int) -> Iterator[str]:
    schedule = timeline.schedule
    yield f'<text class="rank" x="{_LEFT - 6}" y="{y + 14}">rank {rank}</text>'
    length = timeline.makespan * scale
    yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_n(length)}" height="{_BAR}"/>'
    pairs = schedule.pairs_of(table_rank(schedule, rank))
    for index, (action, start, end) in enumerate(timeline.bars[rank]):
        if start == end:
            continue
        x, width = _LEFT + start * scale, (end - start) * scale
        # A pair shares its time: the forward above, the backward below.
        top, height, line = y, _BAR, 14
        if index in pairs or index - 1 in pairs:
            height, line = _BAR // 2, 9
            top += 0 if index in pairs else height
        odd = " odd" if chunk_on_screen(schedule, action.stage) % 2 else ""
        up = " up" if action.microbatch >= schedule.num_microbatches else ""
        inset = 1.2 if up else 0.4  # the frame lies half outside
        yield (
            f'<rect class="{action.kind}{odd}{up}" x="{_n(x + inset)}" y="{top}" '
            f'width="{_n(width - 2 * inset)}" height="{height}"/>'
        )
        yield (
            f'<text class="n on{action.kind}{odd}" x="{_n(x + width / 2)}" y="{top + line}">'
            f"{_label(schedule, action)}</text>"
        )


def _axis(timeline: Timeline, scale: float, y: int, unit: str) -> Iterator[str]:
    """Yield a line with numbers at round times, and what they count."""
    end = _LEFT + timeline.makespan * scale
    step = 10 ** math.floor(math.log10(90 / scale))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * scale >= 50)
    yield f'<path class="axis" d="M{_LEFT} {y}H{_n(end)}"/>'
    for index in range(int(timeline.makespan / step * (1 + 1e-9)) + 1):
        x = _n(_LEFT + index * step * scale)
        yield f'<path class="axis" d="M{x} {y}v4"/>'
        yield f'<text class="tick quiet" x="{x}" y="{y + 15}">{index * step:g}</text>'
    yield f'<text class="quiet" x="{_LEFT}" y="{y + 29}">time: {unit}</text>'


def _legend(timelines: Sequence[Timeline], y: int) -> tuple[list[str], int]:
    """Return the legend, and how wide it is."""
    schedules = [timeline.schedule for timeline in timelines]
    kinds = {
        action.kind
        for schedule in schedules
        for row in schedule.rows
        for action in row
        if action.kind != "R" or not schedule.ships_activations  # a shipping R takes no time
    }
    entries = [(kind, name) for kind, name in NAMES.items() if kind in kinds] + [("lane", "idle")]
    if any(chunk_on_screen(s, stage) for s in schedules for stage in range(s.num_stages)):
        entries.append(("F odd", "pale: odd chunks"))
    if any(schedule.placement.twins == 2 for schedule in schedules):
        entries.append(("page up", "framed: second direction"))
    x, parts = _LEFT, []
    for classes, name in entries:
        parts.append(f'<rect class="{classes}" x="{x}" y="{y - 10}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{name}</text>')
        x += 34 + 6 * len(name)
    notes = []
    if any(schedule.num_slices > 1 for schedule in schedules):
        notes.append("0.1: slice 1 of micro-batch 0")
    if any(schedule.pairs for schedule in schedules):
        notes.append("above each other: a pair")
    if notes:
        parts.append(f'<text x="{x}" y="{y}">{", ".join(notes)}</text>')
        x += 6 * len(", ".join(notes)) + 6
    return parts, x


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
