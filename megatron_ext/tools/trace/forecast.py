"""Predicts the step time of every schedule and policy from one run's traces.

The traces contain the durations of each stage's actions including runtime overhead, the message
latency, the part of a step outside the pipeline, each rank's memory, and the activations kept after
a forward pass. The prediction assumes that other schedules split the model evenly except for the
embedding and the loss, that both halves of an unsplit backward pass take the same time, and that
memory other than activations does not change.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.errors import DataError, ScheduleError
from megatron_ext.planning.measured import cut_anew
from megatron_ext.schedules.comparison import evaluate, training_flags
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.policies import POLICIES, PolicyName
from megatron_ext.schedules.table.costs import Costs
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.schedules.table.slices import attention_of
from megatron_ext.text_table import aligned
from megatron_ext.tools.trace import imbalance
from megatron_ext.tools.trace.measured_costs import measured_costs
from megatron_ext.tools.trace.survey import figures

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tools.trace.aggregate import Run
    from megatron_ext.tools.trace.survey import Step

_SEEDS = 5
"""Number of simulated steps with different jitter. The prediction is their mean."""
_LAUNCH_S = 1e-4
"""Time for a host to launch an action on its device, which traces do not contain. The value hardly
matters as long as the host launches actions ahead of time."""
_QUIET = 0.01
"""Jitter up to this value is ignored."""
_EQUAL = 0.005
"""Steps that differ by at most this fraction count as equally fast."""
_MAX_ROWS = 20
"""Number of predictions that `plan` prints."""
_WITH_FLAGS = 3
"""How many of them, besides the recommended ones, `plan` prints with their flags."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one schedule. Field names are keys in the JSON output."""

    schedule: str
    flags: str
    step_s: float
    bubble_ratio: float
    memory_bytes: int | None
    """Memory on the rank that needs the most, or None if not known."""
    bounds_memory: bool = True
    """True if ranks keep no more activations than in the table. If not, they may keep all
    micro-batches, depending on which ranks are late."""
    is_known_to_fit: bool = True
    """False if the schedule has more stages than the run and the number of layers is not known."""
    weight_copies: int = 1
    """Number of ranks that hold the weights of one stage."""
    all_to_all_hidden: float | None = None
    """Share of the experts' all-to-all hidden by computation, or None if the trace has none."""
    choice: str = ""
    """The part of `flags` that selects the schedule and its order, without sizes and costs."""

    @property
    def schedule_name(self) -> str:
        """The schedule's name, without options and order."""
        return self.schedule.partition(" ")[0]


@dataclass(frozen=True)
class Forecast:
    """Predictions for every schedule, fastest first."""

    predictions: list[Prediction]
    measured_s: float
    """Median duration of the traced steps."""
    measured: str
    """The traced schedule, named as in the predictions."""
    notes: list[str]
    shared_cpus: str | None = None
    """A phrase that describes how ranks shared CPUs in the traced run, or None if they did not."""

    @property
    def of_traced_schedule(self) -> Prediction | None:
        """The prediction for the traced schedule itself."""
        for prediction in self.predictions:
            if prediction.schedule == self.measured:
                return prediction
        return None

    @property
    def candidates(self) -> list[Prediction]:
        """The predictions that can be recommended."""
        # An order without a memory bound may keep all micro-batches at once, so never recommend it.
        return [
            prediction
            for prediction in self.predictions
            if prediction.bounds_memory and prediction.is_known_to_fit
        ]

    @property
    def best_of_schedules(self) -> list[Prediction]:
        """The fastest candidate for each schedule, across all options and orders."""
        best: dict[str, Prediction] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.schedule_name, candidate)
        return list(best.values())

    @property
    def recommended(self) -> list[Prediction]:
        """The candidate that needs the least memory among the fastest ones.

        If it holds two copies of the weights, the best candidate with one copy comes next.
        """
        choices: list[Prediction] = []
        candidates = self.candidates
        while candidates:
            # Among candidates as fast as the first, choose by memory.
            bound_s = (1 + _EQUAL) * candidates[0].step_s
            fast = [
                candidate for candidate in candidates if candidate.step_s <= bound_s
            ]
            smallest = min(
                fast,
                key=lambda candidate: (
                    candidate.memory_bytes or 0,
                    candidate.weight_copies,
                    candidate.step_s,
                ),
            )
            choices.append(smallest)
            if smallest.weight_copies <= 1:
                break
            with_fewer_copies = []
            for candidate in candidates:
                if candidate.weight_copies < smallest.weight_copies:
                    with_fewer_copies.append(candidate)
            candidates = with_fewer_copies
        return choices

    @property
    def advice(self) -> str:
        """A sentence with the recommended flags and the expected gain."""
        of_traced = self.of_traced_schedule
        # Compare with the prediction for the traced schedule, because anything that
        # slowed down the traced run would slow down other schedules, too.
        traced_s = self.measured_s
        if of_traced is not None:
            traced_s = of_traced.step_s
        choices = []
        for best in self.recommended:
            is_no_faster = traced_s <= (1 + _EQUAL) * best.step_s
            if of_traced is not None and is_no_faster:
                choices.append(
                    f"{self.measured} as traced, because no other is predicted to be faster"
                )
                continue
            step_ms = 1e3 * best.step_s
            speedup = traced_s / best.step_s
            gain = f"{step_ms:.1f} ms per step, {speedup:.2f} x as fast"
            if best.memory_bytes is not None:
                gain += f", {best.memory_bytes / 2**30:.2f} GiB on a rank"
            choices.append(f"{best.choice} ({gain})")
        if not choices:
            return "no schedule with bounded memory fits."
        if len(choices) > 1:
            choices[0] += (
                f" if {self.recommended[0].weight_copies} copies of the weights fit"
            )
        return f"{', otherwise '.join(choices)}."


