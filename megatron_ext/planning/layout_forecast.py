"""Forecasts a layout's step time and memory and bounds the step time over all cuts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.planning.bounds import CutBound, RowUse, uses_of
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.layer_costs import (
    FULL,
    Part,
    Sharding,
    beside,
    gather_s,
    recompute_flags,
    total,
)
from megatron_ext.planning.question import ParallelSizes, Question, runs_pairs
from megatron_ext.schedules.generators.catalog import generate, get
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import SHORTEST, UNIT, Costs
from megatron_ext.schedules.table.cuts import cut, layout_of
from megatron_ext.schedules.table.memory import running_peak
from megatron_ext.schedules.table.table_change import in_use
from megatron_ext.schedules.table.transforms import weights_at_once, weights_waiting

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.model_sizes import ModelSizes
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Row, Schedule

_GIB = 2.0**30
_STATE_BYTES = 12
"""Bytes of optimizer state per parameter: an fp32 weight and Adam's two moments."""
_WEIGHT_BYTES = 2
_UPDATE_BYTES = 34
"""Bytes of optimizer traffic per parameter in the optimizer's shard."""
_CLEAR_BYTES = 8
"""Bytes of traffic to clear a gradient and add it to the norm, for all gradients on the rank."""
_ENOUGH_ROUNDS = 3
"""Number of micro-batches per rank after which a table repeats and is extrapolated."""
_MAX_DIVISIONS = 2**14
"""Maximum number of cached divisions of a micro-batch. Searches for models with experts need 4,000
on thousands of devices."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout with its forecast."""

    job: Question
    sizes: ParallelSizes
    schedule: str
    chunks: int
    counts: tuple[int, ...]
    """Number of layers in each stage."""
    shares: tuple[float, ...]
    """By rank: share of the work."""
    step_s: float
    pipeline_s: float
    """The part of `step_s` that the table takes."""
    memory_gib: tuple[float, ...]
    """By rank: peak memory."""
    static_gib: tuple[float, ...]
    """The part of `memory_gib` for weights, gradients and optimizer states."""
    kept_gib: tuple[float, ...]
    """The part of `memory_gib` for activations, given how many micro-batches the schedule keeps on
    each stage."""
    hidden: float = 0.0
    """Share of the token exchange that computation hides."""

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens per second and device."""
        job = self.job
        return job.global_batch * job.sequence / self.step_s / job.num_devices

    @cached_property
    def bound_s(self) -> float:
        """Lower bound on this schedule's step time for these sizes, over all cuts."""
        return table_bound_s(self.job, self.sizes, self.schedule, self.chunks)

    @property
    def tflops(self) -> float:
        """TFLOP/s per device, counted as Megatron does."""
        sizes = self.sizes
        # The operations are those of a single tensor- and context-parallel rank, so
        # divide by that rank's tokens.
        tokens = sizes.micro_batch * self.job.sequence / sizes.tp / sizes.cp
        model_cost = _model_cost(self.job, sizes).whole_model
        forward_operations = model_cost.operations / tokens
        return 3 * forward_operations * self.tokens_per_s / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the achieved fraction of the device's peak at this precision."""
        job = self.job
        peak = job.device.peak(job.techniques.precision)
        return self.tflops * 1e12 / peak

    @property
    def pairs(self) -> bool:
        """Whether forward and backward passes for different micro-batches run as pairs."""
        return runs_pairs(self.job, self.sizes)

    @property
    def has_waiting_weights(self) -> bool:
        """Whether weight gradients wait for idle time, which requires split backward passes."""
        may_wait = self.job.waiting_weights and self.pairs
        if not may_wait or self.sizes.pp == 1:
            return False
        key = _table_key(
            self.job,
            self.sizes,
            self.schedule,
            self.chunks,
        )
        return _table(key).splits_backward

    @property
    def techniques(self) -> str:
        """Megatron's flags for the techniques that the forecast assumes."""
        sizes = self.sizes
        kinds = set(self.job.model.kinds)
        return self.job.techniques.flags(kinds, sizes.tp, sizes.ep)

    @property
    def layout(self) -> str | None:
        """The cut in Megatron's notation; None without a pipeline."""
        if self.sizes.pp == 1:
            return None
        return layout_of(self.counts, self.job.model.mtp_layers)

    @property
    def limit(self) -> str:
        """The name of the largest part of the step time that is not useful work."""
        sizes = self.sizes
        job = self.job
        losses_s = {
            "bubble and uneven stages": self.idle * self.pipeline_s,
            "step": self.step_s - self.pipeline_s,
        }
        if sizes.mode:
            name = "recomputation"
            if sizes.mode == FULL:
                name += " of whole layers"
            # Recomputation costs the difference from the same sizes without
            # recomputation.
            plain_sizes = replace(sizes, mode=frozenset())
            plain_cost = _model_cost(job, plain_sizes).whole_model
            model_cost = _model_cost(job, sizes).whole_model
            recomputed_s = model_cost.work - plain_cost.work
            losses_s[name] = recomputed_s * sizes.num_microbatches / sizes.pp
        return max(losses_s, key=losses_s.__getitem__)

    @property
    def idle(self) -> float:
        """The idle share of the pipeline's time, averaged over all devices."""
        sizes = self.sizes
        model_cost = _model_cost(self.job, sizes).whole_model
        shown_s = model_cost.work - self.hidden * model_cost.exchange
        work_s = shown_s / sizes.pp
        return 1 - sizes.num_microbatches * work_s / self.pipeline_s

    @property
    def flags(self) -> str:
        """Megatron's and this package's flags for this layout."""
        groups = [
            self._parallel_flags(),
            self._batch_flags(),
            recompute_flags(self.sizes.mode),
        ]
        return " ".join(group for group in groups if group)

    def _parallel_flags(self) -> str:
        sizes = self.sizes
        job = self.job
        flags = [f"--tensor-model-parallel-size {sizes.tp}"]
        if sizes.tp > 1:
            flags.append("--sequence-parallel")
        flags.append(f"--pipeline-model-parallel-size {sizes.pp}")
        if sizes.pp > 1:
            # CUDA graphs work only with Megatron's own schedules.
            if job.techniques.graphs == "none":
                by_name = f"--pipeline-schedule {self.schedule}"
                schedule_flags = get(self.schedule).flags or by_name
                # The layout determines the number of stages.
                flag, _, _ = schedule_flags.partition(" --num-virtual")
                flags.append(flag)
            flags.append(f"--pipeline-model-parallel-layout '{self.layout}'")
        if sizes.cp > 1:
            flags.append(f"--context-parallel-size {sizes.cp}")
        if job.model.num_experts:
            flags.append(f"--expert-model-parallel-size {sizes.ep}")
            flags.append("--expert-tensor-parallel-size 1")
            if self.pairs:
                flags.append("--overlap-moe-expert-parallel-comm")
            if self.has_waiting_weights:
                flags.append(f"--pipeline-waiting-weights {job.waiting_weights}")
        return " ".join(flag for flag in flags if flag)

    def _batch_flags(self) -> str:
        job = self.job
        flags = [
            f"--micro-batch-size {self.sizes.micro_batch}",
            f"--global-batch-size {job.global_batch} --seq-length {job.sequence}",
        ]
        if job.techniques.gradient_bytes == 2:
            flags.append("--grad-reduce-in-bf16")
        if job.shards_optimizer:
            flags.append("--use-distributed-optimizer")
            if job.overlaps:
                flags.append("--overlap-grad-reduce --overlap-param-gather")
        elif job.overlaps:
            flags.append("--overlap-grad-reduce")
        return " ".join(flags)


