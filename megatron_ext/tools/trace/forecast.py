"""Predicts the step time of every schedule and policy from a trace under one of them.

The trace gives the durations of each stage's actions, with the runtime's overhead, the latency of
messages, the part of a step outside its pipeline, the memory of the ranks, and the activations that
a forward keeps. The prediction assumes that the model splits evenly into other
stages except for embedding and loss, that the halves of an unsplit backward take equally long, and
that memory other than activations stays the same.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.schedules.comparison import evaluate, training_flags
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.policies import POLICIES
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.schedules.table.slices import attention_of
from megatron_ext.tools.text_table import aligned
from megatron_ext.tools.trace.survey import figures

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tools.trace.aggregate import Run

_SEEDS = 5
"""Number of simulated steps with different jitter; their mean is the prediction."""
_LAUNCH_S = 1e-4
"""Of a host for an action of its device, which traces do not have: what counts is that it launches
ahead."""
_QUIET = 0.01
"""Jitter below this is negligible."""
_EQUAL = 0.005
"""Steps that differ by less than this part count as equally fast."""
_MAX_ROWS, _WITH_FLAGS = 20, 3
"""Predictions that `plan` prints, and those with their flags, beside the recommended one."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one schedule; the names are the keys of `plan --trace-dir --json`."""

    schedule: str
    flags: str
    step_s: float
    bubble_ratio: float
    memory_bytes: int | None
    """Memory of the rank that needs most; None: unknown from the trace."""
    bounds_memory: bool = True
    """True if ranks keep no more activations than the table; else up to all micro-batches, and
    how many depends on who is late."""
    is_known_to_fit: bool = True
    """False if it has more stages than the run, and the trace does not say of how many layers."""
    weight_copies: int = 1
    """Ranks that hold the weights of one stage."""
    all_to_all_hidden: float | None = None
    """Part of the experts' exchanges that runs behind computation; None: the trace has none."""
    choice: str = ""
    """Of `flags`, those that choose the schedule and its order, without sizes and costs."""

    @property
    def schedule_name(self) -> str:
        """The name of the schedule, without options and order."""
        return self.schedule.partition(" ")[0]


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
        return next((p for p in self.predictions if p.schedule == self.measured), None)

    @property
    def candidates(self) -> list[Prediction]:
        """The predictions that one may recommend."""
        # Orders without a bound may need all micro-batches at once: no advice to give.
        return [p for p in self.predictions if p.bounds_memory and p.is_known_to_fit]

    @property
    def best_of_schedules(self) -> list[Prediction]:
        """Of each schedule the fastest candidate, whichever its options and its order."""
        best: dict[str, Prediction] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.schedule_name, candidate)
        return list(best.values())

    @property
    def recommended(self) -> list[Prediction]:
        """Of the fastest candidates, the one that needs least memory.

        If that holds the weights twice, the same among those with one copy follows.
        """
        found: list[Prediction] = []
        left = self.candidates
        while left and (not found or found[-1].weight_copies > 1):
            fast = [p for p in left if p.step_s <= (1 + _EQUAL) * left[0].step_s]
            found.append(min(fast, key=lambda p: (p.memory_bytes or 0, p.weight_copies, p.step_s)))
            left = [p for p in left if p.weight_copies < found[-1].weight_copies]
        return found

    @property
    def advice(self) -> str:
        """One sentence on the flags to take and the gain to expect."""
        own = self.own
        # Against its own prediction: what slowed the traced run down would slow any other.
        before_s = self.measured_s if own is None else own.step_s
        choices = []
        for best in self.recommended:
            if own is not None and before_s <= (1 + _EQUAL) * best.step_s:
                choices.append(f"{self.measured} as traced, for none is predicted to be faster")
                continue
            gain = f"{1e3 * best.step_s:.1f} ms a step, {before_s / best.step_s:.2f} x as fast"
            if best.memory_bytes is not None:
                gain += f", {best.memory_bytes / 2**30:.2f} GiB on a rank"
            choices.append(f"{best.choice} ({gain})")
        if len(choices) > 1:
            choices[0] += f" where {self.recommended[0].weight_copies} copies of the weights fit"
        return f"{', else '.join(choices)}." if choices else "no schedule that bounds memory fits."


def cut(
    stages: Sequence[tuple[float, float, float]], count: int
) -> tuple[tuple[float, float, float], ...]:
    """Return what each stage takes if the same model is cut into equal stages.

    The time of each stage, seconds of forward, input and weight gradient, is spread evenly over its
    part of the model. What the ends take beyond the stages beside them, embedding and loss, stays
    in the ends.
    """
    found = []
    for times in zip(*stages, strict=True):
        first = last = 0.0
        if (old := len(times)) > 2:
            first, last = max(0.0, times[0] - times[1]), max(0.0, times[-1] - times[-2])
        layers = [times[0] - first, *times[1:-1], times[-1] - last] if old > 1 else [*times]
        # In parts that fill both an old stage and a new one.
        parts = [time / count for time in layers for _ in range(count)]
        spread = [sum(parts[stage * old : (stage + 1) * old]) for stage in range(count)]
        spread[0] += first
        spread[-1] += last
        found.append(spread)
    return tuple(zip(*found, strict=True))