def predict(run: Run, memory_gib: float | None = None) -> Forecast:
    """Predict the step time of every schedule and policy from a run's traces.

    Args:
        run: The traces.
        memory_gib: Upper bound on the memory per rank, in GiB (2**30 bytes), or None for no bound.

    Raises:
        DataError: The trace lacks data that the prediction needs.
        ScheduleError: No schedule fits.
    """
    schedule = _required_schedule(run)
    notes = list(run.notes)
    traced_run = _TracedRun(run, schedule)
    if traced_run.fixed_bytes is None:
        notes.append(
            "memory is not predicted: no rank recorded the activations that a forward pass keeps"
        )
        if memory_gib is not None:
            raise DataError(
                f"{run.directory}: no rank recorded the activations that a forward pass keeps, "
                f"which --memory-gib needs; remove --memory-gib"
            )
    # Simulate every configuration, and collect the reasons why some are
    # impossible or too large.
    predictions: list[Prediction] = []
    reasons: dict[str, None] = {}  # an ordered set
    for pipeline in traced_run.pipelines():
        try:
            prediction = traced_run.predict(pipeline)
        except ScheduleError as error:
            reasons[str(error)] = None
            continue
        needed_bytes = prediction.memory_bytes or 0
        if memory_gib is None or needed_bytes <= memory_gib * 2**30:
            predictions.append(prediction)
        else:
            reasons[f"{prediction.schedule} needs {_gib(prediction)} GiB"] = None
    notes += [f"left out: {reason}" for reason in reasons]
    if not all(prediction.is_known_to_fit for prediction in predictions):
        notes.append(
            "the trace does not contain the number of layers: schedules with more than its "
            f"{schedule.num_stages} stages are predicted but not recommended"
        )
    if not predictions:
        raise ScheduleError(
            "no schedule can run with these sizes:\n" + "\n".join(notes)
        )
    notes += imbalance.sentences(run)
    # Sort by step time, then by memory if times are equal.
    predictions.sort(
        key=lambda prediction: (prediction.step_s, prediction.memory_bytes or 0)
    )
    policy = run.settings.get("dpp_policy")
    measured = schedule.label
    if policy is not None:
        measured += f" with {policy}"
    shared_cpus = next(iter(run.shared_cpus.values()), None)
    # Four ranks on two CPUs took 1,025 ms per step, while the forecast was 546 ms.
    if shared_cpus is not None:
        notes.append(
            f"{shared_cpus}: the forecast assumes a CPU or a device for each rank"
        )
    return Forecast(predictions, traced_run.step_s, measured, notes, shared_cpus)


def _required_schedule(run: Run) -> Schedule:
    """Return a run's table.

    Raises:
        DataError: The run has no table, or no step with as many micro-batches as the table.
    """
    schedule = run.schedule
    if schedule is None:
        raise DataError(
            f"{run.directory} has no schedule.json, which identifies the actions; trace a run with "
            "pipeline parallelism"
        )
    steps: list[Step] = []
    for rank in run.surveys:
        steps += rank.steps
    if not any(step.is_full for step in steps):
        raise DataError(
            f"{run.directory}: no traced step had the table's {schedule.num_microbatches} "
            "micro-batches; trace steps after the batch has reached its full size"
        )
    return schedule


