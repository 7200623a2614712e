"""Builds the comparison page: one HTML file without scripts or network references."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.schedules.drawing.palette import variables
from megatron_ext.tools.compare.text import HEADER, cells

if TYPE_CHECKING:
    from megatron_ext.tools.compare.outcome import Answer, Contender
    from megatron_ext.tools.compare.run_records import Step

_COLOURS = ("quiet", "F", "B", "W", "move", "after", "I")
"""Palette variables for the contenders' lines. The reference uses the first one."""
_WIDTH = 960
_HEIGHT = 240
"""Size of a chart in pixels."""
_MARGIN = 70
"""Width of the space for the numbers on the left axis, in pixels."""
_ROW = 18
"""Height of a rank's row in a timeline, in pixels."""
_MAX_ROWS = 64
"""Maximum number of ranks in a timeline."""


def page(answer: Answer, contenders: Sequence[Contender]) -> str:
    """Return the HTML of a comparison."""
    labels = [contender.candidate.label for contender in contenders]
    title = f"{labels[0]} against {', '.join(labels[1:])}"
    notes = []
    for row in answer.rows:
        for text in (row.reason, *row.notes, row.located):
            if text:
                notes.append(f"<li>{escape(row.label)}: {escape(text)}</li>")
    keep = ""
    if answer.keep:
        flags = escape(shlex.join(answer.keep))
        keep = f"<p>{answer.keep_heading}: <code>{flags}</code></p>"
    content = {
        "TITLE": escape(title),
        "VERDICT": f"<p>{escape(answer.verdict)}</p>{keep}",
        "TABLE": _table(answer),
        "NOTES": "".join(notes),
        "LEGEND": _legend(labels),
        "CHARTS": "".join(_charts(contenders)),
        "TIMELINES": "".join(_timelines(contenders)) or "<p>No step was traced.</p>",
        "LIGHT": variables("light"),
        "DARK": variables("dark"),
    }
    template_path = Path(__file__).with_name("page.html")
    html = template_path.read_text(encoding="utf-8")
    for name, text in content.items():
        html = html.replace(f"@{name}@", text)
    return html


def _table(answer: Answer) -> str:
    headings = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    lines = [f"<tr>{headings}</tr>"]
    for row in answer.rows:
        texts = cells(row, answer.rows[0])
        fields = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f"<tr>{fields}</tr>")
    return "\n".join(lines)


def _legend(labels: Sequence[str]) -> str:
    keys = []
    for position, label in enumerate(labels):
        keys.append(
            f'<span class="key"><i style="background:var(--{_colour(position)})"></i>'
            f"{escape(label)}</span>"
        )
    return "".join(keys)


def _colour(position: int) -> str:
    return _COLOURS[position % len(_COLOURS)]


@dataclass(frozen=True)
class _Line:
    """One run's points in a chart, as (iteration, value)."""

    position: int
    """The contender's position, which determines the colour."""
    points: list[tuple[int, float]]


def _charts(contenders: Sequence[Contender]) -> Iterator[str]:
    """Yield a chart for each loss, one for the gradient norm, and one for the step time."""
    names: list[str] = []
    for contender in contenders:
        # Draw only the first round, if it has finished.
        for record in contender.records[:1]:
            for step in record.steps:
                names += [name for name in step.numbers if name not in names]
    for name in names:
        yield _chart(name, _lines(contenders, _number(name)))
    yield _chart("step, ms", _lines(contenders, _duration_ms))


def _number(name: str) -> Callable[[Step], float | None]:
    return lambda step: step.numbers.get(name)


def _duration_ms(step: Step) -> float | None:
    if step.duration_s is None:
        return None
    return 1e3 * step.duration_s


def _lines(
    contenders: Sequence[Contender], value: Callable[[Step], float | None]
) -> list[_Line]:
    lines = []
    for position, contender in enumerate(contenders):
        lines.append(_line(position, contender, value))
    return lines