def measured_costs(run: Run, schedule: Schedule) -> Costs:
    """Return the measured costs of a run's actions and messages, in seconds.

    Raises:
        DataError: The actions of some stage were not traced.
    """
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    exchanged: dict[int, list[float]] = defaultdict(list)
    sigmas = [0.0]
    for survey in run.surveys:
        for stage, sample in survey.exchanges.items():
            exchanged[stage].append(statistics.median(sample))
        for key, sample in survey.actions.items():
            times[key].append(statistics.median(sample))
            values = [value for value in sample if value > 0]
            if len(values) >= 8:
                # The quartiles of a normal distribution are 1.349 sigma apart; a step in which the
                # machine did something else moves them little.
                low, _, high = statistics.quantiles(values, n=4)
                sigmas.append(math.log(high / low) / 1.349)
    stages: list[tuple[float, float, float]] = []
    for stage in range(schedule.num_stages):
        forward, backward, input_gradient, weight = (
            sum(
                statistics.median(times.get((name, stage, part), [0.0])) / 1e9
                for part in range(schedule.num_slices)
            )
            for name in ("forward", "backward", "input_gradient", "weight_gradient")
        )
        if not (input_gradient and weight):
            # Matrix products of one size; the trace cannot tell them apart.
            input_gradient = weight = backward / 2
        if not (forward and weight):
            raise DataError(
                f"{run.directory}: the trace has no forward and backward of stage {stage}; plans "
                f"need the traces of all pipeline ranks, with more than one iteration"
            )
        stages.append((forward, input_gradient, weight))
    forward, input_gradient, weight = map(sum, zip(*stages, strict=True))
    delays = [link.delay_ns for link in run.links if link.delay_ns is not None]
    exchanged_s = sum(map(statistics.median, exchanged.values())) / 1e9
    return Costs(
        forward / schedule.pp,
        input_gradient / schedule.pp,
        weight / schedule.pp,
        latency=statistics.median(delays or [0]) / 1e9,
        stages=tuple(stages),
        jitter=statistics.median(sigmas[1:] or sigmas),
        all_to_all=min(0.999, exchanged_s / forward),
    )


def planned(run: Run, schedule: Schedule) -> Timeline:
    """Return the table of a run, simulated with measured costs; times in seconds."""
    attention = attention_of(schedule.slices)
    costs = replace(measured_costs(run, schedule), jitter=0.0, attention=attention)
    return evaluate(schedule, costs)


def predict(run: Run, memory_gib: float | None = None) -> Forecast:
    """Predict the step of every schedule and policy from the traces of a run.

    Args:
        run: The traces.
        memory_gib: Upper bound on the memory of a rank, in units of 2**30 bytes; None: no bound.

    Raises:
        DataError: The trace lacks data that a prediction needs.
        ScheduleError: No schedule fits.
    """
    directory, schedule = run.directory, run.schedule
    if schedule is None:
        raise DataError(
            f"{directory} has no schedule.json, which identifies the actions; trace a run "
            f"with pipeline parallelism"
        )
    if not any(step.is_full for survey in run.surveys for step in survey.steps):
        raise DataError(
            f"{directory}: no traced step had the {schedule.num_microbatches} micro-batches of the "
            f"table; trace steps in which the batch has grown to its full size"
        )
    notes, measured = list(run.notes), _Measured(run, schedule)
    if measured.fixed_bytes is None:
        notes.append("no rank recorded what a forward keeps: memory is not predicted")
        if memory_gib is not None:
            raise DataError(
                f"{directory}: no rank recorded what a forward keeps, which --memory-gib needs; "
                f"leave --memory-gib out"
            )
    found, left_out = [], []
    for pipeline in measured.pipelines():
        try:
            prediction = measured.predict(pipeline)
        except ScheduleError as error:
            left_out.append(str(error))
            continue
        if memory_gib is None or (prediction.memory_bytes or 0) <= memory_gib * 2**30:
            found.append(prediction)
        else:
            left_out.append(f"{prediction.schedule} needs {_gib(prediction)} GiB")
    notes += [f"left out: {reason}" for reason in dict.fromkeys(left_out)]
    if not all(prediction.is_known_to_fit for prediction in found):
        notes.append(
            "the trace does not say how many layers the model has: schedules with more than its "
            f"{schedule.num_stages} stages are predicted, and not recommended"
        )
    if not found:
        raise ScheduleError("no schedule can run with these sizes:\n" + "\n".join(notes))
    # The fastest first; of equal ones, what needs less memory.
    found.sort(key=lambda p: (p.step_s, p.memory_bytes or 0))
    policy = run.settings.get("dpp_policy")
    traced = schedule.label + ("" if policy is None else f" dpp {policy}")
    shared = next(iter(run.shared_cpus.values()), None)
    if shared is not None:
        notes.append(f"{shared}: the forecast holds for ranks with a CPU or a device each")
    return Forecast(found, measured.step_s, traced, notes, shared)