class _TracedRun:
    """Properties of a model and its machines as traced, used to simulate other pipelines."""

    def __init__(self, run: Run, schedule: Schedule) -> None:
        self.schedule = schedule
        self.costs = measured_costs(run, schedule)
        # Without jitter, one simulated step is enough. With jitter,
        # take the mean of several.
        if self.costs.jitter <= _QUIET:
            self.costs = replace(self.costs, jitter=0.0)
        times = _median_times(run)
        self.step_s = times.step_s
        # The two medians may come from different steps, so their
        # difference may be negative.
        self.outside_s = max(0.0, times.step_s - times.pipeline_s)
        """The part of a step outside the pipeline."""
        # Measured on the emulated device: 0.12 s per step with two copies (bitpipe), 0.06 s with
        # one (zb-h1).
        self.optimizer_s = times.optimizer_s
        """The part of `outside_s` that grows with the number of weight copies."""
        if run.settings.get("use_distributed_optimizer"):
            self.optimizer_s = 0.0  # the copies share the optimizer
        self.fixed_bytes, self.activation_bytes = _memory_of_ranks(run, schedule)
        """Memory other than activations, with one copy of the weights (None if not known), and the
        activations of one micro-batch on 1/pp of the model."""
        self.num_layers = run.settings.get("num_layers")
        self.extra_activations = run.settings.get("dpp_extra_activations")
        """None for the default, which needs no flag."""
        if self.extra_activations == DynamicOrder().margin:
            self.extra_activations = None
        self.stash_ratio = run.surveys[0].stash_ratio
        # Ranks with devices choose the next action while the previous one is still
        # running, which results in a different order. Simulated in that order, a
        # bitpipe step with order=zb took 2.00 s instead of 1.88 s.
        runs_on_device = run.settings.get("device", "cpu") != "cpu"
        self.launch_s = _LAUNCH_S if runs_on_device else 0.0

    def pipelines(self) -> Iterator[Pipeline]:
        """Yield every configuration that fits the run's ranks and micro-batches."""
        modes = [_Mode(pairs=False, slices=1)]
        if self.costs.all_to_all:
            modes.append(_Mode(pairs=True, slices=1))
        if self.schedule.num_slices > 1:
            # Slices cannot run in pairs.
            modes.append(_Mode(pairs=False, slices=self.schedule.num_slices))
        # Only the default policy uses the table's order. For other policies, the result
        # depends only on the placement, so simulate each placement once.
        placements: set[tuple[object, ...]] = set()
        for generator, mode in product(registered().values(), modes):
            for variant in generator.variants:
                config = self._configuration(generator.name, variant, mode)
                num_microbatches = self.schedule.total_microbatches // generator.twins
                yield Pipeline(config, self.schedule.pp, num_microbatches)
                num_chunks = variant.get("chunks", generator.num_chunks)
                for policy in POLICIES:
                    placement = policy, num_chunks, generator.twins, mode
                    if policy != DynamicOrder.policy:
                        if placement in placements:
                            continue
                        placements.add(placement)
                    dynamic = replace(config, dynamic=self._order(policy))
                    yield Pipeline(dynamic, self.schedule.pp, num_microbatches)

    def _configuration(
        self, name: str, variant: Mapping[str, Any], mode: _Mode
    ) -> PipelineConfig:
        """Return the configuration for a schedule with these options."""
        options = dict(variant)
        chunks = options.pop("chunks", None)
        costs = None
        if mode.slices > 1:
            # Slices of equal cost depend on attention's share.
            costs = Costs(attention=attention_of(self.schedule.slices))
        # A variant's options may have any type.
        if chunks is not None:
            chunks = int(chunks)
        return PipelineConfig(
            pairs=mode.pairs,
            schedule=name,
            chunks=chunks,
            options=options,
            slices=mode.slices,
            stash_ratio=self.stash_ratio,
            costs=costs,
        )

    def _order(self, policy: PolicyName) -> DynamicOrder:
        """Return the dynamic order for a policy. Only the default policy has a margin."""
        extra_activations = None
        if policy == DynamicOrder.policy:
            extra_activations = self.extra_activations
        return DynamicOrder(policy=policy, extra_activations=extra_activations)

    def predict(self, pipeline: Pipeline) -> Prediction:
        """Simulate a pipeline with the costs from the trace, with several draws of jitter.

        Raises:
            ScheduleError: The schedule is impossible with these sizes.
        """
        num_stages = pipeline.placement.num_stages
        self._check_sizes(pipeline, num_stages)
        attention = pipeline.costs.attention
        # Assume that all stages have the same number of layers.
        stages = cut_anew(self.costs.stages, [1] * num_stages)
        costs = replace(self.costs, stages=stages, attention=attention)
        num_draws = _SEEDS if costs.jitter else 1
        draws = [replace(costs, seed=seed) for seed in range(num_draws)]
        pipelines = [pipeline]
        if registered()[pipeline.name].needs_costs:
            # Some schedules optimise their order for given costs, which does not always
            # beat the default order, so simulate both.
            made_for = replace(costs.in_forwards(), attention=attention)
            config = replace(pipeline.config, costs=made_for)
            pipelines.append(replace(pipeline, config=config))
        predictions = [self._simulated(variant, draws) for variant in pipelines]
        return min(predictions, key=lambda prediction: prediction.step_s)

    def _check_sizes(self, pipeline: Pipeline, num_stages: int) -> None:
        """Reject a pipeline that cannot divide the run's micro-batches or layers evenly.

        Raises:
            ScheduleError: The pipeline is impossible.
        """
        num_microbatches = self.schedule.total_microbatches
        if num_microbatches % pipeline.config.twins:
            raise ScheduleError(
                f"{pipeline.name} runs half of the micro-batches in each direction, but the traced "
                f"run has {num_microbatches}"
            )
        # The traced run may have an uneven cut, so only check stage
        # counts that differ from it.
        is_cut_anew = num_stages != self.schedule.num_stages
        if (
            is_cut_anew
            and isinstance(self.num_layers, int)
            and self.num_layers % num_stages
        ):
            raise ScheduleError(
                f"{pipeline.name} cuts the model into {num_stages} stages, which do not evenly "
                f"divide its {self.num_layers} layers"
            )

    def _simulated(self, pipeline: Pipeline, draws: Sequence[Costs]) -> Prediction:
        """Return the prediction for a pipeline, as means over one simulated step per draw."""
        dynamic = pipeline.dynamic
        static = pipeline.full if dynamic is None else pipeline.static().full
        label = static.label
        order_flags = ""
        if dynamic is None:
            steps = [evaluate(pipeline.full, costs) for costs in draws]
        else:
            # In dynamic order, each rank chooses its next action during the simulation.
            policies = partial(pipeline.policy, pipeline.num_microbatches)
            steps = []
            for costs in draws:
                launching = replace(costs, launch=self.launch_s)
                steps.append(simulate_dynamic(pipeline.full, policies, launching))
            label += f" with {dynamic.policy}"
            order_flags = f" --use-dpp --dpp-policy {dynamic.policy}"
            if dynamic.extra_activations is not None:
                order_flags += f" --dpp-extra-activations {dynamic.extra_activations}"
        # Every copy of the weights has its own gradients and optimizer state.
        copies = static.weight_copies / self.schedule.weight_copies
        outside_s = self.outside_s + (copies - 1) * self.optimizer_s
        memory_bytes = None
        if self.fixed_bytes is not None:
            peaks = []
            for step in steps:
                peaks_of_ranks = activation_peaks(step.schedule, self.stash_ratio)
                peaks.append(max(peaks_of_ranks))
            activation_bytes = max(peaks) * self.activation_bytes
            memory_bytes = round(self.fixed_bytes * copies + activation_bytes)
        hidden_share = None
        if self.costs.all_to_all:
            hidden_share = statistics.fmean(step.hidden for step in steps)
        has_known_stages = static.num_stages <= self.schedule.num_stages
        flags = training_flags(static, pipeline.costs)
        # Drop the first flag, which sets the number of ranks.
        _, _, flags_of_choice = training_flags(static).partition(" --")
        pipeline_s = statistics.fmean(step.makespan for step in steps)
        return Prediction(
            label,
            flags + order_flags,
            choice="--" + flags_of_choice + order_flags,
            step_s=pipeline_s + outside_s,
            bubble_ratio=statistics.fmean(step.bubble_ratio for step in steps),
            memory_bytes=memory_bytes,
            bounds_memory=dynamic is None or dynamic.policy == DynamicOrder.policy,
            is_known_to_fit=isinstance(self.num_layers, int) or has_known_stages,
            weight_copies=static.weight_copies,
            all_to_all_hidden=hidden_share,
        )


