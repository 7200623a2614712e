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
_WIDTH, _HEIGHT, _MARGIN = 960, 240, 70
"""Size of a chart in pixels. The margin leaves room for the numbers on the left axis."""
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
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for name, text in content.items():
        html = html.replace(f"@{name}@", text)
    return html


def _table(answer: Answer) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in HEADER) + "</tr>"]
    for row in answer.rows:
        texts = cells(row, answer.rows[0])
        lines.append(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
        )
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
    """One run's points in a chart, as (iteration, value) pairs."""

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
        values = _number(name)
        yield _chart(
            name, [_line(at, owner, values) for at, owner in enumerate(contenders)]
        )
    yield _chart(
        "step, ms",
        [_line(at, owner, _duration_ms) for at, owner in enumerate(contenders)],
    )


def _number(name: str) -> Callable[[Step], float | None]:
    return lambda step: step.numbers.get(name)


def _duration_ms(step: Step) -> float | None:
    return None if step.duration_s is None else 1e3 * step.duration_s


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
    first, last = min(iterations), max(iterations)
    low, high = min(values), max(values)
    # With a single iteration, or if all values are identical, the range is 0.
    x_scale = (_WIDTH - _MARGIN - 20) / max(1, last - first)
    y_scale = (_HEIGHT - 50) / ((high - low) or 1.0)

    def place(x: int, y: float) -> str:
        return f"{_MARGIN + (x - first) * x_scale:.1f},{_HEIGHT - 30 - (y - low) * y_scale:.1f}"

    shapes = []
    # Grid lines with their values.
    for value in (low, (low + high) / 2, high):
        height = _HEIGHT - 30 - (value - low) * y_scale
        shapes.append(
            f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - 20}" y1="{height:.1f}" '
            f'y2="{height:.1f}"/><text x="{_MARGIN - 8}" y="{height + 4:.1f}" '
            f'text-anchor="end">{value:.4g}</text>'
        )
    # Iteration numbers below the chart.
    for iteration in sorted({first, (first + last) // 2, last}):
        x = place(iteration, low).partition(",")[0]
        shapes.append(
            f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{iteration}</text>'
        )
    for line in lines:
        path = " ".join(place(x, y) for x, y in line.points)
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
    traced = [owner for owner in contenders if owner.timeline is not None]
    longest = max(
        (owner.timeline["length"] for owner in traced if owner.timeline), default=1.0
    )
    for contender in traced:
        assert contender.timeline is not None
        yield _timeline(contender.candidate.label, contender.timeline, longest)


def _timeline(label: str, timeline: dict[str, Any], longest: float) -> str:
    rows = timeline["rows"][:_MAX_ROWS]
    scale = (_WIDTH - _MARGIN - 20) / longest
    shapes = []
    for number, row in enumerate(rows):
        top = number * _ROW
        shapes.append(
            # The margin has room for the rank's number, but not for its position in the
            # groups.
            f'<text x="4" y="{top + 13}">{escape(row["label"].partition(" (")[0])}</text>'
        )
        for kind, begin, length, title in row["spans"]:
            # Leave waiting time blank.
            if kind == "wait":
                continue
            shapes.append(
                f'<rect x="{_MARGIN + begin * scale:.2f}" y="{top + 1}" '
                # Keep short spans visible.
                f'width="{max(0.3, length * scale):.2f}" height="{_ROW - 3}" '
                f'fill="var(--{kind})"><title>{escape(f"{kind} {title}")}</title></rect>'
            )
    height = len(rows) * _ROW
    length_ms = timeline["length"] / 1e3
    return (
        f'<h3>{escape(label)}, {length_ms:.1f} ms</h3><div class="scroll"><svg '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg></div>"
    )