class _Measured:
    """Properties of the model and the machines, as traced, and the steps that follow from them."""

    def __init__(self, run: Run, schedule: Schedule) -> None:
        self.schedule, self.costs = schedule, measured_costs(run, schedule)
        if self.costs.jitter <= _QUIET:
            self.costs = replace(self.costs, jitter=0.0)
        # A step is as long as that of its slowest rank, and its pipeline as that of any replica.
        longest, pipelines, optimizers = [], [], []
        for steps in run.steps.values():
            pipelines.append(max(step.pipeline_ns - step.first_ns for step in steps))
            longest.append(max(step.duration_ns for step in steps))
            optimizers.append(max(step.optimizer_ns for step in steps))
        self.step_s = statistics.median(longest) / 1e9
        self.outside_s = max(0.0, self.step_s - statistics.median(pipelines) / 1e9)
        # What of it grows with the copies of the weights.
        shares = run.settings.get("use_distributed_optimizer")
        self.optimizer_s = 0.0 if shares else statistics.median(optimizers) / 1e9
        # Memory besides activations, with the weights once, and activations of one micro-batch on
        # 1/pp of the model: the worst ranks bound what fits.
        fixed, activations = [], [0.0]
        for mine in (figures([survey]) for survey in run.surveys):
            if (kept := mine.activation_bytes) and mine.memory_bytes:
                fixed.append(max(0, mine.memory_bytes - kept * mine.peak_live))
                activations.append(kept * schedule.num_stages / schedule.pp)
        self.fixed_bytes = max(fixed, default=None)
        self.activation_bytes = max(activations)
        self.num_layers = run.settings.get("num_layers")
        # None for the default, which flags need not name.
        margin = run.settings.get("dpp_extra_activations")
        self.extra_activations = None if margin == DynamicOrder().margin else margin
        self.stash_ratio = run.surveys[0].stash_ratio
        # Ranks of devices choose while an action runs, which is another order than afterwards.
        self.launch_s = _LAUNCH_S if run.settings.get("device", "cpu") != "cpu" else 0.0

    def pipelines(self) -> Iterator[Pipeline]:
        """Yield every configuration that fits the ranks and micro-batches of the run."""
        traced = self.schedule
        seen: set[tuple[object, ...]] = set()
        cuts = [(False, 1)]
        if self.costs.all_to_all:
            cuts.append((True, 1))
        if traced.num_slices > 1:
            cuts.append((False, traced.num_slices))  # slices run in no pairs
        for generator, (paired, slices) in product(registered().values(), cuts):
            count = traced.total_microbatches // generator.twins
            for variant in generator.variants:
                options = dict(variant)
                chunks = options.pop("chunks", None)
                config = PipelineConfig(
                    pairs=paired,
                    schedule=generator.name,
                    chunks=None if chunks is None else int(chunks),
                    options=options,
                    slices=slices,
                    stash_ratio=self.stash_ratio,
                    costs=Costs(attention=attention_of(traced.slices)) if slices > 1 else None,
                )
                yield Pipeline(config, traced.pp, count)
                for policy in POLICIES:
                    # All policies but hint ignore the order of the table.
                    number = generator.num_chunks if chunks is None else chunks
                    where = policy, number, generator.twins, paired, slices
                    if policy == DynamicOrder.policy or where not in seen:
                        seen.add(where)
                        extra = self.extra_activations if policy == DynamicOrder.policy else None
                        order = DynamicOrder(policy=policy, extra_activations=extra)
                        yield Pipeline(replace(config, dynamic=order), traced.pp, count)

    def predict(self, pipeline: Pipeline) -> Prediction:
        """Simulate a pipeline with the costs of the trace, with several draws of jitter.

        Raises:
            ScheduleError: The schedule is impossible for these sizes.
        """
        traced, stages = self.schedule, pipeline.placement.num_stages
        if traced.total_microbatches % pipeline.config.twins:
            raise ScheduleError(
                f"{pipeline.name} runs half of the micro-batches in each direction, and the traced "
                f"run has {traced.total_microbatches}"
            )
        layers = self.num_layers
        if isinstance(layers, int) and stages != traced.num_stages and layers % stages:
            raise ScheduleError(
                f"{pipeline.name} cuts the model into {stages} stages, which its {layers} layers "
                f"do not fill evenly"
            )
        attention = pipeline.costs.attention
        costs = replace(self.costs, stages=cut(self.costs.stages, stages), attention=attention)
        draws = [replace(costs, seed=seed) for seed in range(_SEEDS if costs.jitter else 1)]
        pipelines = [pipeline]
        if registered()[pipeline.name].needs_costs:
            # An order made for costs, here in the form of --pipeline-costs, need not be the best.
            shares = (time / costs.forward for time in (costs.input, costs.weight, costs.latency))
            given = Costs.parse(",".join(["1", *(f"{share:.3g}" for share in shares)]))
            config = replace(pipeline.config, costs=replace(given, attention=attention))
            pipelines.append(replace(pipeline, config=config))
        found = [self._simulated(each, draws) for each in pipelines]
        return min(found, key=lambda prediction: prediction.step_s)

    def _simulated(self, pipeline: Pipeline, draws: Sequence[Costs]) -> Prediction:
        count, dynamic = pipeline.num_microbatches, pipeline.dynamic
        static = pipeline.full if dynamic is None else pipeline.static().full
        label, flags = static.label, training_flags(static, pipeline.costs)
        # Behind the flag of the number of ranks.
        choice = "--" + training_flags(static).partition(" --")[2]
        order_flags = ""
        if dynamic is None:
            steps = [evaluate(pipeline.full, drawn) for drawn in draws]
        else:
            policies = partial(pipeline.policy, count)
            steps = [
                simulate_dynamic(pipeline.full, policies, replace(drawn, launch=self.launch_s))
                for drawn in draws
            ]
            label += f" dpp {dynamic.policy}"
            order_flags = f" --use-dpp --dpp-policy {dynamic.policy}"
            if dynamic.extra_activations is not None:
                order_flags += f" --dpp-extra-activations {dynamic.extra_activations}"
        # Gradients and optimizer state come with each copy of the weights.
        weights = static.weight_copies / self.schedule.weight_copies
        outside_s = self.outside_s + (weights - 1) * self.optimizer_s
        memory = None
        if self.fixed_bytes is not None:
            peak = max(max(activation_peaks(step.schedule, self.stash_ratio)) for step in steps)
            memory = round(self.fixed_bytes * weights + peak * self.activation_bytes)
        hidden = [step.hidden for step in steps] if self.costs.all_to_all else []
        return Prediction(
            label,
            flags + order_flags,
            choice=choice + order_flags,
            step_s=statistics.fmean(step.makespan for step in steps) + outside_s,
            bubble_ratio=statistics.fmean(step.bubble_ratio for step in steps),
            memory_bytes=memory,
            bounds_memory=dynamic is None or dynamic.policy == DynamicOrder.policy,
            is_known_to_fit=(
                isinstance(self.num_layers, int) or static.num_stages <= self.schedule.num_stages
            ),
            weight_copies=static.weight_copies,
            all_to_all_hidden=statistics.fmean(hidden) if hidden else None,
        )


