"""Ranks candidate schedules for a training run; `--pipeline-schedule auto` picks the best.

The planner forecasts every schedule for the model, its sizes and the device. If any of these is
unknown, only the schedule's table is simulated, with equal costs or with costs from a trace.
Nothing is measured or stored here, so the same training run always gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.planning.layout_forecast import costs_of, forecast
from megatron_ext.planning.waiting import most_waiting
from megatron_ext.rules import read_rules
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.generators.catalog import generate, get, registered
from megatron_ext.schedules.table.costs import SHORTEST, UNIT, Costs
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.schedules.table.table_change import in_use
from megatron_ext.schedules.table.transforms import weights_at_once

if TYPE_CHECKING:
    from megatron_ext.planning.layout_forecast import Layout
    from megatron_ext.planning.measured import MeasuredCosts
    from megatron_ext.planning.question import ParallelSizes, Question
    from megatron_ext.planning.waiting import WaitingWeights
    from megatron_ext.schedules.generators.catalog import Generator
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement

REFERENCE = "1f1b"
"""The schedule whose memory is taken as the limit if the device memory is unknown."""
_EQUAL = 0.005
"""Steps that differ by less than this fraction count as equally fast, and the schedule that needs
less memory wins."""
_MAX_CHUNKS = 8
_WASTEFUL = ("gpipe",)
"""Schedules that keep every micro-batch's activations for no benefit."""
_THRIFTY = {"v-half": "zb-v"}
"""Schedule -> a schedule with the same stages that uses more memory but has shorter steps.
Searching tables for the former takes longer than all other searches combined, so it is tried only
if the latter does not fit."""

NOT_FORECAST = read_rules("""
    --recompute-method block, or --recompute-num-layers above 1: recompute_granularity=full &
    recompute_method=block | recompute_num_layers>1
        the planner would recompute each layer by itself
    use_megatron_fsdp | use_custom_fsdp | use_torch_fsdp2
        the planner would not shard the weights
    cpu_offloading | fine_grained_activation_offloading | optimizer_cpu_offload
        the planner would keep all on the device
    the types of --use-precision-aware-optimizer: use_precision_aware_optimizer &
    main_grads_dtype!=fp32 | main_params_dtype!=fp32 | exp_avg_dtype!=fp32 | exp_avg_sq_dtype!=fp32
        the planner would count fp32
""")
"""Megatron settings that the forecast does not model."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings that all candidates share."""

    ranks: int
    """Number of ranks in a pipeline, or in both pipelines if a schedule mirrors two."""
    num_microbatches: int
    """Number of micro-batches that these ranks run per step."""
    cut: Callable[[str, Placement], Sequence[int] | None]
    """Takes a schedule and its placement and returns the number of layers that Megatron will build
    in each stage, or None if the model's number of layers is unknown."""
    chunks: int | None = None
    """Number of stages per rank, for schedules that do not fix it. None: the best number."""
    num_layers: int | None = None
    costs: Costs | None = None
    """The user's costs, which are used to generate tables. None: the forecast costs."""
    feature_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of features that change tables (`feature_list.TABLES`)."""
    stash_ratio: float = 1.0
    """As in `PipelineConfig`."""
    weights_at_once: bool = False
    """As in `PipelineConfig`."""

    def table(self, schedule: str, chunks: int | None, costs: Costs) -> Schedule:
        """Return a schedule's table.

        Raises:
            ScheduleError: There is no table of this schedule for these sizes.
        """
        table = generate(
            schedule,
            self.ranks,
            self.num_microbatches,
            chunks,
            costs,
            **in_use(**self.feature_options),
        )
        if self.weights_at_once:
            table = weights_at_once(table)
        return table

    def made_for(self, schedule: str, costs: Costs) -> Sequence[Costs | None]:
        """Return the costs to generate tables for. None means the user's costs, or equal costs.

        Searching with the given costs does not always find a better table than searching with equal
        costs.
        """
        if self.costs is not None:
            return (None,)
        if not get(schedule).searches(self.ranks, self.num_microbatches):
            return (None,)
        if schedule in _THRIFTY:
            # Search only once, because this search takes a long time.
            return (costs.in_forwards(),)
        return (None, costs.in_forwards())

    def activations(self, table: Schedule) -> float:
        """Return the worst rank's peak activations, in Ma (`schedules/table/memory.py`)."""
        return max(activation_peaks(table, self.stash_ratio))

    def layers_by_stage(
        self, schedule: str, chunks: int | None
    ) -> Sequence[int] | None:
        """Return the number of layers that each of a schedule's stages gets.

        Return None if the model's number of layers is unknown.

        Raises:
            ArgumentsError: The user's flags for the cut contradict each other.
            ScheduleError: The model cannot be cut into these stages.
        """
        # The placement does not depend on the number of micro-batches, and searching a
        # table for many micro-batches would take a long time.
        num_microbatches = get(schedule).twins
        smallest = generate(schedule, self.ranks, num_microbatches, chunks)
        return self.cut(schedule, smallest.placement)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that the training run could use, with its expected time and memory."""

    schedule: str
    chunks: int | None
    """Number of stages per rank. None: the schedule determines it."""
    costs: Costs | None
    """Costs that the table is generated for. None: the configured costs."""
    step: float
    """Step time, in seconds if forecast, otherwise in the unit of the costs."""
    memory: float
    """Memory on the worst rank, in GiB if forecast, otherwise in activations."""
    weight_copies: int
    """Number of ranks that hold a stage's weights."""
    words: str
    """Time and memory, as text."""
    fits: bool = True

    @property
    def flags(self) -> str:
        """The flags that select this candidate."""
        by_name = f"--pipeline-schedule {self.schedule}"
        template = get(self.schedule).flags or by_name
        flags = template.format(chunks=self.chunks)
        if self.costs is not None:
            flags += f" --pipeline-costs {self.costs}"
        return flags

    def reason(self, best: Candidate) -> str:
        """Return why this candidate ranks where it does, relative to the best one."""
        if not self.fits:
            return "which needs too much memory"
        if self == best:
            return "the fastest that fits"
        slower = self.step / best.step - 1
        if abs(slower) < _EQUAL:
            return "just as fast, but needs no less memory"
        return f"{100 * slower:.1f} % slower"


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The candidates, best first, and the basis of the comparison."""

    candidates: Sequence[Candidate]
    basis: str
    """The basis of the comparison, as text."""
    left_out: Sequence[str] = ()
    """The reasons why other schedules are not candidates, one line each."""

    def sentence(self, accepted: Sequence[Candidate], refused: Sequence[str]) -> str:
        """Return a log line with the two best candidates and the schedules that flags exclude."""
        best, *runners_up = accepted
        line = f"--pipeline-schedule auto chooses {best.flags}: {best.words}"
        if not best.fits:
            line += ", which does not fit, and all other schedules need more"
        if runners_up:
            second = runners_up[0]
            line += f"; next is {second.flags}: {second.words}, {second.reason(best)}"
        line = f"{line}; compared {self.basis}"
        if refused:
            distinct = dict.fromkeys(refused)
            line += f"; these flags exclude {', '.join(distinct)}"
        return line


class Judge(Protocol):
    """Compares candidates by some criterion."""

    def candidate(self, schedule: str, chunks: int | None) -> Candidate:
        """Return a candidate.

        Raises:
            ScheduleError: The schedule is impossible.
        """

    def limit(self, reference: Candidate | None) -> float:
        """Return the candidates' memory limit. `reference` is the candidate for `REFERENCE`."""

    def basis(self) -> str:
        """Return the basis of the comparison."""