# -- costs of a model for a given division of the work
# -------------------------------------------


class _KindCost(NamedTuple):
    """The cost of one layer kind in a model."""

    layer: Part
    beside: Part
    """The layer without the part of its exchange that pairs can hide."""
    num_layers: int


class _ModelCost(NamedTuple):
    """A model's cost for one way to divide a micro-batch's work."""

    layers: list[Part]
    first: Part
    """The first stage's extra part."""
    last: Part
    """The last stage's extra part."""
    whole_model: Part
    beside: Part
    """The entire model without the part of the exchange that pairs can hide."""
    kinds: list[_KindCost]


def _model_cost(
    job: Question,
    sizes: ParallelSizes,
    overlap: float = 0.0,
) -> _ModelCost:
    sharding = Sharding(
        tensor=sizes.tp,
        context=sizes.cp,
        expert=sizes.ep,
        micro_batch=sizes.micro_batch,
        sequence=job.sequence,
        techniques=job.techniques,
        fused_loss=job.fused_loss,
    )
    return _divided(
        job.model,
        sharding,
        job.device,
        sizes.mode,
        holds_embedding=sizes.pp == 1,
        overlap=overlap,
    )


# Many sizes share a cache entry, because the pipeline length is not an argument.
@lru_cache(maxsize=_MAX_DIVISIONS)
def _divided(
    model: ModelSizes,
    sharding: Sharding,
    device: DeviceKind,
    mode: frozenset[str],
    *,
    holds_embedding: bool,
    overlap: float,
) -> _ModelCost:
    """Return a model's costs."""
    layers, first, last = parts_of(
        model,
        sharding,
        device,
        mode,
        holds_embedding=holds_embedding,
    )
    distinct_parts = {*layers, last}
    part_beside = {part: beside(part, overlap) for part in distinct_parts}
    layers_beside = [part_beside[layer] for layer in layers]
    kinds = []
    for layer, num_layers in Counter(layers).items():
        kinds.append(_KindCost(layer, part_beside[layer], num_layers))
    return _ModelCost(
        layers=layers,
        first=first,
        last=last,
        whole_model=total([*layers, first, last]),
        beside=total([*layers_beside, first, part_beside[last]]),
        kinds=kinds,
    )


