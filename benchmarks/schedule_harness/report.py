"""Renders a measurement as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

from megatron_ext.schedules.commands import aligned

if TYPE_CHECKING:
    from .metrics import Figures

__all__ = ["draw", "explain", "table"]

_HEADS = (
    "system",
    "T ms",
    "T/ideal",
    "order",
    "replay %",
    "ops %",
    "peak act.",
    "of order",
    "weights",
    "ops",
    "hops",
    "gap us",
    "hop us",
    "cpu %",
)

NOISY = 0.05
"""Ops that took longer than this above their time: the machine was too busy."""


def table(figures: Mapping[str, Figures], weights: Mapping[str, int]) -> str:
    """Return the comparison as text.

    Args:
        figures: By name of the system.
        weights: How often each stores every weight.
    """
    rows = [_HEADS, *(_row(name, found, weights[name]) for name, found in figures.items())]
    return aligned(rows)


def _row(name: str, found: Figures, weights: int) -> tuple[str, ...]:
    mark = "!" if found.op_inflation > NOISY else ""
    return (
        name,
        f"{1e3 * found.median_s:.0f}",
        f"{found.ratio:.3f}",
        f"{found.optimum_s / found.ideal_s:.3f}",
        f"{100 * found.replay_overhead:.1f}",
        f"{mark}{100 * found.op_inflation:.1f}",
        f"{found.peak_live:g}",
        f"{found.peak_of_order:g}",
        f"{weights}x",
        f"{found.num_ops}",
        f"{found.hops:g}",
        f"{1e6 * found.gap_s:.0f}",
        f"{1e6 * found.hop_s:.0f}",
        f"{100 * found.cpu_s / found.median_s:.1f}",
    )


_BAR_OF_REPLAY = 0.015
_BAR_OF_BITPIPE = 1.04
_OURS = "megatron_ext, shm: "


def explain(figures: Mapping[str, Figures]) -> str:
    """Return in words which aims our schedules reach over shared memory, and what they miss by."""
    ours = {
        name.removeprefix(_OURS): found
        for name, found in figures.items()
        if name.startswith(_OURS) and " for latency " not in name
    }
    reached = [n for n, found in ours.items() if found.replay_overhead < _BAR_OF_REPLAY + 5e-4]
    lines = [
        f"Replay over shm is at most {100 * _BAR_OF_REPLAY:g} % for {', '.join(reached) or 'none'}."
    ]
    lines += [
        f"{name}: {100 * found.replay_overhead:.1f} %, with {found.num_ops} ops, "
        f"{1e6 * found.gap_s:.0f} us from one to the next of a rank, and {found.hops:g} messages "
        f"on the longest path, {1e6 * found.hop_s:.0f} us from op to op."
        for name, found in ours.items()
        if name not in reached
    ]
    bitpipe = ours.get("bitpipe order=zb")
    if bitpipe is not None:
        parts = [
            ("order", bitpipe.optimum_s - bitpipe.ideal_s),
            ("ops", bitpipe.replay_s - bitpipe.optimum_s),
            ("replay", bitpipe.median_s - bitpipe.replay_s),
        ]
        shares = ", ".join(f"{part} {100 * took / bitpipe.ideal_s:.1f}" for part, took in parts)
        verdict = "within" if bitpipe.ratio <= _BAR_OF_BITPIPE else "not within"
        lines.append(
            f"bitpipe order=zb is {100 * (bitpipe.ratio - 1):.1f} % above ideal ({shares}), "
            f"{verdict} {100 * (_BAR_OF_BITPIPE - 1):.0f} %."
        )
    return "\n".join(lines)


_ROW, _TOP, _NAME, _SCALE, _BAR = 22, 46, 290, 600, 15

_LEGEND = {
    "order": "bubble of the order that ran",
    "ops": "ops that took longer",
    "rest": "runtime and messages",
}

_STYLE = """\
text { font: 12px sans-serif; fill: #1f2328 }
.axis { stroke: #8888; stroke-width: 1 }
.order { fill: #79b8ff } .ops { fill: #d0d7de } .rest { fill: #f9b384 }
.own .order { fill: #388bfd } .own .ops { fill: #afb8c1 } .own .rest { fill: #e5714b }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }"""


def draw(measured: Mapping[str, Mapping[str, Figures]]) -> str:
    """Return bars as SVG: what each system takes beyond ideal, as a share of it.

    Args:
        measured: Figures by name of the system, by size of the pipeline in words.
    """
    title = "time beyond ideal, measured"
    ratios = [found.ratio for figures in measured.values() for found in figures.values()]
    highest = max([0.1, *(ratio - 1 for ratio in ratios)])
    height = _TOP + _ROW * (len(ratios) + 2 * len(measured)) + 34
    width = _NAME + _SCALE + 60
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<text x="4" y="17">{escape(title)}</text>',
    ]
    bottom = _TOP
    for size, figures in measured.items():
        parts.append(f'<text x="4" y="{bottom + 12}" font-weight="bold">{escape(size)}</text>')
        top = bottom + _ROW
        for index, (name, found) in enumerate(figures.items()):
            parts += _bar(name, found, top + _ROW * index, _SCALE / highest)
        bottom = top + _ROW * len(figures)
        parts.append(f'<path class="axis" d="M{_NAME} {top - 6}V{bottom}"/>')
        bottom += _ROW
    for index, (kind, text) in enumerate(_LEGEND.items()):
        left = _NAME + 210 * index
        parts.append(f'<rect class="{kind}" x="{left}" y="{bottom + 8}" width="12" height="12"/>')
        parts.append(f'<text x="{left + 17}" y="{bottom + 18}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, found: Figures, y: int, scale: float) -> Iterator[str]:
    style = ' class="own"' if name.startswith("megatron_ext") else ""
    yield f"<g{style}>"
    yield f'<text x="4" y="{y + 12}">{escape(name)}</text>'
    x, reached_s = float(_NAME), found.ideal_s
    for kind, until_s in zip(
        _LEGEND, (found.optimum_s, found.replay_s, found.median_s), strict=True
    ):
        length = scale * max(0.0, until_s - reached_s) / found.ideal_s
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_BAR}"/>'
        x, reached_s = x + length, max(reached_s, until_s)
    yield f'<text x="{x + 5:.1f}" y="{y + 12}">+{100 * (found.ratio - 1):.1f} %</text>'
    yield "</g>"