def table(found: Forecast) -> str:
    """Return the predictions as text, with the flags to paste."""
    shown = found.predictions[:_MAX_ROWS]
    hides = any(p.all_to_all_hidden is not None for p in shown)
    rows = [("schedule", "step ms", "bubble %", "memory GiB", *["hidden %"] * hides)]
    for p in shown:
        times = f"{1e3 * p.step_s:.1f}", f"{100 * p.bubble_ratio:.1f}"
        share = p.all_to_all_hidden
        hidden = [] if share is None else [f"{100 * share:.0f}"]
        rows.append((p.schedule, *times, _gib(p), *hidden))
    traced = f"traced: {found.measured}, step {1e3 * found.measured_s:.1f} ms"
    if found.own is not None:
        traced += f", itself predicted as {1e3 * found.own.step_s:.1f} ms"
    if found.shared_cpus is not None:
        traced += f" for ranks with a CPU or a device each ({found.shared_cpus})"
    lines = [f"{traced}; predicted:", aligned(rows)]
    if more := len(found.predictions) - len(shown):
        lines.append(f"and {more} more (--json shows all)")
    if not all(p.bounds_memory for p in shown):
        lines.append("* not bounded: ranks may keep all micro-batches if others are late")
    lines.append(f"\nrecommended: {found.advice}")
    first = list(dict.fromkeys([*found.recommended, *found.candidates[:_WITH_FLAGS]]))
    width = max(len(p.schedule) for p in first)
    lines.append("\nflags (--json has those of all):")
    lines += [f"  {p.schedule.ljust(width)}  {p.flags}" for p in first]
    return "\n".join(lines)


def _gib(prediction: Prediction) -> str:
    memory = prediction.memory_bytes
    mark = "" if prediction.bounds_memory else "*"
    return mark or "-" if memory is None else f"{memory / 2**30:.2f}{mark}"