def rank(training: Training, judge: Judge) -> Ranking:
    """Return the candidates for a training run, best first.

    Candidates that fit come first, sorted by step time, or by memory if they are equally fast. If
    no candidate fits, the one that needs the least memory comes first.
    """
    left_out: list[str] = []
    # Try the reference first, because its activations may set the limit for all other
    # candidates.
    reference = _tried(judge, REFERENCE, None, left_out)
    limit = judge.limit(reference)
    candidates = [] if reference is None else [reference]
    thrifty: list[str] = []
    for name, generator in registered().items():
        if name == REFERENCE or name in _WASTEFUL:
            continue
        if name in _THRIFTY:
            thrifty.append(name)
            continue
        for chunks in _chunk_counts(training, generator):
            tried = _tried(judge, name, chunks, left_out)
            if tried is not None:
                candidates.append(tried)
    fitting = set()
    for candidate in candidates:
        if candidate.memory <= limit:
            fitting.add(candidate.schedule)
    for name in thrifty:
        # A thrifty schedule is worth its long search only if its counterpart does not
        # fit.
        if _THRIFTY[name] not in fitting:
            thrifty_candidate = _tried(judge, name, None, left_out)
            if thrifty_candidate is not None:
                candidates.append(thrifty_candidate)
    judged = []
    for candidate in candidates:
        fits = candidate.memory <= limit
        judged.append(replace(candidate, fits=fits))
    return Ranking(
        candidates=_ordered(judged),
        basis=judge.basis(),
        left_out=left_out,
    )


def _tried(
    judge: Judge,
    schedule: str,
    chunks: int | None,
    left_out: list[str],
) -> Candidate | None:
    """Return a candidate. If it is impossible, add the reason to `left_out` and return None."""
    try:
        return judge.candidate(schedule, chunks)
    except (ArgumentsError, ScheduleError) as error:
        reason = str(error)
    # All of a schedule's chunk counts may be rejected for the same reason.
    if reason not in left_out:
        left_out.append(reason)
    return None


