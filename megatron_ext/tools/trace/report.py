"""Makes the page that explains a traced run: one self-contained HTML file.

On top is a verdict: where the time goes, and what to do about it. The page holds the figures of all
steps and the spans of a few: the median step, the slowest one, and the planned one.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules.drawing.palette import KINDS, NAMES, SPANS, ink, variables
from megatron_ext.tools.trace.aggregate import Run, slow
from megatron_ext.tools.trace.forecast import Forecast, planned, predict
from megatron_ext.tools.trace.survey import Step, figures
from megatron_ext.tracing.records import ACTION_NAMES

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Span

# A page of a run of any size has to open in a browser.
_MAX_SPANS = 150_000
"""Of one timeline."""
_MAX_RANKS = 512
_MAX_COLUMNS = 400
_MAX_ROWS = 500

_KINDS = {name: kind for kind, name in ACTION_NAMES.items()} | {
    "wait": "wait",
    "send": "move",
    "receive": "move",
    "weights": "move",
    "reduce": "after",
    "optimizer": "after",
}
_LEGEND = (
    *((kind, NAMES[kind]) for kind in "FBIW"),
    ("wait", "wait"),
    ("move", "send, receive"),
    ("after", "reduce, optimizer"),
)
_PEERS = {"on": "for", "to": "to", "from": "from"}
"""Attributes of spans that name another rank, and the word before it in a title."""


def page(run: Run) -> str:
    """Return the HTML of the report on a run."""
    notes, timelines = list(run.notes), _measured(run)
    title = str(run.settings.get("pipeline_schedule", "A run"))
    per_step, plan, found = "", None, Forecast([], 0.0, "", [])
    # A table or a forecast that is missing leaves a note: the rest of the page is of use alone.
    try:
        if (schedule := run.schedule) is not None:
            plan = planned(run, schedule)
            rows = [
                [[a.kind, 1e6 * begin, 1e6 * (end - begin), str(a.microbatch)]
                 for a, begin, end in bars]
                for bars in plan.bars[:_MAX_RANKS]
            ]  # fmt: skip
            labels = (f"pipeline rank {rank}" for rank in range(len(rows)))
            timelines.append(_timeline(f"planned: {schedule.label}", labels, rows, plan.makespan))
            title, policy = schedule.label, run.settings.get("dpp_policy")
            title += "" if policy is None else f" in dynamic order ({policy})"
            per_step = f", {schedule.total_microbatches} micro-batches a step"
    except DataError as error:
        notes.append(f"no planned step: {error}")
    try:
        found = predict(run)
    except (DataError, ScheduleError) as error:
        notes.append(f"no forecast: {error}")
    predictions = found.best_of_schedules
    if found.own is not None and found.own not in predictions:
        predictions.append(found.own)
    total, slowest = figures(run.surveys), slow(run)[:_MAX_ROWS]
    # Ranks that stopped early have fewer columns, which are as wide as those of the others.
    longest = max((survey.steps for survey in run.surveys), key=len)
    width = -(-len(longest) // _MAX_COLUMNS)
    content = {
        "title": f"{title} on {len(run.surveys)} ranks{per_step}",
        "folder": run.directory.resolve().name,
        "verdict": _verdict(total, found, slowest),
        "flags": [best.flags for best in found.recommended],
        "forecast": [asdict(p) for p in predictions],
        "traced": found.measured,
        "notes": notes[:_MAX_ROWS],
        "total": {**total._asdict(), "ranks": len(run.surveys)},
        "plan": plan and {"makespan_s": plan.makespan, "bubble_ratio": plan.bubble_ratio},
        "legend": _LEGEND,
        "inks": {
            **{kind: ink(even) for kind, (even, _) in KINDS.items()},
            **{name: ink(colour) for name, colour in SPANS.items()},
        },
        "timelines": timelines,
        "ranks": [
            {"label": survey.header.label, **figures([survey])._asdict()}
            for survey in run.surveys[:_MAX_ROWS]
        ],
        "heat": [_idle_shares(survey.steps, width) for survey in run.surveys[:_MAX_ROWS]],
        "steps": [step.number for step in longest],
        "links": [asdict(link) for link in run.links[:_MAX_ROWS]],
        "slow": [[what, f"{factor:.2f}"] for what, factor in slowest],
        "settings": _settings(run),
    }
    text = json.dumps(content, separators=(",", ":"))
    # What traces say is data and never markup: nothing in it may end the script element, or begin
    # a comment in it.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for theme in ("light", "dark"):
        template = template.replace(f"@{theme.upper()}@", variables(theme))
    return template.replace("@DATA@", text)


def _verdict(
    total: Step, found: Forecast, slowest: list[tuple[str, float]]
) -> list[tuple[str, str]]:
    """Return (question, answer) pairs: where the time goes, what to change, what to mistrust."""
    for_others = "input", "leader", "credit", "end of the pipeline"
    waits = sum(ns for cause, ns in total.idle_ns.items() if cause.startswith(for_others))
    times = {
        "in actions": total.busy_ns,
        "waiting for other ranks": waits,
        "in other gaps": sum(total.idle_ns.values()) - waits,
        "in the reduction of gradients and the optimizer": total.after_ns,
    }
    whole = sum(times.values()) or 1
    parts = ", ".join(
        f"{100 * ns / whole:.0f} % {what}" for what, ns in times.items() if ns >= 0.005 * whole
    )
    lines = [("Where the time goes", f"Of its step, a rank spends {parts}.")]
    if found.predictions:
        lines.append(("What to run", found.advice))
    if found.shared_cpus is not None:
        doubt = f"{found.shared_cpus}, so waits are longer here than with a CPU for each rank"
        answer = f"{doubt}, and links are not judged. The forecast is for ranks with a CPU each."
        lines.append(("What to mistrust", answer))
    if slowest:
        named = ", ".join(f"{what} ({factor:.1f} x the median)" for what, factor in slowest[:3])
        lines.append(("What is slow", f"{named}{' and others below' * (len(slowest) > 3)}."))
    return lines


def _idle_shares(steps: Sequence[Step], width: int) -> list[float]:
    """Return the idle shares of a rank's steps, averaged over so many for a column of the page."""
    idle = [step.bubble_ratio for step in steps]
    groups = (idle[first : first + width] for first in range(0, len(idle), width))
    return [round(statistics.fmean(group), 3) for group in groups]


