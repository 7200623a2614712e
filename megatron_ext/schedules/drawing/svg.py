"""Draws simulated schedules as SVG, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from megatron_ext.schedules.drawing.render import caption, check_drawable, slot_time
from megatron_ext.schedules.table.transforms import chunk_on_screen, literal_rows, table_rank

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Action

__all__ = ["draw"]

_ROW, _LEFT, _TOP, _BAR = 24, 34, 30, 20
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "forward again",
}

_STYLE = """\
text { font: 11px sans-serif; fill: #1f2328 }
.n { text-anchor: middle; font-size: 10px; fill: #1f2328 }
.lane { fill: #8882 } .up { stroke: #1f2328; stroke-width: 1.2 }
.F { fill: #79b8ff } .B { fill: #8ddb8c } .I { fill: #ffd33d } .W { fill: #f9b384 }
.F.odd { fill: #c8e1ff } .B.odd { fill: #d2f4d3 } .I.odd { fill: #fff1b0 } .W.odd { fill: #fde2cf }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .n { fill: #0d1117 } .up { stroke: #e6edf3 }
}"""

_STYLE_OF_R = """
.R { fill: #d8b9ff } .R.odd { fill: #ecdcff }"""


def draw(*timelines: Timeline) -> str:
    """Return an SVG: a lane for each rank, odd chunks pale, the second direction framed.

    Several schedules are drawn below each other on the same time scale.
    """
    for timeline in timelines:
        check_drawable(timeline)
    scale = min(map(_scale, timelines))
    longest = max(timeline.makespan for timeline in timelines)
    heights = [_TOP + _ROW * timeline.schedule.pp + 16 for timeline in timelines]
    height = sum(heights) + 24
    width = max(480, _LEFT + round(longest * scale) + 12)
    title = escape("; ".join(map(caption, timelines)))
    disaggregated = any(timeline.schedule.disaggregated for timeline in timelines)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}{_STYLE_OF_R if disaggregated else ''}\n</style>",
    ]
    y = 0
    for timeline, own in zip(timelines, heights, strict=True):
        parts.append(f'<text x="4" y="{y + 17}">{escape(caption(timeline))}</text>')
        for rank in range(timeline.schedule.pp):
            parts += _lane(timeline, rank, scale, y + _TOP + _ROW * rank)
        y += own
    parts += _legend(timelines, height - 12)
    return "\n".join([*parts, "</svg>", ""])


def _scale(timeline: Timeline) -> float:
    """Return pixels per unit of time: about 1000 in total, with legible numbers in actions."""
    slot = slot_time(timeline)
    return min(max(1000 / timeline.makespan, 9 / slot), 24 / slot)


def _lane(timeline: Timeline, rank: int, scale: float, y: int) -> Iterator[str]:
    schedule = timeline.schedule
    yield f'<text x="4" y="{y + 14}">{rank}</text>'
    length = timeline.makespan * scale
    yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_n(length)}" height="{_BAR}"/>'
    source = table_rank(schedule, rank)
    times = zip(timeline.starts[source], timeline.ends[source], strict=True)
    pairs = schedule.pairs_of(source)
    for index, (action, (start, end)) in enumerate(
        zip(literal_rows(schedule)[rank], times, strict=True)
    ):
        if start == end:
            continue
        x, width = _LEFT + start * scale, (end - start) * scale
        # A pair shares its time: the forward above, the backward below.
        top, height, line = y, _BAR, 14
        if index in pairs or index - 1 in pairs:
            height, line = _BAR // 2, 9
            top += 0 if index in pairs else height
        yield (
            f'<rect class="{_classes(timeline, action)}" x="{_n(x + 0.4)}" y="{top}" '
            f'width="{_n(width - 0.8)}" height="{height}"/>'
        )
        label = str(action.microbatch)
        if schedule.num_slices > 1:
            label += f".{action.slice}"
        if 6 * len(label) <= width:
            yield f'<text class="n" x="{_n(x + width / 2)}" y="{top + line}">{label}</text>'


def _classes(timeline: Timeline, action: Action) -> str:
    schedule = timeline.schedule
    odd = " odd" if chunk_on_screen(schedule, action.stage) % 2 else ""
    up = " up" if action.microbatch >= schedule.num_microbatches else ""
    return f"{action.kind}{odd}{up}"


def _legend(timelines: Sequence[Timeline], y: int) -> Iterator[str]:
    schedules = [timeline.schedule for timeline in timelines]
    kinds = {action.kind for schedule in schedules for row in schedule.rows for action in row}
    x = _LEFT
    for kind, name in _NAMES.items():
        if kind in kinds:
            yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>'
            yield f'<text x="{x + 17}" y="{y}">{name}</text>'
            x += 32 + 6 * len(name)
    notes = []
    if any(schedule.num_slices > 1 for schedule in schedules):
        notes.append("0.1: slice 1 of micro-batch 0")
    if any(schedule.pairs for schedule in schedules):
        notes.append("above each other: a pair")
    if any(chunk_on_screen(s, stage) for s in schedules for stage in range(s.num_stages)):
        notes.append("pale: odd chunks")
    if any(schedule.placement.twins == 2 for schedule in schedules):
        notes.append("framed: second direction")
    yield f'<text x="{x}" y="{y}">{escape(", ".join(notes))}</text>'


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
