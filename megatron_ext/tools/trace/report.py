"""Makes the page that explains a traced run: one self-contained HTML file.

On top is a verdict: where the time goes, and what to do about it. The page holds the figures of all
steps and the spans of a few: the median step, the slowest one, and the planned one.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules.drawing.palette import KINDS, NAMES, SPANS, ink, variables
from megatron_ext.schedules.table.transforms import literal_rows, table_rank
from megatron_ext.tools.trace.aggregate import slow
from megatron_ext.tools.trace.forecast import Forecast, Prediction, planned, predict
from megatron_ext.tools.trace.reader import load_schedule
from megatron_ext.tools.trace.survey import Step, figures
from megatron_ext.tracing.records import ACTION_NAMES

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.tools.trace.aggregate import Run
    from megatron_ext.tools.trace.reader import Iteration, Span
    from megatron_ext.tools.trace.survey import RankSurvey

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
_Row = dict[str, Any]


def page(run: Run) -> str:
    """Return the HTML of the report on a run."""
    notes = list(run.notes)
    total = figures(run.surveys)
    timelines = _measured(run)
    settings = run.surveys[0].header.settings
    title = str(settings.get("pipeline_schedule", "A run"))
    per_step = ""
    cards = [
        (f"{total.duration_ns / 1e6:.1f} ms", "step, median"),
        (f"{total.pipeline_ns / 1e6:.1f} ms", "of it in the pipeline"),
        (f"{100 * total.bubble_ratio:.1f} %", "bubble, all causes"),
    ]
    # A table or a forecast that is missing leaves a note: the rest of the page is of use alone.
    try:
        if (schedule := load_schedule(run.directory)) is not None:
            plan = planned(run, schedule)
            timelines.append(_planned_rows(plan))
            cards.append((f"{1e3 * plan.makespan:.1f} ms", "planned pipeline time"))
            cards.append((f"{100 * plan.bubble_ratio:.1f} %", "planned bubble"))
            title, policy = schedule.label, settings.get("dpp_policy")
            title += "" if policy is None else f" in dynamic order ({policy})"
            per_step = f", {schedule.total_microbatches} micro-batches a step"
    except DataError as error:
        notes.append(f"no planned step: {error}")
    cards += [
        (f"{100 * total.out_of_order_ratio:.1f} %", "actions out of order"),
        (f"{total.memory_bytes / 2**30:.2f} GiB", "peak memory of a rank"),
        (str(len(run.surveys)), "ranks traced"),
    ]
    slowest = slow(run)[:_MAX_ROWS]
    found, predictions = None, list[Prediction]()
    try:
        found = predict(run)
        predictions = [p for p in found.predictions if p.bounds_memory][:8]
        if found.own is not None and found.own not in predictions:
            predictions.append(found.own)
    except (DataError, ScheduleError) as error:
        notes.append(f"no forecast: {error}")
    whole = total.busy_ns + sum(total.idle_ns.values()) or 1
    content = {
        "title": f"{title} on {len(run.surveys)} ranks{per_step}",
        "folder": run.directory.resolve().name,
        "verdict": _verdict(total, found, slowest),
        "flags": [best.flags for best in found.recommended] if found else [],
        "forecast": [
            [
                p.schedule + (" (traced)" if found and p is found.own else ""),
                f"{1e3 * p.step_s:.1f}",
                f"{100 * p.bubble_ratio:.1f} %",
                "" if p.memory_bytes is None else f"{p.memory_bytes / 2**30:.2f}",
                p.flags,
            ]
            for p in predictions
        ],
        "notes": notes[:_MAX_ROWS],
        "cards": cards,
        "legend": _LEGEND,
        "inks": {
            **{k: ink(even) for k, (even, _) in KINDS.items()},
            **{name: ink(colour) for name, colour in SPANS.items()},
        },
        "timelines": timelines,
        "ranks": [_rank(survey) for survey in run.surveys[:_MAX_ROWS]],
        "heat": [_idle_shares(survey.steps) for survey in run.surveys[:_MAX_RANKS]],
        "steps": [step.number for step in run.surveys[0].steps],
        "causes": [
            (cause, len(run.surveys) * time_ns / 1e3, time_ns / whole)
            for cause, time_ns in list(total.idle_ns.items())[:_MAX_ROWS]
        ],
        "links": _links(run),
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
    total: Step, found: Forecast | None, slowest: list[tuple[str, float]]
) -> list[tuple[str, str]]:
    """Return (question, answer) pairs: where the time goes, what to change, what to mistrust."""
    waits = sum(ns for cause, ns in total.idle_ns.items() if cause.startswith("input"))
    times = {
        "in actions": total.busy_ns,
        "waiting for other ranks": waits,
        "in other gaps": sum(total.idle_ns.values()) - waits,
        "in the reduction of gradients and the optimizer": total.after_ns,
    }
    whole = sum(times.values()) or 1
    shares = {what: ns / whole for what, ns in times.items()}
    parts = ", ".join(f"{100 * of:.0f} % {what}" for what, of in shares.items() if of >= 0.005)
    lines = [("Where the time goes", f"Of its step, a rank spends {parts}.")]
    if found is not None:
        lines.append(("What to run", found.advice))
        if found.shared_cpus is not None:
            doubt = f"{found.shared_cpus}, so waits are longer here than with a CPU for each rank."
            lines.append(("What to mistrust", f"{doubt} The forecast is for the latter."))
    if slowest:
        named = ", ".join(f"{what} ({factor:.1f} x the median)" for what, factor in slowest[:3])
        lines.append(("What is slow", f"{named}{' and others below' * (len(slowest) > 3)}."))
    return lines


def _rank(survey: RankSurvey) -> _Row:
    mine = figures([survey])
    parts = [
        ("F", mine.busy_ns / 1e3, "in actions"),
        *((_KINDS.get(cause, "wait"), ns / 1e3, cause) for cause, ns in mine.idle_ns.items()),
        ("after", mine.after_ns / 1e3, "after the pipeline"),
    ]
    return {
        "label": survey.header.label,
        "parts": parts[:40],  # nobody can tell more apart
        "busy": mine.busy_ns / 1e3,
        "idle": sum(mine.idle_ns.values()) / 1e3,
        "bubble": mine.bubble_ratio,
        "after": mine.after_ns / 1e3,
        "live": mine.peak_live,
        "memory": f"{mine.memory_bytes / 2**30:.2f}",
        "jumped": mine.out_of_order_ratio,
    }


def _idle_shares(steps: Sequence[Step]) -> list[float]:
    """Return the idle shares of a rank's steps, averaged if there are more than page columns."""
    idle = [step.bubble_ratio for step in steps]
    width = -(-len(idle) // _MAX_COLUMNS) or 1
    groups = (idle[first : first + width] for first in range(0, len(idle), width))
    return [round(statistics.fmean(group), 3) for group in groups]


def _links(run: Run) -> list[list[str]]:
    by_rank = {survey.header.rank: survey for survey in run.surveys}
    rows = []
    for link in run.links[:_MAX_ROWS]:
        target = by_rank[link.target]
        # Messages of Megatron's own transport have no wire that we know.
        wire = target.wires.get(link.source, target.header.settings.get("transport", ""))
        steps, rate = max(1, target.counted), ""
        if link.delay_ns and link.messages:
            rate = f"{link.bytes / link.messages / link.delay_ns * 1e9 / 2**20:.1f}"
        rows.append([
            f"rank {link.source}",
            f"rank {link.target}",
            f"{link.messages / steps:.4g}",
            f"{link.bytes / steps / 2**20:.2f}",
            f"{link.waited_ns / steps / 1e6:.2f}",
            "" if link.delay_ns is None else f"{link.delay_ns / 1e6:.3f}",
            rate,
            str(wire),
        ])  # fmt: skip
    return rows


def _settings(run: Run) -> list[list[str]]:
    """Settings that all ranks share, then those of single ranks."""
    headers = [survey.header for survey in run.surveys]
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for header in headers:
        for name, value in {**header.settings, **header.versions, "host": header.host}.items():
            values[name][str(value)].append(header.rank)
    rows = []
    for name, found in values.items():
        for value, ranks in found.items():
            few = len(found) > 1
            rows.append([f"{name} (rank {', '.join(map(str, ranks[:8]))})" if few else name, value])
    return rows[:_MAX_ROWS]


def _measured(run: Run) -> list[_Row]:
    """The timelines of the median and of the slowest iteration that all ranks have."""
    by_number: dict[int, list[float]] = defaultdict(list)
    for survey in run.surveys:
        for step in survey.complete_steps:
            by_number[step.number].append(step.duration_ns)
    # A rank that died early has fewer steps: only those that all others have can be compared.
    most = max(map(len, by_number.values()))
    durations = {number: max(ns) for number, ns in by_number.items() if len(ns) == most}
    ranked = sorted(durations, key=lambda number: durations[number])
    # One that happened, rather than a mean of several, which no rank has run.
    chosen = {"median step": ranked[(len(ranked) - 1) // 2]}
    if len(ranked) > 1:
        chosen["slowest step"] = ranked[-1]
    timelines = []
    for title, number in chosen.items():
        found: list[tuple[str, Iteration]] = []
        for survey in run.surveys[:_MAX_RANKS]:
            found += ((survey.header.label, each) for each in survey.file.iterations(only=number))
        begin_ns = min(each.begin_ns for _, each in found)
        length_ns = max(each.begin_ns + each.duration_ns for _, each in found) - begin_ns
        total = sum(len(each.spans) for _, each in found)
        # What is thinner than its share of the picture could not be seen anyway.
        finest_ns = 0 if total <= _MAX_SPANS else length_ns * len(found) // _MAX_SPANS
        rows = [
            {"label": label, "spans": _bars(each.spans, each.begin_ns - begin_ns, finest_ns)}
            for label, each in found
        ]
        length_us = max(1e-3, length_ns / 1e3)
        timelines.append({"title": f"{title} ({number})", "rows": rows, "length": length_us})
    return timelines


def _bars(spans: list[Span], shift_ns: int, finest_ns: int) -> list[list[Any]]:
    """Return the bars of a rank; spans shorter than `finest_ns` merge with the next one."""
    bars: list[list[Any]] = []
    for span in spans:
        kind, about = _KINDS.get(span.name), span.attributes
        if kind is None:
            continue
        begin_us, length_us = (span.begin_ns + shift_ns) / 1e3, (span.end_ns - span.begin_ns) / 1e3
        if bars and max(length_us, bars[-1][2]) < finest_ns / 1e3:
            bars[-1][2:] = begin_us + length_us - bars[-1][1], ""
            continue
        part = about.get("slice")
        title = f"{about.get('microbatch', span.name)}{f'.{part}' if part else ''}"
        if span.name == "wait":
            title = f"for rank {about['on']}" if "on" in about else str(about.get("cause", ""))
        elif span.name == "send":
            title = f"to rank {about.get('to', '')}"
        elif span.name == "receive":
            title = f"from rank {about.get('from', '')}"
        bars.append([kind, begin_us, length_us, title])
    return bars


def _planned_rows(plan: Timeline) -> _Row:
    """The rows of a simulated table; with twins, those of both pipelines."""
    rows = []
    for rank, actions in enumerate(literal_rows(plan.schedule)[:_MAX_RANKS]):
        source = table_rank(plan.schedule, rank)
        times = zip(actions, plan.starts[source], plan.ends[source], strict=True)
        bars = [
            [action.kind, 1e6 * start, 1e6 * (end - start), str(action.microbatch)]
            for action, start, end in times
        ]
        rows.append({"label": f"pipeline rank {rank}", "spans": bars})
    title = f"planned: {plan.schedule.label}"
    return {"title": title, "rows": rows, "length": max(1e-3, 1e6 * plan.makespan)}