def _chunk_counts(training: Training, generator: Generator) -> Sequence[int | None]:
    """Return the chunk counts (stages per rank) to try."""
    if not generator.free_chunks:
        return (None,)
    if training.chunks is not None:
        return (training.chunks,)
    if training.num_layers is None:
        return (2, 4)
    # The embedding and the loss may be stages without layers.
    most_stages = training.num_layers + 2
    most_chunks = min(most_stages // training.ranks, _MAX_CHUNKS)
    return range(2, most_chunks + 1)


def _ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, best first."""
    # Repeatedly take the best of the candidates that are about as fast as the fastest
    # one left.
    fitting = [candidate for candidate in candidates if candidate.fits]
    waiting = sorted(fitting, key=lambda candidate: candidate.step)
    ordered: list[Candidate] = []
    while waiting:
        bound = (1 + _EQUAL) * waiting[0].step
        as_fast = [candidate for candidate in waiting if candidate.step <= bound]
        best = min(as_fast, key=_by_need)
        ordered.append(best)
        waiting.remove(best)
    too_large = [candidate for candidate in candidates if not candidate.fits]
    too_large.sort(key=lambda candidate: (candidate.memory, candidate.step))
    return ordered + too_large


def _by_need(candidate: Candidate) -> tuple[int, float, float]:
    """Return the key that sorts equally fast candidates by what they need."""
    return candidate.weight_copies, candidate.memory, candidate.step


def _weights_are_held_twice(schedule: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule} keeps two copies of every weight, and it is unknown whether both fit"
    )


def _activations_of(reference: Candidate | None) -> float:
    """Return the limit on activations if the device memory is unknown."""
    if reference is None:
        return math.inf
    # Rounding may make sums of thirds and sums of eighths differ in the last digit.
    return reference.memory * (1 + 1e-9)


# -- by the planner's forecast -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ByForecast:
    """Compares candidates by the planner's forecast of their time and memory."""

    training: Training
    job: Question
    sizes: ParallelSizes
    has_memory: bool
    """Whether the device memory is known."""

    def candidate(self, schedule: str, chunks: int | None) -> Candidate:
        """Return a candidate.

        Raises:
            ArgumentsError: Megatron cannot build the stages from the user's flags.
            ScheduleError: The schedule is impossible.
        """
        training = self.training
        generator = get(schedule)
        if generator.twins > 1 and not self.has_memory:
            raise _weights_are_held_twice(schedule)
        counts = training.layers_by_stage(schedule, chunks)
        if counts is None:
            raise ScheduleError(f"{schedule}: the number of layers is unknown")
        costs = costs_of(
            self.job,
            self.sizes,
            counts,
            generator.twins,
        )
        candidates = []
        for made_for in training.made_for(schedule, costs):
            candidate = self._candidate(schedule, chunks, counts, made_for)
            candidates.append(candidate)
        return _ordered(candidates)[0]

    def _candidate(
        self,
        schedule: str,
        chunks: int | None,
        counts: Sequence[int],
        made_for: Costs | None,
    ) -> Candidate:
        training = self.training
        table_costs = made_for or training.costs or UNIT
        plan = self._layout(schedule, chunks, counts, table_costs)
        memory_gib = max(plan.memory_gib)
        memory = memory_gib
        words = f"{plan.step_s:.3g} s per step, {memory_gib:.1f} GiB on the worst rank"
        if not self.has_memory:
            # If the device memory is unknown, candidates are compared by activations,
            # not GiB.
            table = training.table(schedule, chunks, table_costs)
            memory = training.activations(table)
            words += f" with {memory:g} activations"
        return Candidate(
            schedule=schedule,
            chunks=chunks,
            costs=made_for,
            step=plan.step_s,
            memory=memory,
            weight_copies=get(schedule).twins,
            words=words,
        )

    def _layout(
        self,
        schedule: str,
        chunks: int | None,
        counts: Sequence[int],
        costs: Costs,
    ) -> Layout:
        # Forecast with unlimited memory, because candidates that do not fit are ranked
        # as well.
        device = replace(self.job.device, memory_gib=math.inf)
        roomy = replace(self.job, device=device)
        num_chunks = chunks or get(schedule).num_chunks
        at_once = self.training.weights_at_once
        plan = forecast(
            roomy,
            self.sizes,
            schedule,
            num_chunks,
            counts,
            costs=costs,
            at_once=at_once,
        )
        if plan is None:
            # `forecast` gives no reason. Generating the table raises an error that
            # does.
            self.training.table(schedule, chunks, costs)
            raise ScheduleError(f"{schedule} and the cut have different stage counts")
        return plan

    def limit(self, reference: Candidate | None) -> float:
        """Return how many GiB a rank may use, or how many activations it may keep."""
        device = self.job.device
        if self.has_memory:
            return device.memory_gib - device.reserve_gib
        return _activations_of(reference)

    def waiting_weights(self, schedule: str, chunks: int | None) -> WaitingWeights:
        """Return how many W there is memory for, in addition to those waiting in the table.

        Raises:
            ArgumentsError: Megatron cannot build the stages from the user's flags.
            ScheduleError: The schedule is impossible, or no W in its table can wait.
        """
        counts = self.training.layers_by_stage(schedule, chunks)
        if counts is None:
            raise ScheduleError("the number of layers is unknown")
        costs = self.training.costs or UNIT

        def layout_with(number: int) -> Layout:
            job = replace(self.job, waiting_weights=number)
            judge = replace(self, job=job)
            return judge._layout(schedule, chunks, counts, costs)

        # Try one W, because `has_waiting_weights` is always False if none may wait.
        if not layout_with(1).has_waiting_weights:
            raise ScheduleError(f"{schedule} does not split backward passes")
        return most_waiting(layout_with, self.limit(None))

    def basis(self) -> str:
        """Return the basis of the comparison."""
        device = self.job.device
        if self.has_memory:
            limit_gib = device.memory_gib - device.reserve_gib
            return (
                f"by forecast for {self.job.num_devices} x {device.name} "
                f"with {limit_gib:.1f} GiB"
            )
        return (
            f"by forecast with {device.name}'s times, because the device is unknown, and at most "
            f"{REFERENCE}'s activations"
        )


# -- by tables alone -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ByTable:
    """Compares candidates by simulating their tables and counting the activations they keep."""

    training: Training
    measured: MeasuredCosts | None
    """Costs from a traced run. None: the user's costs, or equal costs."""
    reason: str
    """Why there is no forecast, as text."""

    def candidate(self, schedule: str, chunks: int | None) -> Candidate:
        """Return a candidate.

        Raises:
            ArgumentsError: Megatron cannot build the stages from the user's flags.
            ScheduleError: The schedule is impossible.
        """
        training = self.training
        generator = get(schedule)
        if generator.twins > 1:
            raise _weights_are_held_twice(schedule)
        counts = training.layers_by_stage(schedule, chunks)
        if counts is None:
            # If the number of layers is unknown, assume that all stages are the same
            # size.
            num_chunks = chunks or generator.num_chunks
            counts = [1] * (training.ranks * num_chunks)
        costs = self._costs(counts)
        variants: Sequence[Costs | None] = (None,)
        if self.measured is not None:
            variants = training.made_for(schedule, costs)
        candidates = []
        for made_for in variants:
            candidate = self._candidate(schedule, chunks, costs, made_for)
            candidates.append(candidate)
        return _ordered(candidates)[0]

    def _candidate(
        self,
        schedule: str,
        chunks: int | None,
        costs: Costs,
        made_for: Costs | None,
    ) -> Candidate:
        training = self.training
        table_costs = made_for or training.costs or UNIT
        table = training.table(schedule, chunks, table_costs)
        step = evaluate(table, costs).makespan
        peak = training.activations(table)
        return Candidate(
            schedule=schedule,
            chunks=chunks,
            costs=made_for,
            step=step,
            memory=peak,
            weight_copies=get(schedule).twins,
            words=f"{step:.3g} {self._unit()} per step, {peak:g} activations on the worst rank",
        )

    def _costs(self, layers_by_stage: Sequence[int]) -> Costs:
        """Return the costs of the stages in a cut."""
        ranks = self.training.ranks
        if self.measured is not None:
            return self.measured.costs(ranks, layers_by_stage)
        even = self.training.costs or UNIT
        stages = []
        for count in layers_by_stage:
            # The stage's work relative to 1/ranks of the model, which is what `even`
            # refers to.
            share = count * ranks / sum(layers_by_stage)
            # A stage may have no layers.
            forward = max(SHORTEST, share * even.forward)
            input_gradient = share * even.input
            weight_gradient = share * even.weight
            stages.append((forward, input_gradient, weight_gradient))
        return replace(even, stages=tuple(stages))

    def _unit(self) -> str:
        if self.measured is not None:
            return "s"
        if self.training.costs is None:
            return "forward passes"
        return "times the unit of the costs"

    def limit(self, reference: Candidate | None) -> float:
        """Return how many activations a rank may keep."""
        return _activations_of(reference)

    def basis(self) -> str:
        """Return the basis of the comparison."""
        return f"by {self.reason}, with at most {REFERENCE}'s activations"
