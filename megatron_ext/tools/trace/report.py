"""Creates the page that explains a traced run, as one self-contained HTML file.

The verdict at the top says where the time goes and what to do about it. The page has figures for
all steps, but timelines for only three: the median step, the slowest step and the planned step.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules.drawing.palette import KINDS, NAMES, SPANS, ink, variables
from megatron_ext.tools.trace import imbalance
from megatron_ext.tools.trace.aggregate import Run, Slow, slow
from megatron_ext.tools.trace.forecast import Forecast, predict
from megatron_ext.tools.trace.measured_costs import planned
from megatron_ext.tools.trace.survey import Step, figures
from megatron_ext.tracing.records import ACTION_NAMES

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.tools.trace.reader import Iteration, Span

# These limits keep the page small enough for a browser, no matter how large the run is.
_MAX_SPANS = 150_000
"""Maximum number of spans in one timeline."""
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
    ("F", NAMES["F"]),
    ("B", NAMES["B"]),
    ("I", NAMES["I"]),
    ("W", NAMES["W"]),
    ("wait", "wait"),
    ("move", "send, receive"),
    ("after", "reduce, optimizer"),
)
_PEERS = {"on": "for", "to": "to", "from": "from"}
"""Attribute that names another rank -> the word that precedes the rank in a span's title."""