def _settings(run: Run) -> list[list[str]]:
    """Return settings that all ranks share, and those of single ranks with their ranks."""
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for header in (survey.header for survey in run.surveys):
        for name, value in {**header.settings, "host": header.host}.items():
            values[name][str(value)].append(header.rank)
    rows = []
    for name, found in values.items():
        for value, ranks in found.items():
            few = len(found) > 1
            rows.append([f"{name} (rank {', '.join(map(str, ranks[:8]))})" if few else name, value])
    return rows[:_MAX_ROWS]


def _measured(run: Run) -> list[dict[str, Any]]:
    """Return the timelines of the median and of the slowest step that all ranks have."""
    # A rank that died early has fewer steps: only those that all others have can be compared.
    most = max(map(len, run.steps.values()))
    durations = {
        number: max(step.duration_ns for step in steps)
        for number, steps in run.steps.items()
        if len(steps) == most
    }
    ranked = sorted(durations, key=durations.__getitem__)
    # One that happened, rather than a mean of several, which no rank has run.
    chosen = {"median step": ranked[(len(ranked) - 1) // 2]}
    if len(ranked) > 1:
        chosen["slowest step"] = ranked[-1]
    timelines = []
    for title, number in chosen.items():
        # The last one, of a step that Megatron's rerun state machine has run twice.
        by_label = {
            survey.header.label: each
            for survey in run.surveys[:_MAX_RANKS]
            for each in survey.file.iterations(only=number)
        }
        iterations = by_label.values()
        begin_ns = min(each.begin_ns for each in iterations)
        length_ns = max(each.begin_ns + each.duration_ns for each in iterations) - begin_ns
        total = sum(len(each.spans) for each in iterations)
        # What is thinner than its share of the picture could not be seen anyway.
        finest_ns = 0 if total <= _MAX_SPANS else length_ns * len(iterations) // _MAX_SPANS
        rows = [_bars(each.spans, each.begin_ns - begin_ns, finest_ns) for each in iterations]
        timelines.append(_timeline(f"{title} ({number})", by_label, rows, length_ns / 1e9))
    return timelines


def _timeline(
    title: str, labels: Iterable[str], rows: Sequence[list[Any]], length_s: float
) -> dict[str, Any]:
    named = [{"label": label, "spans": bars} for label, bars in zip(labels, rows, strict=True)]
    return {"title": title, "rows": named, "length": max(1e-3, 1e6 * length_s)}


def _bars(spans: list[Span], shift_ns: int, finest_ns: int) -> list[list[Any]]:
    """Return the bars of a rank; spans shorter than `finest_ns` merge with the next one."""
    bars: list[list[Any]] = []
    for name, begin_ns, end_ns, about, _ in spans:
        if (kind := _KINDS.get(name)) is None:
            continue
        begin_us, length_us = (begin_ns + shift_ns) / 1e3, (end_ns - begin_ns) / 1e3
        if bars and max(length_us, bars[-1][2]) < finest_ns / 1e3:
            bars[-1][2:] = begin_us + length_us - bars[-1][1], ""
            continue
        peers = [f"{word} rank {about[key]}" for key, word in _PEERS.items() if key in about]
        title = str(about.get("cause", about.get("microbatch", name)))
        if part := about.get("slice"):
            title += f".{part}"
        bars.append([kind, begin_us, length_us, *(peers or [title])])
    return bars
