"""Predicts the step time of every schedule and policy from a trace under one of them.

The trace gives the durations of each stage's actions, of messages and of the part of a step outside
its pipeline, the memory of the ranks, and the activations that a forward keeps. The prediction
assumes that the model splits evenly into other stages (the work of a measured stage is spread over
its part of the model), that the halves of an unsplit backward take equally long, and that memory
other than activations stays the same.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.config.sized_pipeline import Pipeline
from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules import commands
from megatron_ext.schedules.commands import aligned
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.policies import POLICIES
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.tools.trace import summary
from megatron_ext.tools.trace.aggregate import Run, read_run
from megatron_ext.tools.trace.measured_costs import StageCosts, load_schedule, measured_costs
from megatron_ext.tools.trace.traffic import Traffic, measured_traffic

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["Forecast", "Prediction", "forecast", "predict", "table"]

_SEEDS = 5
"""Number of simulated steps with different jitter; their mean is the prediction."""
_QUIET = 0.01
"""Jitter below this is negligible."""
_EQUAL = 0.005
"""Steps that differ by less than this part count as equally fast."""
_WITH_FLAGS = 3
"""Predictions whose flags `plan` prints, beside those of the recommended one."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one schedule."""

    label: str
    flags: str
    step_s: float
    bubble_ratio: float
    memory_bytes: int | None
    """Memory of the rank that needs most; None: unknown from the trace."""
    bounds_memory: bool = True
    """Whether ranks keep no more activations than the table; else up to all micro-batches, and
    how many depends on who is late."""
    sent_bytes: int | None = None
    """Bytes that stages hand on in a step, see `Traffic`; None: unknown from the trace."""
    weight_copies: int = 1
    """Ranks that hold the weights of one stage."""

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction under the keys of `plan --from-trace --json`."""
        return {
            "schedule": self.label,
            "flags": self.flags,
            "step_s": self.step_s,
            "bubble_ratio": self.bubble_ratio,
            "memory_bytes": self.memory_bytes,
            "bounds_memory": self.bounds_memory,
            "sent_bytes": self.sent_bytes,
        }


@dataclass(frozen=True)
class Forecast:
    """Every schedule, the fastest first."""

    predictions: list[Prediction]
    measured_s: float
    """The step that was traced, median."""
    measured: str
    """The traced schedule, named as in predictions."""
    notes: list[str]
    shared_cpus: str | None = None
    """CPUs that ranks of the traced run shared, in words; None: each had its own."""

    @property
    def own(self) -> Prediction | None:
        """The prediction for the traced schedule itself."""
        return next((p for p in self.predictions if p.label == self.measured), None)

    @property
    def recommended(self) -> list[Prediction]:
        """Of the fastest predictions that bound memory, the one that needs least.

        If that holds the weights twice, the same among those with one copy follows.
        """
        found: list[Prediction] = []
        left = [p for p in self.predictions if p.bounds_memory]
        while left and (not found or found[-1].weight_copies > 1):
            fast = [p for p in left if p.step_s <= (1 + _EQUAL) * left[0].step_s]
            found.append(min(fast, key=lambda p: (p.memory_bytes or 0, p.weight_copies, p.step_s)))
            left = [p for p in left if p.weight_copies < found[-1].weight_copies]
        return found

    @property
    def advice(self) -> str:
        """One sentence on the schedule to take and the gain to expect."""
        own = self.own
        # Against its own prediction: what slowed the traced run down would slow any other.
        before_s = self.measured_s if own is None else own.step_s
        told = []
        for best in self.recommended:
            if own is not None and before_s <= (1 + _EQUAL) * best.step_s:
                told.append(f"{self.measured} as traced, for none is predicted to be faster")
                continue
            gain = f"{1e3 * best.step_s:.1f} ms a step, {before_s / best.step_s:.2f} x as fast"
            if best.memory_bytes is not None:
                gain += f", {best.memory_bytes / 2**30:.2f} GiB on a rank"
            told.append(f"{best.label} ({gain})")
        if len(told) > 1:
            told[0] += f" where {self.recommended[0].weight_copies} copies of the weights fit"
        return f"{', else '.join(told)}." if told else "no schedule that bounds memory fits."


@dataclass(frozen=True)
class _Measured:
    """Properties of the model and the machines, as traced."""

    schedule: Schedule
    costs: StageCosts
    outside_s: float
    """Of a step: what is not in the pipeline."""
    fixed_bytes: float | None
    """Memory of a rank besides activations, with the weights once."""
    activation_bytes: float
    """One micro-batch on 1/pp of the model."""
    num_layers: int | None
    traffic: Traffic | None
    stash_ratio: float
    """Memory of a micro-batch between I and W over that before I."""


def forecast(directory: Path, memory_gb: float | None = None) -> Forecast:
    """Predict the step of every schedule and policy from a traced run.

    Args:
        directory: The folder of the run.
        memory_gb: As for `predict`.

    Raises:
        DataError: There is no trace; see `predict`.
        ScheduleError: See `predict`.
    """
    return predict(read_run(directory), memory_gb)


def predict(run: Run, memory_gb: float | None = None) -> Forecast:
    """Predict the step of every schedule and policy from the traces of a run.

    Args:
        run: The traces.
        memory_gb: Upper bound on the memory of a rank, in units of 2**30 bytes; None: no bound.

    Raises:
        DataError: The trace lacks data that a prediction needs.
        ScheduleError: No schedule fits.
    """
    directory, schedule = run.directory, load_schedule(run.directory)
    if schedule is None:
        raise DataError(
            f"{directory} has no schedule.json, which identifies the actions; trace a run "
            f"with pipeline parallelism"
        )
    if not any(s.is_full(step.microbatches) for s in run.surveys for step in s.steps):
        raise DataError(
            f"{directory}: no traced step had the {schedule.num_microbatches} micro-batches of the "
            f"table; trace steps after --rampup-batch-size has reached them"
        )
    notes = list(run.notes)
    measured = _measured(run, schedule, notes)
    found, left_out = [], []
    for pipeline in _pipelines(schedule, measured.stash_ratio):
        try:
            _check_halves(schedule, pipeline)
            found.append(_predict(measured, pipeline))
        except ScheduleError as error:  # noqa: PERF203 - each schedule may refuse
            left_out.append(str(error))
    notes += [f"left out: {reason}" for reason in dict.fromkeys(left_out)]
    if memory_gb is not None:
        if measured.fixed_bytes is None:
            raise DataError(
                f"{directory}: no rank tells what a forward keeps, so --memory-gb cannot be held; "
                f"trace the run with this version, or leave --memory-gb out"
            )
        fitting = [p for p in found if (p.memory_bytes or 0) <= memory_gb * 2**30]
        notes += [f"left out: {p.label} needs {_gib(p)} GiB" for p in found if p not in fitting]
        found = fitting
    if not found:
        raise ScheduleError("no schedule can run with these sizes:\n" + "\n".join(notes))
    found.sort(key=lambda p: (p.step_s, p.memory_bytes or 0))
    step_s, _ = _step_and_pipeline(run)
    policy = run.surveys[0].header.settings.get("dpp_policy")
    traced = schedule.label if policy is None else _dynamic_label(schedule.label, policy)
    shared = _shared_cpus(run)
    if shared is not None:
        notes.append(f"{shared}: the forecast holds for ranks with a CPU or a device each")
    return Forecast(found, step_s, traced, notes, shared)


def _shared_cpus(run: Run) -> str | None:
    """Return a note if ranks that compute on CPUs had fewer CPUs than ranks, else None."""
    ranks: dict[str, int] = defaultdict(int)
    cpus: dict[str, set[str]] = defaultdict(set)
    for survey in run.surveys:
        settings, host = survey.header.settings, survey.header.host
        if settings.get("device") == "cpu" and settings.get("cpus"):
            ranks[host] += 1
            cpus[host].update(str(settings["cpus"]).split(","))
    crowded = [host for host in ranks if ranks[host] > len(cpus[host])]
    if not crowded:
        return None
    worst = max(crowded, key=lambda host: ranks[host] / len(cpus[host]))
    return f"{ranks[worst]} ranks shared {len(cpus[worst])} CPUs"


def _pipelines(measured: Schedule, stash_ratio: float) -> Iterator[Pipeline]:
    """Yield every configuration that fits the ranks and micro-batches of a run."""
    seen: set[tuple[object, ...]] = set()
    for generator in registered().values():
        count = measured.total_microbatches // generator.twins
        for variant in commands.variants(generator, None, {}):
            options = dict(variant)
            chunks = options.pop("chunks", None)
            config = PipelineConfig(
                schedule=generator.name,
                chunks=None if chunks is None else int(chunks),
                options=options,
                stash_ratio=stash_ratio,
            )
            yield Pipeline(config, measured.pp, count)
            for policy in POLICIES:
                # All policies but hint ignore the order of the table.
                where = policy, generator.num_chunks if chunks is None else chunks, generator.twins
                if policy == DynamicOrder.policy or where not in seen:
                    seen.add(where)
                    ordered = replace(config, dynamic=DynamicOrder(policy=policy))
                    yield Pipeline(ordered, measured.pp, count)


def _check_halves(measured: Schedule, pipeline: Pipeline) -> None:
    """Refuse two mirrored pipelines if the run has an odd number of micro-batches."""
    total = measured.total_microbatches
    if total % pipeline.twins:
        raise ScheduleError(
            f"{pipeline.name} runs half of the micro-batches in each direction, and the traced run "
            f"has {total}"
        )


def _predict(measured: _Measured, pipeline: Pipeline) -> Prediction:
    """Simulate a pipeline with the costs of the trace.

    Raises:
        ScheduleError: The schedule is impossible for these sizes.
    """
    layers, stages = measured.num_layers, pipeline.placement.num_stages
    if layers is not None and stages != measured.schedule.num_stages and layers % stages:
        raise ScheduleError(
            f"{pipeline.name} cuts the model into {stages} stages, which its {layers} layers do "
            f"not fill evenly"
        )
    costs = measured.costs.costs(pipeline.pp, stages, jitter=True)
    made = [_of_table(measured, pipeline, costs)]
    if registered()[
        pipeline.name
    ].needs_costs:  # an order made for costs need not be the best of all
        config = replace(pipeline.config, costs=_relative(measured.costs, pipeline.pp))
        own = replace(pipeline, config=config)
        made.append(_of_table(measured, own, costs))
    return min(made, key=lambda prediction: prediction.step_s)


def _of_table(measured: _Measured, pipeline: Pipeline, costs: Costs) -> Prediction:
    """Simulate the table of a pipeline."""
    noisy = costs.jitter > _QUIET
    steps = [
        _simulate(pipeline, replace(costs, jitter=costs.jitter if noisy else 0.0, seed=seed))
        for seed in range(_SEEDS if noisy else 1)
    ]
    static = pipeline.static().full
    label, flags = static.label, commands.training_flags(static, pipeline.costs)
    if pipeline.dynamic is not None:
        label = _dynamic_label(label, pipeline.dynamic.policy)
        flags = f"{flags} --use-dpp --dpp-policy {pipeline.dynamic.policy}"
    peak = max(max(activation_peaks(step.schedule, measured.stash_ratio)) for step in steps)
    memory = None
    if measured.fixed_bytes is not None:
        weights = static.weight_copies / measured.schedule.weight_copies
        memory = round(measured.fixed_bytes * weights + peak * measured.activation_bytes)
    makespan_s = statistics.fmean(step.makespan for step in steps)
    bubble = statistics.fmean(step.bubble_ratio for step in steps)
    bounded = pipeline.dynamic is None or pipeline.dynamic.policy == DynamicOrder.policy
    traffic = measured.traffic
    sent = None if traffic is None else traffic.under(static.placement)
    return Prediction(
        label,
        flags,
        makespan_s + measured.outside_s,
        bubble,
        memory,
        bounded,
        sent,
        static.weight_copies,
    )


def _simulate(pipeline: Pipeline, costs: Costs) -> Timeline:
    count = pipeline.num_microbatches
    schedule = pipeline.schedule(count)
    if pipeline.dynamic is None:
        return commands.evaluate(schedule, costs)
    return simulate_dynamic(schedule, lambda rank: pipeline.policy(count, rank), costs)


def _relative(costs: StageCosts, pp: int) -> Costs:
    """Return the costs in the form of `--pipeline-costs`, with a forward of 1."""
    whole = costs.costs(pp, pp)
    ratios = (time / whole.forward for time in (whole.input, whole.weight, whole.latency))
    input_gradient, weight, latency = (float(f"{ratio:.3g}") for ratio in ratios)
    return Costs(1.0, input_gradient, weight, latency=latency)


def _measured(run: Run, schedule: Schedule, notes: list[str]) -> _Measured:
    step_s, pipeline_s = _step_and_pipeline(run)
    fixed, activations = [], []
    for survey in run.surveys:
        mine = summary.figures([survey])
        kept = max((step.activation_bytes for step in survey.steps), default=0)
        if kept and mine.memory_bytes:
            fixed.append(max(0, mine.memory_bytes - kept * mine.peak_kept))
            activations.append(kept * schedule.num_stages / schedule.pp)
    if not fixed:
        notes.append("no rank tells what a forward keeps: memory is not predicted")
    layers = [survey.header.settings.get("num_layers") for survey in run.surveys]
    return _Measured(
        schedule,
        measured_costs(run, schedule),
        max(0.0, step_s - pipeline_s),
        max(fixed) if fixed else None,
        max(activations, default=0.0),
        layers[0] if isinstance(layers[0], int) else None,
        measured_traffic(run.surveys, schedule.placement),
        run.surveys[0].stash_ratio,
    )


def _step_and_pipeline(run: Run) -> tuple[float, float]:
    """Return the median seconds of a step, and of its pipelines from first to last action."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: Mapping[int, list[int]] = defaultdict(list)
    durations: Mapping[int, list[int]] = defaultdict(list)
    for survey in run.surveys:
        shift = run.alignment.of(survey.header)
        for step in survey.complete_steps:
            end = step.begin_ns + step.duration_ns - step.after_ns + shift
            begins[step.number].append(end - step.pipeline_ns)
            ends[step.number].append(end)
            durations[step.number].append(step.duration_ns)
    pipelines = [max(ends[number]) - min(begins[number]) for number in begins]
    steps = [max(found) for found in durations.values()]
    return statistics.median(steps) / 1e9, statistics.median(pipelines) / 1e9