def _parts_by_stage(
    job: Question,
    sizes: ParallelSizes,
    counts: Sequence[int],
) -> list[list[Part]]:
    """Return every stage's layers and ends."""
    cost = _model_cost(job, sizes)
    stages = []
    begin = 0
    for stage, count in enumerate(counts):
        parts = cost.layers[begin : begin + count]
        if stage == 0:
            parts.append(cost.first)
        if stage == len(counts) - 1:
            parts.append(cost.last)
        stages.append(parts)
        begin += count
    return stages


def stage_parts(plan: Layout) -> list[Part]:
    """Return the cost of every stage in a layout."""
    parts_by_stage = _parts_by_stage(plan.job, plan.sizes, plan.counts)
    return [total(parts) for parts in parts_by_stage]


# -- memory --------------------------------------------------------------------------------------


class _NumHolders(NamedTuple):
    """How many devices hold the same parameters."""

    weights: int
    experts: int


def _num_holders(job: Question, sizes: ParallelSizes, twins: int) -> _NumHolders:
    devices_per_expert = job.num_devices // (sizes.pp * sizes.ep)
    # With twins, two ranks hold every stage.
    return _NumHolders(
        weights=sizes.replicas * sizes.cp * twins,
        experts=devices_per_expert * twins,
    )


def _static_bytes(
    job: Question,
    sizes: ParallelSizes,
    part: Part,
    twins: int,
) -> float:
    """Return the bytes of weights, gradients and optimizer states on one device."""
    num_bytes = part.copies
    holders = _num_holders(job, sizes, twins)
    # Every holder has all weights and gradients, but a distributed optimizer shards its
    # states.
    for params, num_holders in (
        (part.params, holders.weights),
        (part.expert_params, holders.experts),
    ):
        shards = 1
        if job.shards_optimizer:
            shards = num_holders
        parameter_bytes = (
            _WEIGHT_BYTES + job.techniques.gradient_bytes + _STATE_BYTES / shards
        )
        num_bytes += params * parameter_bytes
    return num_bytes


def _memory_limit_bytes(job: Question) -> float:
    usable_gib = job.device.memory_gib - job.device.reserve_gib
    return usable_gib * _GIB


def _message_bytes(job: Question, sizes: ParallelSizes) -> float:
    # Messages are in bf16. Each tensor-parallel rank sends its part of the sequence.
    tensor_bytes = 2 * job.sequence * sizes.micro_batch * job.model.hidden
    return tensor_bytes / sizes.cp / sizes.tp


def _mean_memory_bytes(
    job: Question,
    sizes: ParallelSizes,
    live_microbatches: float,
) -> float:
    """Return a rank's mean memory, in bytes, with this many micro-batches live on its stages."""
    model_cost = _model_cost(job, sizes).whole_model
    # Two mirrored pipelines shard the optimizer states across more ranks than one
    # pipeline does, so this is a lower bound for any schedule.
    static_bytes = _static_bytes(job, sizes, model_cost, 2)
    return (static_bytes + live_microbatches * model_cost.saved) / sizes.pp


def is_tight(job: Question, sizes: ParallelSizes) -> bool:
    """Return whether 1F1B fits only if the fullest ranks hold fewer layers than the others."""
    # 1F1B keeps `pp` micro-batches on its first rank and one on its last rank.
    mean_live = min(sizes.num_microbatches, (sizes.pp + 1) / 2)
    mean_bytes = _mean_memory_bytes(job, sizes, mean_live)
    return mean_bytes > _memory_limit_bytes(job)