class _Mode(NamedTuple):
    """How a configuration runs its micro-batches."""

    pairs: bool
    """Whether forward passes are paired with backward passes."""
    slices: int
    """Number of slices per micro-batch."""


class _Times(NamedTuple):
    """Medians over a run's steps."""

    step_s: float
    pipeline_s: float
    optimizer_s: float


def _median_times(run: Run) -> _Times:
    """Return the median times of the step, the pipeline and the optimizer."""
    steps_ns: list[float] = []
    pipelines_ns: list[float] = []
    optimizers_ns: list[float] = []
    # The slowest rank determines the step time, so take the maximum over
    # ranks first, then the median.
    for steps in run.steps.values():
        steps_ns.append(max(step.duration_ns for step in steps))
        pipelines_ns.append(max(step.pipeline_ns - step.first_ns for step in steps))
        optimizers_ns.append(max(step.optimizer_ns for step in steps))
    return _Times(
        statistics.median(steps_ns) / 1e9,
        statistics.median(pipelines_ns) / 1e9,
        statistics.median(optimizers_ns) / 1e9,
    )


def _memory_of_ranks(run: Run, schedule: Schedule) -> tuple[float | None, float]:
    """Return the bytes without activations, and the activation bytes of one micro-batch.

    The activations are for 1/pp of the model. Each value comes from the rank where it is largest,
    because that rank limits what fits.
    """
    fixed_bytes: list[float] = []
    activation_bytes = [0.0]
    for survey in run.surveys:
        rank = figures([survey])
        if rank.activation_bytes and rank.memory_bytes:
            # `peak_live` is the peak that the rank actually reached, which may be
            # higher than in the table if the order is dynamic.
            fixed = rank.memory_bytes - rank.activation_bytes * rank.peak_live
            fixed_bytes.append(max(0, fixed))
            activation_bytes.append(
                rank.activation_bytes * schedule.num_stages / schedule.pp
            )
    return max(fixed_bytes, default=None), max(activation_bytes)