def table(found: Forecast, limit: int = 20) -> str:
    """Return the predictions as text, with the flags to paste."""
    rows = [("schedule", "step ms", "bubble %", "sent MiB", "memory GiB")]
    shown = found.predictions[:limit]
    rows += [
        (p.label, f"{1e3 * p.step_s:.1f}", f"{100 * p.bubble_ratio:.1f}", _mib(p), _gib(p))
        for p in shown
    ]
    traced = f"traced: {found.measured}, step {1e3 * found.measured_s:.1f} ms"
    for own in found.predictions:
        if own.label == found.measured:
            traced += f", itself predicted as {1e3 * own.step_s:.1f} ms"
    if found.shared_cpus is not None:
        traced += f" for ranks with a CPU or a device each ({found.shared_cpus})"
    lines = [f"{traced}; predicted:", aligned(rows)]
    if len(found.predictions) > limit:
        lines.append(f"and {len(found.predictions) - limit} more (--json shows all)")
    if not all(p.bounds_memory for p in shown):
        lines.append("* not bounded: ranks may keep all micro-batches if others are late")
    lines.append(f"\nrecommended: {found.advice}")
    bounded = [p for p in found.predictions if p.bounds_memory]
    first = list(dict.fromkeys([*found.recommended, *bounded[:_WITH_FLAGS]]))
    width = max(len(p.label) for p in first)
    lines.append("\nflags (--json has those of all):")
    lines += [f"  {p.label.ljust(width)}  {p.flags}" for p in first]
    return "\n".join(lines)


def _dynamic_label(label: str, policy: object) -> str:
    return f"{label} dpp {policy}"


def _mib(prediction: Prediction) -> str:
    sent = prediction.sent_bytes
    return "-" if sent is None else f"{sent / 2**20:.4g}"


def _gib(prediction: Prediction) -> str:
    memory = prediction.memory_bytes
    mark = "" if prediction.bounds_memory else "*"
    return mark or "-" if memory is None else f"{memory / 2**30:.2f}{mark}"