def _peak_kept_bytes(row: Row, stages: Sequence[Part]) -> float:
    """Return the peak bytes of activations that a rank keeps while running its row."""
    changes = []
    for action in row:
        part = stages[action.stage]
        if action.kind == "F":
            changes.append(part.saved + part.logits)
        elif action.kind == "I":  # only the weight gradients' operands stay
            changes.append(part.waiting - part.saved - part.logits)
        elif action.kind == "B":
            changes.append(-(part.saved + part.logits))
        elif action.kind == "W":
            changes.append(-part.waiting)
    return running_peak(changes)


class _RankLoad(NamedTuple):
    """The parts that a rank computes and the bytes that it keeps."""

    part: Part
    kept_bytes: float
    """Peak bytes of activations."""
    kept_without_logits_bytes: float

    def memory_bytes(self, static_bytes: float, message_bytes: float) -> float:
        """Return the peak memory."""
        # Logits are freed before the layers' backward passes begin.
        in_backward_bytes = self.kept_without_logits_bytes + self.part.transient
        activation_bytes = max(self.kept_bytes, in_backward_bytes)
        # One message may arrive while another is being sent.
        return static_bytes + activation_bytes + self.part.dummies + 2 * message_bytes


# -- tables --------------------------------------------------------------------------------------


class _TableKey(NamedTuple):
    """A generator's arguments."""

    schedule: str
    pp: int
    num_microbatches: int
    chunks: int
    pairs: bool
    costs: Costs = UNIT
    weights_at_once: bool = False
    num_waiting: int = 0
    """Number of W actions that wait in addition to those waiting in the table."""


# Generating tables takes 40 % of the search time, and many sizes share a table.
@lru_cache(maxsize=4096)
def _table(key: _TableKey) -> Schedule:
    # Generators with a fixed number of chunks do not accept this argument.
    takes_chunks = get(key.schedule).free_chunks
    chunks = key.chunks if takes_chunks else None
    table = generate(
        key.schedule,
        key.pp,
        key.num_microbatches,
        chunks,
        key.costs,
        **in_use(pairs=key.pairs),
    )
    if key.weights_at_once:
        table = weights_at_once(table)
    if key.num_waiting:
        table = weights_waiting(table, key.num_waiting)
    return table


def _table_key(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
    costs: Costs = UNIT,
    at_once: bool = False,
) -> _TableKey:
    num_microbatches = num_simulated(sizes, schedule)
    pairs = runs_pairs(job, sizes)
    num_waiting = job.waiting_weights if pairs else 0
    return _TableKey(
        schedule,
        sizes.pp,
        num_microbatches,
        chunks,
        pairs,
        costs,
        at_once,
        num_waiting,
    )


@lru_cache(maxsize=4096)
def _uses(key: _TableKey) -> list[RowUse]:
    return uses_of(_table(key))


def num_simulated(sizes: ParallelSizes, schedule: str) -> int:
    """Return the number of micro-batches to simulate, after which the table only repeats."""
    num_microbatches = sizes.num_microbatches
    pp = sizes.pp
    # GPipe keeps every micro-batch, so a shorter table would understate its memory.
    if schedule == "gpipe" or num_microbatches <= 2 * _ENOUGH_ROUNDS * pp:
        return num_microbatches
    # Remove only whole rounds of 2 pp micro-batches. If a table is built from rounds,
    # its end depends on the remainder, so keep that.
    round_size = 2 * pp
    num_rounds_beyond = (num_microbatches - _ENOUGH_ROUNDS * pp) // round_size
    return num_microbatches - num_rounds_beyond * round_size


def _min_layers_of_ends(model: ModelSizes, num_stages: int) -> dict[str, int]:
    """Return the first and last stages' minimum layer counts, as keyword arguments for `cut`."""
    num_missing = num_stages - model.num_layers
    # If there are too few layers for all stages, the embedding and the loss must form
    # stages without layers.
    least_last = 0 if model.mtp_layers or num_missing > 0 else 1
    # One missing layer only empties the last stage. With MTP, it empties the first one.
    max_missing = 0 if model.mtp_layers else 1
    least_first = 0 if num_missing > max_missing else 1
    return {"least_first": least_first, "least_last": least_last}