def table(forecast: Forecast) -> str:
    """Return the predictions as text, including flags to copy."""
    shown = forecast.predictions[:_MAX_ROWS]
    shows_hidden = any(prediction.all_to_all_hidden is not None for prediction in shown)
    # Only show the column for hidden communication if there is any.
    rows = [["schedule", "step ms", "bubble %", "memory GiB"]]
    if shows_hidden:
        rows[0].append("hidden %")
    for prediction in shown:
        step_ms = 1e3 * prediction.step_s
        bubble_percent = 100 * prediction.bubble_ratio
        row = [
            prediction.schedule,
            f"{step_ms:.1f}",
            f"{bubble_percent:.1f}",
            _gib(prediction),
        ]
        if prediction.all_to_all_hidden is not None:
            row.append(f"{100 * prediction.all_to_all_hidden:.0f}")
        rows.append(row)
    traced = f"traced: {forecast.measured}, step {1e3 * forecast.measured_s:.1f} ms"
    if forecast.of_traced_schedule is not None:
        traced += f", predicted as {1e3 * forecast.of_traced_schedule.step_s:.1f} ms"
    if forecast.shared_cpus is not None:
        traced += f" for ranks with a CPU or a device each ({forecast.shared_cpus})"
    lines = [f"{traced}; predicted:", aligned(rows)]
    num_hidden = len(forecast.predictions) - len(shown)
    if num_hidden:
        lines.append(f"and {num_hidden} more (--json shows all)")
    if not all(prediction.bounds_memory for prediction in shown):
        lines.append(
            "* unbounded: ranks may keep all micro-batches if other ranks are late"
        )
    lines.append(f"\nrecommended: {forecast.advice}")
    # Recommended predictions come first. Each prediction appears only once.
    fastest = forecast.candidates[:_WITH_FLAGS]
    with_flags = dict.fromkeys([*forecast.recommended, *fastest])
    width = max((len(prediction.schedule) for prediction in with_flags), default=0)
    lines.append("\nflags (--json shows all):")
    for prediction in with_flags:
        lines.append(f"  {prediction.schedule.ljust(width)}  {prediction.flags}")
    return "\n".join(lines)


def _gib(prediction: Prediction) -> str:
    """Return the memory as a table cell. A star marks orders without a memory bound."""
    mark = "" if prediction.bounds_memory else "*"
    if prediction.memory_bytes is None:
        return mark or "-"
    return f"{prediction.memory_bytes / 2**30:.2f}{mark}"