def _line(
    position: int, contender: Contender, value: Callable[[Step], float | None]
) -> _Line:
    points = []
    for record in contender.records[:1]:
        for step in record.steps:
            number = value(step)
            # SVG coordinates cannot be NaN or infinity.
            if number is not None and math.isfinite(number):
                points.append((step.iteration, number))
    return _Line(position, points)


def _chart(title: str, lines: Sequence[_Line]) -> str:
    """Return a line chart over iterations.

    The reference gets a wider line, so it stays visible underneath a line with identical values.
    """
    iterations: list[int] = []
    values: list[float] = []
    for line in lines:
        for iteration, value in line.points:
            iterations.append(iteration)
            values.append(value)
    if not values:
        return ""
    first = min(iterations)
    last = max(iterations)
    low = min(values)
    high = max(values)
    # With a single iteration, or if all values are identical, the range is 0.
    num_intervals = max(1, last - first)
    value_range = (high - low) or 1.0
    x_scale = (_WIDTH - _MARGIN - 20) / num_intervals
    y_scale = (_HEIGHT - 50) / value_range

    def place(iteration: int, value: float) -> str:
        x = _MARGIN + (iteration - first) * x_scale
        y = _HEIGHT - 30 - (value - low) * y_scale
        return f"{x:.1f},{y:.1f}"

    shapes = []
    # Grid lines with their values.
    middle = (low + high) / 2
    for value in (low, middle, high):
        height = _HEIGHT - 30 - (value - low) * y_scale
        shapes.append(
            f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - 20}" y1="{height:.1f}" '
            f'y2="{height:.1f}"/><text x="{_MARGIN - 8}" y="{height + 4:.1f}" '
            f'text-anchor="end">{value:.4g}</text>'
        )
    # Iteration numbers below the chart.
    middle_iteration = (first + last) // 2
    for iteration in sorted({first, middle_iteration, last}):
        x = place(iteration, low).partition(",")[0]
        shapes.append(
            f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{iteration}</text>'
        )
    for line in lines:
        path = " ".join(place(iteration, value) for iteration, value in line.points)
        width = 7 if line.position == 0 else 2
        shapes.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{_colour(line.position)})" '
            f'stroke-width="{width}" stroke-linejoin="round"/>'
        )
    return (
        f'<h3>{escape(title)}</h3><div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg></div>'
    )


def _timelines(contenders: Sequence[Contender]) -> Iterator[str]:
    """Yield a timeline of one traced step for each contender, all on the same scale."""
    timelines = []
    lengths = []
    for contender in contenders:
        if contender.timeline is not None:
            timelines.append((contender.candidate.label, contender.timeline))
            lengths.append(contender.timeline["length"])
    longest = max(lengths, default=1.0)
    for label, timeline in timelines:
        yield _timeline(label, timeline, longest)


def _timeline(label: str, timeline: dict[str, Any], longest: float) -> str:
    rows = timeline["rows"][:_MAX_ROWS]
    scale = (_WIDTH - _MARGIN - 20) / longest
    shapes = []
    for number, row in enumerate(rows):
        top = number * _ROW
        # The margin has room for the rank's number, but not for its position in the
        # groups.
        rank_label = row["label"].partition(" (")[0]
        shapes.append(f'<text x="4" y="{top + 13}">{escape(rank_label)}</text>')
        for kind, begin, length, title in row["spans"]:
            # Leave waiting time blank.
            if kind == "wait":
                continue
            x = _MARGIN + begin * scale
            # Keep short spans visible.
            width = max(0.3, length * scale)
            tooltip = escape(f"{kind} {title}")
            shapes.append(
                f'<rect x="{x:.2f}" y="{top + 1}" '
                f'width="{width:.2f}" height="{_ROW - 3}" '
                f'fill="var(--{kind})"><title>{tooltip}</title></rect>'
            )
    height = len(rows) * _ROW
    length_ms = timeline["length"] / 1e3
    return (
        f'<h3>{escape(label)}, {length_ms:.1f} ms</h3><div class="scroll"><svg '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg></div>"
    )