def _costs(
    job: Question,
    sizes: ParallelSizes,
    stages: Sequence[Part],
    twins: int,
) -> Costs:
    """Return the simulator's costs, in seconds."""
    device = job.device
    pp = sizes.pp
    model_cost = total(list(stages))
    # If a stage fills an entire node, neighbouring stages are on different nodes.
    if job.num_devices // pp * twins >= device.node_size:
        rate = device.network_bytes * device.network
    else:
        rate = device.link_bytes * device.collective
    # Give every pass of a stage its own duration, because the ratios between passes
    # differ from stage to stage. With one factor per stage, forecasts for split
    # backward passes were up to 1.2 % off.
    exchange_shares = []
    stage_costs = []
    for stage in stages:
        # A stage may have nothing to compute.
        computed_s = stage.forward + stage.input or 1.0
        exchange_shares.append(stage.exchange / computed_s)
        forward_s = max(SHORTEST, stage.forward)
        stage_costs.append((forward_s, stage.input, stage.weight))
    model_computed_s = model_cost.forward + model_cost.input
    return Costs(
        model_cost.forward / pp,
        model_cost.input / pp,
        model_cost.weight / pp,
        latency=device.message_s + _message_bytes(job, sizes) / rate,
        all_to_all=model_cost.exchange / model_computed_s,
        exchanges=tuple(exchange_shares),
        hides=device.pair_overlap,
        stages=tuple(stage_costs),
    )


def costs_of(
    job: Question,
    sizes: ParallelSizes,
    counts: Sequence[int],
    twins: int,
) -> Costs:
    """Return the costs of a cut's stages and messages, in seconds."""
    parts_by_stage = _parts_by_stage(job, sizes, counts)
    stages = [total(parts) for parts in parts_by_stage]
    return _costs(job, sizes, stages, twins)


def timeline_of(plan: Layout) -> Timeline:
    """Simulate the table of a layout with a pipeline and return its timeline, in seconds.

    If there are many micro-batches, the simulation stops once the table repeats.
    """
    sizes = plan.sizes
    key = _table_key(plan.job, sizes, plan.schedule, plan.chunks)
    table = _table(key)
    costs = _costs(
        plan.job,
        sizes,
        stage_parts(plan),
        table.placement.twins,
    )
    return simulate(table, costs)


# -- bounds --------------------------------------------------------------------------------------


def least_step_s(job: Question, sizes: ParallelSizes, *twins: int) -> float:
    """Return a lower bound on the step time over all orders and cuts; infinite if none fits.

    `twins` lists the pipeline counts to consider, by default one and two.
    """
    # Between its forward and backward passes, a micro-batch is live on all stages.
    if _mean_memory_bytes(job, sizes, 1) > _memory_limit_bytes(job):
        return math.inf
    if not twins:
        twins = (1, 2) if sizes.pp > 1 else (1,)
    bounds_s = [_step_bound_s(job, sizes, num_twins) for num_twins in twins]
    return min(bounds_s)