def page(run: Run) -> str:
    """Return a run's HTML report."""
    notes = list(run.notes)
    # The page is useful even without a table or a forecast, so only add a note.
    plan = _plan(run, notes)
    forecast = _forecast(run, notes)
    # Show only each schedule's fastest variant. The eight fastest variants overall, for
    # example, would not include zb-v.
    predictions = forecast.best_of_schedules
    # Always show the traced schedule for comparison.
    of_traced = forecast.of_traced_schedule
    if of_traced is not None and of_traced not in predictions:
        predictions.append(of_traced)
    total = figures(run.surveys)
    slow_items = slow(run)[:_MAX_ROWS]
    shown_ranks = run.surveys[:_MAX_ROWS]
    # Columns have the same width for all ranks, so ranks that stopped early have fewer.
    longest = max((rank.steps for rank in run.surveys), key=len)
    # If there are many steps, a column shows the mean of several.
    steps_per_column = -(-len(longest) // _MAX_COLUMNS)
    planned_figures = None
    if plan is not None:
        planned_figures = {
            "makespan_s": plan.makespan,
            "bubble_ratio": plan.bubble_ratio,
        }
    ranks = []
    idle_shares = []
    for rank in shown_ranks:
        rank_figures = figures([rank])._asdict()
        ranks.append({"label": rank.header.label, **rank_figures})
        idle_shares.append(_idle_shares(rank.steps, steps_per_column))
    slow_rows = [[item.name, f"{item.factor:.2f}"] for item in slow_items]
    verdict = _verdict(total, forecast, slow_items)
    expert_sentences = " ".join(imbalance.sentences(run))
    if expert_sentences:
        verdict.append(("Which experts are slow", expert_sentences))
    content = {
        "title": _title(run, plan),
        "folder": run.directory.resolve().name,
        "verdict": verdict,
        "flags": [prediction.flags for prediction in forecast.recommended],
        "forecast": [asdict(prediction) for prediction in predictions],
        "traced": forecast.measured,
        "notes": notes[:_MAX_ROWS],
        "total": {**total._asdict(), "ranks": len(run.surveys)},
        "plan": planned_figures,
        "legend": _LEGEND,
        "inks": _inks(),
        "timelines": _timelines(run, plan),
        "ranks": ranks,
        "heat": idle_shares,
        "steps": [step.number for step in longest],
        "links": [asdict(link) for link in run.links[:_MAX_ROWS]],
        "experts": imbalance.table(run)[:_MAX_ROWS],
        "slow": slow_rows,
        "settings": _settings(run),
    }
    return _filled_template(content)


def _plan(run: Run, notes: list[str]) -> Timeline | None:
    """Return the table simulated with the measured times, or None if no table can be read."""
    try:
        schedule = run.schedule
        if schedule is None:
            return None
        return planned(run, schedule)
    except DataError as error:
        notes.append(f"no planned step: {error}")
        return None


def _forecast(run: Run, notes: list[str]) -> Forecast:
    """Return the forecast for other schedules, or an empty one if no forecast is possible."""
    try:
        return predict(run)
    except (DataError, ScheduleError) as error:
        notes.append(f"no forecast: {error}")
        return Forecast([], 0.0, "", [])


def _timelines(run: Run, plan: Timeline | None) -> list[dict[str, Any]]:
    """Return the page's timelines: two measured steps and the planned step."""
    timelines = measured_timelines(run)
    if plan is not None:
        timelines.append(_planned_timeline(plan))
    return timelines


def _filled_template(content: Mapping[str, Any]) -> str:
    """Return the page with this content embedded as JSON, which the page's script reads."""
    text = json.dumps(content, separators=(",", ":"))
    # Traces may contain arbitrary text. Escape everything that could close the script
    # element or start a comment, so that no text is parsed as markup.
    text = text.replace("&", "\\u0026")
    text = text.replace("<", "\\u003c")
    text = text.replace(">", "\\u003e")
    template_path = Path(__file__).with_name("page.html")
    template = template_path.read_text(encoding="utf-8")
    for theme in ("light", "dark"):
        placeholder = f"@{theme.upper()}@"
        template = template.replace(placeholder, variables(theme))
    return template.replace("@DATA@", text)


def _title(run: Run, plan: Timeline | None) -> str:
    """Return the heading: the schedule, the ranks and the step size."""
    title = str(run.settings.get("pipeline_schedule", "A run"))
    step_size = ""
    if plan is not None:
        title = plan.schedule.label
        policy = run.settings.get("dpp_policy")
        if policy is not None:
            title += f" in dynamic order ({policy})"
        step_size = f", {plan.schedule.total_microbatches} micro-batches per step"
    return f"{title} on {len(run.surveys)} ranks{step_size}"


def _inks() -> dict[str, str]:
    """Return the text colour for each kind of bar."""
    inks = {}
    for kind, (even_colour, _) in KINDS.items():
        inks[kind] = ink(even_colour)
    for name, colour in SPANS.items():
        inks[name] = ink(colour)
    return inks


def _verdict(
    total: Step, forecast: Forecast, slow_items: Sequence[Slow]
) -> list[tuple[str, str]]:
    """Return each heading with its sentence: where the time goes, what to change, and so on."""
    # With these causes, a rank is waiting for another rank.
    causes_of_others = "input", "leader", "credit", "end of the pipeline"
    idle_ns = sum(total.idle_ns.values())
    waits_ns = 0.0
    for cause, time_ns in total.idle_ns.items():
        if cause.startswith(causes_of_others):
            waits_ns += time_ns
    times_ns = {
        "in actions": total.busy_ns,
        "waiting for other ranks": waits_ns,
        "in other gaps": idle_ns - waits_ns,
        "in gradient reduction and the optimizer": total.after_ns,
    }
    step_ns = sum(times_ns.values()) or 1
    shares = []
    for activity, time_ns in times_ns.items():
        # Omit shares that would round to 0 %.
        if time_ns >= 0.005 * step_ns:
            shares.append(f"{100 * time_ns / step_ns:.0f} % {activity}")
    answers = [("Where the time goes", f"A rank spends {', '.join(shares)}.")]
    if forecast.predictions:
        answers.append(("What to run", forecast.advice))
    if forecast.shared_cpus is not None:
        doubt = f"{forecast.shared_cpus}, so waits are longer than if each rank had its own CPU"
        answer = (
            f"{doubt}, and links are not judged. The forecast assumes one CPU per rank."
        )
        answers.append(("What to treat with caution", answer))
    if slow_items:
        worst = [
            f"{item.name} ({item.factor:.1f} x the median)" for item in slow_items[:3]
        ]
        more_below = " and more below" if len(slow_items) > 3 else ""
        answers.append(("What is slow", f"{', '.join(worst)}{more_below}."))
    return answers


def _idle_shares(steps: Sequence[Step], steps_per_column: int) -> list[float]:
    """Return a rank's idle share per column of the page, averaged over the column's steps."""
    ratios = [step.bubble_ratio for step in steps]
    shares = []
    for first in range(0, len(ratios), steps_per_column):
        mean = statistics.fmean(ratios[first : first + steps_per_column])
        shares.append(round(mean, 3))
    return shares


def _settings(run: Run) -> list[list[str]]:
    """Return rows of a setting and its value, one row per value if it differs between ranks."""
    ranks_by_value: dict[str, dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank in run.surveys:
        header = rank.header
        settings = {**header.settings, "host": header.host}
        for name, value in settings.items():
            ranks_by_value[name][str(value)].append(header.rank)
    rows = []
    for name, values in ranks_by_value.items():
        for value, ranks in values.items():
            label = name
            if len(values) > 1:
                first_ranks = ", ".join(str(rank) for rank in ranks[:8])
                label += f" (rank {first_ranks})"
            rows.append([label, value])
    return rows[:_MAX_ROWS]


def _planned_timeline(plan: Timeline) -> dict[str, Any]:
    """Return the simulated table's timeline."""
    rows = []
    for bars_of_rank in plan.bars[:_MAX_RANKS]:
        row: list[Any] = []
        for action, begin_s, end_s in bars_of_rank:
            length_s = end_s - begin_s
            title = str(action.microbatch)
            if action.slice:
                title += f".{action.slice}"
            row.append([action.kind, 1e6 * begin_s, 1e6 * length_s, title])
        rows.append(row)
    labels = [f"pipeline rank {rank}" for rank in range(len(rows))]
    return _timeline(f"planned: {plan.schedule.label}", labels, rows, plan.makespan)


def measured_timelines(run: Run) -> list[dict[str, Any]]:
    """Return the timelines of the median step and the slowest step."""
    timelines = []
    for title, number in _chosen_steps(run).items():
        iterations: dict[str, Iteration] = {}
        replica_of: dict[str, int] = {}
        # Replica -> micro-batch -> number of tokens. Only ranks
        # that read data record it.
        tokens: dict[int, dict[int, int]] = defaultdict(dict)
        for rank in run.surveys[:_MAX_RANKS]:
            replica_of[rank.header.label] = rank.header.data
            for iteration in rank.file.iterations(only=number):
                # Megatron's rerun state machine may repeat a
                # step. Keep the last attempt.
                iterations[rank.header.label] = iteration
                replica_tokens = tokens[rank.header.data]
                lengths = iteration.figures.get("lengths", {})
                for microbatch, (num_tokens, _) in lengths.items():
                    replica_tokens[int(microbatch)] = num_tokens
        begins_ns: list[int] = []
        ends_ns: list[int] = []
        num_spans = 0
        for iteration in iterations.values():
            begins_ns.append(iteration.begin_ns)
            ends_ns.append(iteration.begin_ns + iteration.duration_ns)
            num_spans += len(iteration.spans)
        begin_ns = min(begins_ns)
        end_ns = max(ends_ns)
        # Merge spans that would be too thin to see. A row has room for at most
        # `_MAX_SPANS / rows` spans of this length.
        finest_ns = 0
        if num_spans > _MAX_SPANS:
            finest_ns = (end_ns - begin_ns) * len(iterations) // _MAX_SPANS
        rows = []
        for label, iteration in iterations.items():
            slice_sizes = iteration.figures.get("slice_sizes", ())
            step_slices = _StepSlices(slice_sizes, tokens[replica_of[label]])
            shift_ns = iteration.begin_ns - begin_ns
            rows.append(_bars(iteration.spans, shift_ns, finest_ns, step_slices))
        length_s = (end_ns - begin_ns) / 1e9
        timelines.append(_timeline(f"{title} ({number})", iterations, rows, length_s))
    return timelines


def _chosen_steps(run: Run) -> dict[str, int]:
    """Return title -> step number for the steps that the page shows."""
    # A rank that died early is missing steps, so consider only the
    # steps with the most ranks.
    num_ranks = max(len(steps) for steps in run.steps.values())
    durations_ns: dict[int, float] = {}
    for number, steps in run.steps.items():
        if len(steps) == num_ranks:
            durations_ns[number] = max(step.duration_ns for step in steps)
    fastest_first = sorted(durations_ns, key=durations_ns.__getitem__)
    # Choose an actual step, because a mean over steps has no timeline.
    middle = (len(fastest_first) - 1) // 2
    chosen = {"median step": fastest_first[middle]}
    if len(fastest_first) > 1:
        chosen["slowest step"] = fastest_first[-1]
    return chosen


def _timeline(
    title: str,
    labels: Iterable[str],
    rows: Sequence[list[Any]],
    length_s: float,
) -> dict[str, Any]:
    named_rows = []
    for label, bars in zip(labels, rows, strict=True):
        named_rows.append({"label": label, "spans": bars})
    # The page divides by the length, so it must not be 0.
    length_us = max(1e-3, 1e6 * length_s)
    return {"title": title, "rows": named_rows, "length": length_us}


class _StepSlices(NamedTuple):
    """A rank's micro-batches in a step where slices depend on lengths."""

    slice_sizes: Sequence[Sequence[float]]
    """Slice sizes by micro-batch, or empty if slices do not depend on lengths."""
    tokens: Mapping[int, int]
    """Number of tokens by micro-batch, if a rank recorded it."""

    def words(self, attributes: Mapping[str, Any]) -> list[str]:
        """Return the page's description of the slice that a span's attributes refer to."""
        microbatch = attributes.get("microbatch", -1)
        if not 0 <= microbatch < len(self.slice_sizes):
            return []
        facts = []
        num_slices = len(self.slice_sizes[microbatch])
        if num_slices > 1:
            slice_index = attributes.get("slice", 0)
            facts.append(f"slice {slice_index + 1} of {num_slices}")
        if microbatch in self.tokens:
            facts.append(f"micro-batch of {self.tokens[microbatch]} tokens")
        if not facts:
            return []
        return [", ".join(facts)]


def _bars(
    spans: Sequence[Span],
    shift_ns: int,
    finest_ns: int,
    step_slices: _StepSlices,
) -> list[list[Any]]:
    """Return a rank's bars, each as [kind, begin in us, length in us, title, slice].

    Consecutive spans shorter than `finest_ns` are merged into one bar.
    """
    bars: list[list[Any]] = []
    finest_us = finest_ns / 1e3
    for span in spans:
        kind = _KINDS.get(span.name)
        if kind is None:
            continue
        begin_us = (span.begin_ns + shift_ns) / 1e3
        length_us = (span.end_ns - span.begin_ns) / 1e3
        if bars:
            previous_bar = bars[-1]
            if max(length_us, previous_bar[2]) < finest_us:
                # Merged spans may have different titles, so the bar has no title.
                end_us = begin_us + length_us
                previous_bar[2:] = end_us - previous_bar[1], ""
                continue
        slice_words = step_slices.words(span.attributes)
        titles = _bar_titles(span)
        bars.append([kind, begin_us, length_us, *titles, *slice_words])
    return bars


def _bar_titles(span: Span) -> list[str]:
    """Return the text on a bar: the other rank, the reason for waiting, or the micro-batch."""
    attributes = span.attributes
    peers = []
    for key, word in _PEERS.items():
        if key in attributes:
            peers.append(f"{word} rank {attributes[key]}")
    if peers:
        return peers
    default_title = attributes.get("microbatch", span.name)
    title = str(attributes.get("cause", default_title))
    if slice_index := attributes.get("slice"):
        title += f".{slice_index}"
    return [title]