def _step_bound_s(job: Question, sizes: ParallelSizes, twins: int) -> float:
    """Return a lower bound on the step time over all orders and cuts, with or without twins.

    The busiest rank has at least the mean work and at least its share of entire layers. At least
    one micro-batch must run forward and backward through all stages. On some rank, the reductions,
    gathers and updates take at least as long as they would for the mean number of weights, because
    their time is convex in that number.
    """
    # Assume that pairs hide as much of the exchange as the device can hide.
    overlap = job.device.pair_overlap if runs_pairs(job, sizes) else 0.0
    model = _model_cost(job, sizes, overlap)
    model_cost = model.beside
    pp = sizes.pp
    num_microbatches = sizes.num_microbatches
    # For every layer kind, some rank has at least as many layers as in an even
    # distribution, rounded up. Twins distribute the layers over half of the ranks, and
    # each twin runs half of the micro-batches.
    whole_layers_s = 0.0
    for kind in model.kinds:
        layers_of_rank = -(-twins * kind.num_layers // pp)
        rank_s = layers_of_rank * kind.beside.work / twins
        # No backward pass runs until the first micro-batch has passed through all
        # stages, so until then, forward passes have no partner. Because layers pair one
        # to one, the same number of backward passes has no partner either. Whatever
        # else a rank does in the meantime, including waiting, that time is lost.
        hideable_share = overlap * kind.layer.exchange / kind.layer.forward
        unpaired_share = min(1.0, hideable_share)
        lost_s = unpaired_share * model.whole_model.forward
        whole_layers_s = max(whole_layers_s, rank_s + lost_s / num_microbatches)
    busiest_s = max(model_cost.work / pp, whole_layers_s)
    traversal_s = model_cost.forward + model_cost.input
    pipeline_s = max(num_microbatches * busiest_s, traversal_s)
    return pipeline_s + _least_around_s(job, sizes, twins)


def _least_around_s(job: Question, sizes: ParallelSizes, twins: int) -> float:
    model_cost = _model_cost(job, sizes).whole_model
    # With twins, a rank holds stages from both pipelines.
    mean_of_ranks = Part._make(size * twins / sizes.pp for size in model_cost)
    return _around_step_s(job, sizes, mean_of_ranks, twins)


def table_bound_s(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
) -> float:
    """Return a lower bound on a schedule's step time over all cuts; infinite if none fits."""
    if sizes.pp == 1:
        plan = forecast(job, sizes, schedule, chunks)
        return plan.step_s if plan is not None else math.inf
    num_microbatches = num_simulated(sizes, schedule)
    twins = get(schedule).twins
    num_stages = sizes.pp * chunks // twins
    min_layers = [0] * num_stages
    # A fixed layout may have stages without layers, so there is no minimum.
    if "layout" not in job.fixed:
        ends = _min_layers_of_ends(job.model, num_stages)
        inner_stages = [1] * (num_stages - 2)
        min_layers = [ends["least_first"], *inner_stages, ends["least_last"]]
    # Check this before generating the table: for DeepSeek-V3 on 2,048 devices, tables
    # with more stages than layers accounted for 12 s of a 102 s search.
    if sum(min_layers) > job.model.num_layers:
        return math.inf
    key = _table_key(job, sizes, schedule, chunks)
    try:
        table = _table(key)
    except ScheduleError:  # the schedule does not support these sizes
        return math.inf
    cost = _model_cost(job, sizes)
    overlap = job.device.pair_overlap if key.pairs else 0.0
    # Each twin runs half of the micro-batches, and one message may arrive while another
    # is being sent.
    span_s = CutBound(
        table=table,
        uses=_uses(key),
        layers=cost.layers,
        first=cost.first,
        last=cost.last,
        min_layers=min_layers,
        overlap=overlap,
        microbatches_beyond=(sizes.num_microbatches - num_microbatches) / twins,
        memory_bytes=_memory_limit_bytes(job) - 2 * _message_bytes(job, sizes),
        static_bytes=lambda part: _static_bytes(job, sizes, part, twins),
    ).span_s()
    with_span_s = span_s + _least_around_s(job, sizes, twins)
    return max(_step_bound_s(job, sizes, twins), with_span_s)


# -- forecasts -----------------------------------------------------------------------------------


def forecast(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
    counts: Sequence[int] | None = None,
    worst_s: float = math.inf,
    *,
    costs: Costs = UNIT,
    at_once: bool = False,
) -> Layout | None:
    """Return a schedule's layout, or None if it is impossible or does not fit in memory.

    Args:
        job: The planner's question.
        sizes: The layout's sizes, without its cut and schedule.
        schedule: A registered name.
        chunks: Number of stages per rank.
        counts: Number of layers in each stage. None: the cut into even ranks or the one into even
            stages, whichever is faster.
        worst_s: Step time that a layout must beat. A slower layout's time may be underestimated.
        costs: Durations to generate the table for.
        at_once: Whether every weight gradient runs right after its input gradient.
    """
    if sizes.pp == 1:
        return _forecast_of_one_stage(job, sizes, schedule, chunks)
    key = _table_key(job, sizes, schedule, chunks, costs, at_once)
    try:
        table = _table(key)
        if counts is not None:
            cuts = [tuple(counts)]
        else:
            cuts = _even_cuts(job, sizes, table, chunks)
    except ScheduleError:
        return None
    fitting = []
    for table_cut in cuts:
        plan = _forecast_of_table(job, sizes, key, table_cut, worst_s)
        if plan is not None:
            fitting.append(plan)
    return min(fitting, key=lambda plan: plan.step_s, default=None)


def _even_cuts(
    job: Question,
    sizes: ParallelSizes,
    table: Schedule,
    chunks: int,
) -> list[tuple[int, ...]]:
    """Return the cut into even ranks and, if there are several chunks, the one into even stages.

    Raises:
        ScheduleError: The layers cannot be divided into the stages.
    """
    cost = _model_cost(job, sizes)
    placement = table.placement
    overlap = job.device.pair_overlap if runs_pairs(job, sizes) else 0.0
    layers_beside = [beside(layer, overlap) for layer in cost.layers]
    layer_works = [layer.work for layer in layers_beside]
    last_work = beside(cost.last, overlap).work
    ends = _min_layers_of_ends(job.model, placement.num_stages)
    cuts = set()
    # With one chunk, every rank has a single stage.
    divisions = (False, True) if chunks > 1 else (False,)
    # The schedule determines which division is faster. With even ranks alone,
    # interleaved was up to 5 % slower.
    for by_stage in divisions:
        counts = cut(
            layer_works,
            cost.first.work,
            last_work,
            placement,
            by_stage=by_stage,
            **ends,
        )
        cuts.add(tuple(counts))
    return sorted(cuts)


def _forecast_of_one_stage(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
) -> Layout | None:
    """Return the layout without a pipeline, or None if it does not fit."""
    cost = _model_cost(job, sizes)
    num_microbatches = sizes.num_microbatches
    model_cost = cost.whole_model
    num_layers = len(cost.layers)
    pipeline_s = num_microbatches * model_cost.work
    live_microbatches = 1.0
    hidden = 0.0
    if runs_pairs(job, sizes):
        # All passes except the first forward and the last backward pass have a partner.
        hidden = job.device.pair_overlap * (num_microbatches - 1) / num_microbatches
        pipeline_s -= hidden * num_microbatches * model_cost.exchange
        if num_microbatches > 1:
            # Within a pair, the backward pass frees its activations layer by layer,
            # while the forward pass keeps all of its own.
            live_microbatches += 1 / num_layers
    kept_bytes = live_microbatches * model_cost.saved
    kept_with_logits_bytes = kept_bytes + model_cost.logits
    ranks = [_RankLoad(model_cost, kept_with_logits_bytes, kept_bytes)]
    if not _fits(job, sizes, ranks, twins=1):
        return None
    span = _Span(pipeline_s, hidden)
    return _layout(
        job,
        sizes,
        schedule,
        chunks,
        (num_layers,),
        ranks,
        twins=1,
        span=span,
    )


class _Span(NamedTuple):
    """The time from the first action to the last action on any rank."""

    pipeline_s: float
    hidden: float
    """Share of the token exchange that pairs hide."""


def _forecast_of_table(
    job: Question,
    sizes: ParallelSizes,
    key: _TableKey,
    counts: Sequence[int],
    worst_s: float,
) -> Layout | None:
    """Return the layout for a table and a cut.

    Return None if it does not fit, or if the cut and the table have different numbers of stages.
    """
    table = _table(key)
    placement = table.placement
    if len(counts) != placement.num_stages:
        return None
    parts_by_stage = _parts_by_stage(job, sizes, counts)
    stages = [total(parts) for parts in parts_by_stage]
    stages_without_logits = [stage._replace(logits=0.0) for stage in stages]
    ranks = []
    for rank, row in enumerate(table.rows):
        rank_parts = []
        for stage, parts in enumerate(parts_by_stage):
            if placement.rank_of[stage] == rank:
                rank_parts += parts
        kept_bytes = _peak_kept_bytes(row, stages)
        # The loss keeps logits only until its own backward pass begins, so compute the
        # peak both with and without them.
        kept_without_logits_bytes = _peak_kept_bytes(row, stages_without_logits)
        ranks.append(
            _RankLoad(total(rank_parts), kept_bytes, kept_without_logits_bytes)
        )
    twins = placement.twins
    # Check the memory first, because the simulation takes longer.
    if not _fits(job, sizes, ranks, twins):
        return None
    span = _simulated_span(job, sizes, key, stages, ranks, worst_s)
    return _layout(
        job,
        sizes,
        key.schedule,
        key.chunks,
        tuple(counts),
        ranks,
        twins=twins,
        span=span,
    )


def _simulated_span(
    job: Question,
    sizes: ParallelSizes,
    key: _TableKey,
    stages: Sequence[Part],
    ranks: Sequence[_RankLoad],
    worst_s: float,
) -> _Span:
    """Return the span of the table for all micro-batches.

    The span may be underestimated if the step takes longer than `worst_s`.
    """
    table = _table(key)
    twins = table.placement.twins
    costs = _costs(job, sizes, stages, twins)
    timeline = simulate(table, costs)
    num_beyond = sizes.num_microbatches - key.num_microbatches
    # Every additional micro-batch takes at least as long as the work on the busiest
    # rank.
    ranks_s = []
    for rank, hidden_share in zip(ranks, timeline.hidden_in_pairs, strict=True):
        hidden_s = hidden_share * rank.part.exchange
        ranks_s.append(rank.part.work - hidden_s)
    busiest_s = max(ranks_s)
    pipeline_s = timeline.makespan + num_beyond / twins * busiest_s
    if not num_beyond:
        return _Span(pipeline_s, timeline.hidden)
    step_s = pipeline_s + _slowest_around_s(job, sizes, ranks, twins)
    if step_s < worst_s:
        # Simulate one more round, because ranks may wait in every round. For Llama 3 8B
        # with 128 micro-batches on 64 H100s, this makes the interleaved schedule's step
        # with 5 chunks 15 % longer, as does simulating the entire table.
        round_size = 2 * sizes.pp
        longer_key = key._replace(num_microbatches=key.num_microbatches + round_size)
        longer = simulate(_table(longer_key), costs)
        round_s = longer.makespan - timeline.makespan
        microbatch_s = round_s / round_size
        pipeline_s = max(pipeline_s, timeline.makespan + num_beyond * microbatch_s)
    return _Span(pipeline_s, timeline.hidden)


def _fits(
    job: Question,
    sizes: ParallelSizes,
    ranks: Sequence[_RankLoad],
    twins: int,
) -> bool:
    memory_bytes = _memory_bytes(job, sizes, ranks, twins)
    return max(memory_bytes) <= _memory_limit_bytes(job)


def _memory_bytes(
    job: Question,
    sizes: ParallelSizes,
    ranks: Sequence[_RankLoad],
    twins: int,
) -> list[float]:
    """Return the peak bytes on each rank."""
    message_bytes = 0.0
    if sizes.pp > 1:
        message_bytes = _message_bytes(job, sizes)
    memory_bytes = []
    for rank in ranks:
        static_bytes = _static_bytes(job, sizes, rank.part, twins)
        memory_bytes.append(rank.memory_bytes(static_bytes, message_bytes))
    return memory_bytes


def _layout(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
    counts: tuple[int, ...],
    ranks: Sequence[_RankLoad],
    *,
    twins: int,
    span: _Span,
) -> Layout:
    """Return the layout with its forecast."""
    model_cost = _model_cost(job, sizes).whole_model
    memory_bytes = _memory_bytes(job, sizes, ranks, twins)
    static_bytes = [_static_bytes(job, sizes, rank.part, twins) for rank in ranks]
    shares = [rank.part.work / model_cost.work / twins for rank in ranks]
    around_s = _slowest_around_s(job, sizes, ranks, twins)
    return Layout(
        job=job,
        sizes=sizes,
        schedule=schedule,
        chunks=chunks,
        counts=counts,
        # With twins, every rank has parts of both pipelines, which together form two
        # models.
        shares=tuple(shares),
        step_s=span.pipeline_s + around_s,
        pipeline_s=span.pipeline_s,
        memory_gib=tuple(num_bytes / _GIB for num_bytes in memory_bytes),
        static_gib=tuple(num_bytes / _GIB for num_bytes in static_bytes),
        kept_gib=tuple(rank.kept_bytes / _GIB for rank in ranks),
        hidden=span.hidden,
    )


def _slowest_around_s(
    job: Question,
    sizes: ParallelSizes,
    ranks: Sequence[_RankLoad],
    twins: int,
) -> float:
    return max(_around_step_s(job, sizes, rank.part, twins) for rank in ranks)


def _around_step_s(
    job: Question,
    sizes: ParallelSizes,
    rank: Part,
    twins: int,
) -> float:
    """Return a step's time outside the pipeline: exposed reductions, gathers and the update."""
    device = job.device
    holders = _num_holders(job, sizes, twins)
    # The stride between ranks with the same weights is the tensor-parallel size, and
    # between ranks with the same experts the expert-parallel size.
    reduced_s = 0.0
    gathered_s = 0.0
    updated_s = 0.0
    for params, num_holders, stride in (
        (rank.params, holders.weights, sizes.tp),
        (rank.expert_params, holders.experts, sizes.ep),
    ):
        if params:
            gradient_bytes = job.techniques.gradient_bytes * params
            scatter_s = gather_s(device, gradient_bytes, num_holders, stride)
            if job.shards_optimizer:
                shards = num_holders
                reduced_s += scatter_s
                weight_bytes = _WEIGHT_BYTES * params
                gathered_s += gather_s(device, weight_bytes, num_holders, stride)
            else:
                # Every holder needs all gradients, updates all weights and gathers
                # none.
                shards = 1
                reduced_s += 2 * scatter_s
            update_bytes = params * (_UPDATE_BYTES / shards + _CLEAR_BYTES)
            updated_s += update_bytes / (device.memory_bytes * device.memory)
    if not job.overlaps:
        return updated_s + reduced_s + gathered_s
    # Reductions overlap with the last backward pass and gathers with the first forward
    # pass.
    shown_reduced_s = max(0.0, reduced_s - rank.input - rank.weight)
    shown_gathered_s = max(0.0, gathered_s - rank.forward)
    return updated_s + (shown_reduced_s + shown_gathered_s)
