"""Searches sizes, cuts, schedules and recomputation for the shortest step, with a lower bound."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.planning.bounds import CutBound, uses_of
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.forked import Caller, callers, ended
from megatron_ext.planning.layer_costs import (
    FULL,
    Part,
    Sharding,
    beside,
    gather_s,
    mode_name,
    recompute_flags,
    recompute_modes,
    total,
)
from megatron_ext.planning.techniques import Techniques
from megatron_ext.schedules.generators.catalog import generate, get, registered
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import SHORTEST, Costs
from megatron_ext.schedules.table.cuts import cut, layout_of

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.model_sizes import ModelSizes
    from megatron_ext.rules import Rule
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Row

FIXABLE = ("tp", "pp", "vp", "cp", "ep", "micro_batch", "schedule", "pairs", "recompute", "layout")
_GIB = 2.0**30
_STATE_BYTES = 12
"""Of the optimizer for each parameter: fp32 weights, Adam's two moments."""
_WEIGHT_BYTES = 2
_ENOUGH = 3
"""Micro-batches for each rank after which a table repeats itself: more are extrapolated."""
MEGATRONS = ("1f1b", "interleaved")
"""Schedules that Megatron has, too."""
_MOST_DIVISIONS = 2**14
"""Of a micro-batch whose costs are kept: experts on thousands of devices have 4,000."""
_MOST_PAIRED = 16
"""Ranks of a pipeline up to which pairs are tried unless requested: in tables from a search they
are found in seconds then, for 64 ranks in minutes."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question to the planner: a model, its devices and the batch."""

    model: ModelSizes
    device: DeviceKind
    num_devices: int
    global_batch: int
    sequence: int
    pair_rules: tuple[Rule, ...]
    """Settings of Megatron's that exclude pairs."""
    techniques: Techniques = field(default_factory=Techniques)
    fused_loss: bool = False
    overlaps: bool = True
    """Whether data-parallel communication runs behind computation."""
    shards_optimizer: bool = True
    """Whether replicas share out the optimizer's states."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that the user gives, by the names of `FIXABLE`."""


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of a layout, without its cut and its schedule."""

    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    mode: frozenset[str]
    num_microbatches: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout with its forecast."""

    job: Question
    sizes: ParallelSizes
    schedule: str
    chunks: int
    counts: tuple[int, ...]
    """Layers of each stage."""
    shares: tuple[float, ...]
    """Share of the work on each rank."""
    step_s: float
    pipeline_s: float
    """Of the step: the table."""
    memory_gib: tuple[float, ...]
    """At its worst moment, by rank."""
    static_gib: tuple[float, ...]
    """Of it: weights, gradients and states of the optimizer."""
    kept_gib: tuple[float, ...]
    """Of it: activations, as many micro-batches of each stage as the schedule keeps."""
    hidden: float = 0.0
    """Share of the exchange of tokens that runs behind computation."""

    @cached_property
    def tokens_per_s(self) -> float:
        """For each device."""
        job = self.job
        return job.global_batch * job.sequence / self.step_s / job.num_devices

    @cached_property
    def bound_s(self) -> float:
        """No cut makes this schedule faster with these sizes."""
        return _table_bound(self.job, self.sizes, self.schedule, self.chunks)

    @property
    def tflops(self) -> float:
        """For each device, as Megatron counts."""
        sizes = self.sizes
        tokens = sizes.micro_batch * self.job.sequence / sizes.tp / sizes.cp
        forward = _model(self.job, sizes).whole.operations / tokens
        return 3 * forward * self.tokens_per_s / 1e12

    @property
    def mfu(self) -> float:
        """Share of the device's peak of the precision in use."""
        return self.tflops * 1e12 / self.job.device.peak(self.job.techniques.precision)

    @property
    def pairs(self) -> bool:
        """Whether forwards and backwards of different micro-batches run as pairs."""
        return _has_pairs(self.job, self.sizes)

    @property
    def techniques(self) -> str:
        """Megatron's flags of what the forecast takes for granted."""
        sizes = self.sizes
        return self.job.techniques.flags(set(self.job.model.kinds), sizes.tp, sizes.ep)

    @property
    def layout(self) -> str | None:
        """The cut in Megatron's notation; None without a pipeline."""
        return layout_of(self.counts, self.job.model.mtp_layers) if self.sizes.pp > 1 else None

    @property
    def limit(self) -> str:
        """Largest part of the time beyond useful work."""
        sizes, job = self.sizes, self.job
        others = {
            "bubble and uneven stages": self.idle * self.pipeline_s,
            "step": self.step_s - self.pipeline_s,
        }
        if sizes.mode:
            name = "recomputation" + (" of whole layers" if sizes.mode == FULL else "")
            plain = _model(job, replace(sizes, mode=frozenset())).whole.work
            again = _model(job, sizes).whole.work - plain
            others[name] = again * sizes.num_microbatches / sizes.pp
        return max(others, key=others.__getitem__)

    @property
    def idle(self) -> float:
        """Share of the pipeline's time in which a device waits, the mean of all."""
        whole = _model(self.job, self.sizes).whole
        work = (whole.work - self.hidden * whole.exchange) / self.sizes.pp
        return 1 - self.sizes.num_microbatches * work / self.pipeline_s

    @property
    def flags(self) -> str:
        """Megatron's flags, with ours, that make it so."""
        sizes, job = self.sizes, self.job
        words = [f"--tensor-model-parallel-size {sizes.tp}"]
        words += ["--sequence-parallel"] if sizes.tp > 1 else []
        words.append(f"--pipeline-model-parallel-size {sizes.pp}")
        if sizes.pp > 1:
            chosen = get(self.schedule).flags or f"--pipeline-schedule {self.schedule}"
            # A layout says how many stages there are. Graphs are for Megatron's own schedules.
            if job.techniques.graphs == "none":
                words.append(chosen.partition(" --num-virtual")[0])
            words.append(f"--pipeline-model-parallel-layout '{self.layout}'")
        words += [f"--context-parallel-size {sizes.cp}"] if sizes.cp > 1 else []
        if job.model.num_experts:
            words.append(f"--expert-model-parallel-size {sizes.ep}")
            words.append("--expert-tensor-parallel-size 1")
            words += ["--overlap-moe-expert-parallel-comm"] if self.pairs else []
        words.append(f"--micro-batch-size {sizes.micro_batch}")
        words.append(f"--global-batch-size {job.global_batch} --seq-length {job.sequence}")
        words += ["--grad-reduce-in-bf16"] if job.techniques.gradient_bytes == 2 else []
        if job.shards_optimizer:
            words.append("--use-distributed-optimizer")
            words += ["--overlap-grad-reduce --overlap-param-gather"] if job.overlaps else []
        elif job.overlaps:
            words.append("--overlap-grad-reduce")
        words.append(recompute_flags(sizes.mode))
        return " ".join(filter(None, words))


@dataclass
class Found:
    """Result of a search."""

    plans: list[Layout] = field(default_factory=list)
    """The best, shortest step first."""
    bound_s: float = math.inf
    """No sizes, schedule and cut of the space are faster."""
    num_sizes: int = 0
    num_evaluated: int = 0
    is_complete: bool = True
    """False: it was interrupted, and the bound is of the sizes that were left, too."""

    @property
    def gap(self) -> float:
        """How far the answer is from the bound."""
        return self.plans[0].step_s / self.bound_s - 1


def search(
    job: Question,
    keep: int = 5,
    progress: Callable[[Found, int], None] = lambda _found, _left: None,
    processes: int = 1,
) -> Found:
    """Return the layouts with the shortest steps: branch and bound over all sizes.

    Sizes are visited by their bound, those that hardly fit last, and everything that could still
    beat the worst of the best is evaluated, with every schedule and its cut. Several processes,
    forked from this one, find what one finds. Interrupted, it returns the best so far.

    Raises:
        ArgumentsError: The fixed values, or the devices and the batch, allow no sizes.
        MegatronExtError: A process was killed.
    """
    space = list(_space(job))
    if not space:
        raise ArgumentsError(
            f"{job.num_devices} devices and --global-batch-size {job.global_batch} allow no sizes"
            f"{' with --fix ' + fixed_text(job.fixed) if job.fixed else ''}; use sizes whose "
            "product divides the devices, and a batch that the replicas divide"
        )
    found = Found(num_sizes=len(space))
    progress(found, len(space))  # the bounds of thousands of sizes take seconds
    bounds = (
        min((_least_step(own, each) for own in _variants(job, each)), default=math.inf)
        for each in space
    )
    # Tight ones last: nearly all of them are ruled out, which takes long.
    todo = sorted(
        (_is_tight(with_graphs(job, each), each), bound, n, each)
        for n, (bound, each) in enumerate(zip(bounds, space, strict=True))
        if bound < math.inf
    )
    possible: list[float] = []
    # Tables take longest: sizes that share theirs have one visitor, until another has none left.
    groups: dict[tuple[int, int], deque[tuple[Any, ...]]] = defaultdict(deque)
    for visit in todo:
        groups[visit[-1].pp, _simulated(visit[-1], MEGATRONS[0])].append(visit)
    with callers(partial(_visited, job, keep), min(processes, len(groups))) as visitors:
        owners: dict[tuple[int, int], Caller] = {}
        busy: dict[Caller, float] = {}
        try:
            while True:
                for visitor in visitors:
                    while visitor not in busy and groups:
                        own = [key for key in groups if owners.get(key, visitor) is visitor]
                        key = min(own or groups, key=lambda key: groups[key][0])
                        owners[key] = visitor
                        _, bound, _, sizes = groups[key].popleft()
                        if not groups[key]:
                            del groups[key]
                        if len(found.plans) == keep and bound >= found.plans[-1].step_s:
                            possible.append(bound)
                            continue
                        busy[visitor] = bound
                        progress(found, sum(map(len, groups.values())) + len(busy))
                        visitor.begin(found.plans, sizes)
                if not busy:
                    break
                for visitor in ended(busy):
                    plans, bounds, evaluated = visitor.result()
                    del busy[visitor]
                    found.plans = _best([*found.plans, *plans], keep)
                    found.num_evaluated += evaluated
                    possible += bounds
        except KeyboardInterrupt:
            found.is_complete = False
            possible += busy.values()
            possible += [bound for group in groups.values() for _, bound, *_ in group]
    found.bound_s = min(possible, default=math.inf)
    return found


def _best(plans: list[Layout], keep: int) -> list[Layout]:
    """Return the plans with the shortest steps, of the same sizes and schedule one."""
    distinct: dict[Any, Layout] = {}
    for each in sorted(plans, key=lambda plan: plan.step_s):
        distinct.setdefault((each.sizes, each.schedule), each)
    return list(distinct.values())[:keep]


def _visited(
    job: Question, keep: int, plans: list[Layout], sizes: ParallelSizes
) -> tuple[list[Layout], list[float], int]:
    """Return the best plans, bounds of layouts of these sizes, and how many were evaluated."""
    possible, evaluated = [], 0
    for own, schedule, chunks in _orders(job, sizes):
        worst = plans[-1].step_s if len(plans) == keep else math.inf
        twins = get(schedule).twins if sizes.pp > 1 else 1
        if _least_step(own, sizes, twins) >= worst:  # a table takes long
            continue
        least = _table_bound(own, sizes, schedule, chunks)
        possible.append(least)
        if least < worst:
            plan = forecast(own, sizes, schedule, chunks, job.fixed.get("layout"), worst)
            evaluated += 1
            if plan is not None:
                plans = _best([*plans, plan], keep)
    return plans, possible, evaluated


def fixed_text(fixed: Mapping[str, Any]) -> str:
    """Return fixed values as `--fix` takes them."""

    def shown(value: Any) -> str:
        if isinstance(value, frozenset):
            return mode_name(value)
        if isinstance(value, list):  # a cut
            return "|".join("t" * count for count in value)
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)

    return ",".join(f"{key}={shown(value)}" for key, value in fixed.items())


def fits(job: Question) -> bool:
    """Return whether any layout fits, the first that does ending the search."""

    def stop(found: Found, _left: int) -> None:
        if found.plans:
            raise KeyboardInterrupt

    try:
        found = search(job, keep=1, progress=stop)
    except ArgumentsError:  # the devices and the batch allow no sizes
        return False
    if not (found.plans or found.is_complete):
        raise KeyboardInterrupt  # not from `stop`: the user's
    return bool(found.plans)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(max(1, limit).bit_length())]


def _space(job: Question) -> Iterator[ParallelSizes]:
    """Yield all sizes that Megatron accepts, whether or not they fit into memory."""
    model, total, fixed = job.model, job.num_devices, job.fixed

    def choices(name: str, usual: list[Any]) -> list[Any]:
        return [fixed[name]] if name in fixed else usual

    most_stages = model.num_layers + 2
    modes = choices("recompute", recompute_modes(model))
    for tp in choices("tp", _powers(min(job.device.node_size, model.query_groups * 2, 8))):
        if total % tp or model.heads % tp or model.query_groups % tp or model.ffn % tp:
            continue
        pipelines = [p for p in range(1, min(most_stages, 64, total) + 1) if not total // tp % p]
        for pp in choices("pp", pipelines):
            for cp in choices("cp", _powers(job.sequence // 4096)):
                # Each rank of context parallelism has a part of both halves.
                if total % (tp * pp * cp) or job.sequence % (tp * (2 * cp if cp > 1 else 1)):
                    continue
                replicas = total // (tp * pp * cp)
                experts = [1]
                if model.num_experts:
                    most = math.gcd(model.num_experts, total // pp)
                    experts = [n for n in _powers(most) if most % n == 0]
                for micro_batch in choices("micro_batch", _powers(8)):
                    each, rest = divmod(job.global_batch, replicas * micro_batch)
                    if rest or not each:
                        continue
                    for ep in choices("ep", experts):
                        if total // pp % ep or (model.num_experts or 1) % ep:
                            continue
                        for mode in modes:
                            yield ParallelSizes(
                                tp=tp,
                                pp=pp,
                                cp=cp,
                                ep=ep,
                                micro_batch=micro_batch,
                                mode=mode,
                                num_microbatches=each,
                                replicas=replicas,
                            )


def _has_pairs(job: Question, sizes: ParallelSizes) -> bool:
    """Return whether experts exchange tokens, and micro-batches run as pairs for that."""
    is_spread = job.model.num_experts and sizes.ep > 1
    return bool(is_spread and job.techniques.overlaps_experts)


def _variants(job: Question, sizes: ParallelSizes) -> list[Question]:
    """Return the question without pairs and with them, as far as possible and wanted."""
    job = with_graphs(job, sizes)
    model, mode, wanted = job.model, sizes.mode, job.fixed.get("pairs")
    if wanted is None and job.techniques.overlaps_experts:
        wanted = True
    plain = replace(job, techniques=replace(job.techniques, overlaps_experts=False))
    if not model.num_experts or sizes.ep == 1 or wanted is False:
        return [plain]
    args = Namespace(
        recompute_granularity="full" if mode == FULL else "selective",
        recompute_modules=sorted(mode),
        fp8=job.techniques.precision != "bf16",
        mtp_num_layers=model.mtp_layers,
        is_hybrid_model=not {"dense", "moe"}.issuperset(model.kinds),
    )
    # Megatron's own overlap, without a pipeline, takes less.
    refused = sizes.pp == 1 and (mode == FULL or model.mtp_layers > 0)
    refused |= any(rule.refuses(args) for rule in job.pair_rules)
    found = [] if wanted else [plain]
    if not refused and (wanted or sizes.pp <= _MOST_PAIRED):
        found.append(replace(job, techniques=replace(job.techniques, overlaps_experts=True)))
    return found


def with_graphs(job: Question, sizes: ParallelSizes) -> Question:
    """Return the question with CUDA graphs decided, if that is left to the planner."""
    techniques = job.techniques
    if techniques.graphs != "auto":
        return job
    # Our schedules exclude graphs; Megatron refuses them where what they hold is recomputed.
    fit = sizes.pp == 1 and not {"full", "moe"} & sizes.mode
    return replace(job, techniques=replace(techniques, graphs="layers" if fit else "none"))


def _orders(job: Question, sizes: ParallelSizes) -> Iterator[tuple[Question, str, int]]:
    """Yield schedules and their stages on each rank, with and without pairs."""
    for own in _variants(job, sizes):
        for name, chunks in _schedules(job, sizes):
            # Graphs are for Megatron's own schedules, of which interleaving alone has pairs.
            takes = MEGATRONS[1:] if _has_pairs(own, sizes) else MEGATRONS
            if sizes.pp == 1 or own.techniques.graphs == "none" or name in takes:
                yield own, name, chunks


def _schedules(job: Question, sizes: ParallelSizes) -> Iterator[tuple[str, int]]:
    """Yield schedules and their stages on each rank."""
    fixed, pp = job.fixed, sizes.pp
    if pp == 1:  # without a pipeline there is neither a schedule nor a cut to keep
        if fixed.get("vp", 1) == len(fixed.get("layout", "-")) == 1 and "schedule" not in fixed:
            yield "none", 1
        return
    most = (job.model.num_layers + 2) // pp
    # Searched tables take longest: the others may rule them out.
    for name, generator in sorted(registered().items(), key=lambda item: item[1].needs_costs):
        if name != fixed.get("schedule", name if name != "gpipe" else None):
            continue
        if not generator.free_chunks:
            if fixed.get("vp", generator.num_chunks) == generator.num_chunks:
                yield name, generator.num_chunks
            continue
        for chunks in [fixed["vp"]] if "vp" in fixed else range(2, min(most, 8) + 1):
            if chunks > 1:
                yield name, chunks


class _Model(NamedTuple):
    """A whole model with one way of dividing the work on a micro-batch."""

    layers: list[Part]
    first: Part
    """What the first stage has besides layers."""
    last: Part
    whole: Part
    beside: Part
    """As far as pairs can hide its exchange of tokens, but for the embedding's part."""
    kinds: list[tuple[Part, Part, int]]
    """Of each kind of layer one, the same with its exchange hidden, and how many there are."""


def _model(job: Question, sizes: ParallelSizes, overlap: float = 0.0) -> _Model:
    by = Sharding(
        tensor=sizes.tp,
        context=sizes.cp,
        expert=sizes.ep,
        micro_batch=sizes.micro_batch,
        sequence=job.sequence,
        techniques=job.techniques,
        fused_loss=job.fused_loss,
    )
    return _divided(job.model, by, job.device, sizes.mode, sizes.pp == 1, overlap)


@lru_cache(maxsize=_MOST_DIVISIONS)
def _divided(
    model: ModelSizes,
    by: Sharding,
    device: DeviceKind,
    mode: frozenset[str],
    holds_embedding: bool,
    overlap: float,
) -> _Model:
    """Return a model's costs. Many sizes share them: none of them says how long a pipeline is."""
    layers, first, last = parts_of(model, by, device, mode, holds_embedding=holds_embedding)
    hidden = {part: beside(part, overlap) for part in {*layers, last}}
    return _Model(
        layers,
        first,
        last,
        total([*layers, first, last]),
        total([*(hidden[part] for part in layers), first, hidden[last]]),
        [(part, hidden[part], count) for part, count in Counter(layers).items()],
    )


def _of_stages(job: Question, sizes: ParallelSizes, counts: Sequence[int]) -> list[list[Part]]:
    layers, first, last, *_ = _model(job, sizes)
    found, start = [], 0
    for stage, count in enumerate(counts):
        own = layers[start : start + count]
        own += [first] * (stage == 0) + [last] * (stage == len(counts) - 1)
        found.append(own)
        start += count
    return found


def stage_parts(plan: Layout) -> list[Part]:
    """Return what each stage of a layout costs."""
    return [total(own) for own in _of_stages(plan.job, plan.sizes, plan.counts)]


def _least_step(job: Question, sizes: ParallelSizes, *twins: int) -> float:
    """Return a time that no order and no cut of these sizes beats; infinite if none fits.

    With the given numbers of pipelines, else with one or twins.
    """
    # Between its forwards and its backwards a micro-batch is alive on all stages.
    if _mean_memory(job, sizes, 1) > _limit(job):
        return math.inf
    return min(_bound(job, sizes, each) for each in twins or ((1, 2) if sizes.pp > 1 else (1,)))


def _is_tight(job: Question, sizes: ParallelSizes) -> bool:
    """Return whether 1F1B fits, if at all, with fewer layers on the ranks that keep the most."""
    return _mean_memory(job, sizes, min(sizes.num_microbatches, (sizes.pp + 1) / 2)) > _limit(job)


def _mean_memory(job: Question, sizes: ParallelSizes, alive: float) -> float:
    """Return the bytes of the mean rank while so many micro-batches are alive on its stages."""
    whole = _model(job, sizes).whole
    return (_static(job, sizes, whole, 2) + alive * whole.saved) / sizes.pp


def _bound(job: Question, sizes: ParallelSizes, twins: int) -> float:
    """Return a time that no order and no cut of these sizes beats, with one pipeline or twins.

    The busiest rank has at least the mean of the work, and its share of whole layers; one
    micro-batch has to pass all stages forwards and backwards; and what some rank reduces, gathers
    and updates around that is at least the mean of all ranks, as it is convex in their weights.
    """
    # No more of the exchange is hidden than the device can.
    overlap = job.device.pair_overlap if _has_pairs(job, sizes) else 0.0
    model = _model(job, sizes, overlap)
    whole, pp, m = model.beside, sizes.pp, sizes.num_microbatches
    # Some rank has as many layers of one kind as if these were dealt out evenly, rounded up. Twins
    # deal them out to half of the ranks, which run half of the micro-batches.
    whole_layers = 0.0
    for layer, hidden, count in model.kinds:
        of_rank = -(-twins * count // pp) * hidden.work / twins
        # Before the first micro-batch has passed all stages there is no backward, and what runs
        # until then has no partner. Layers pair one to one, so as many backwards have none. A rank
        # that does anything else meanwhile, waiting included, loses that time.
        lost = min(1.0, overlap * layer.exchange / layer.forward) * model.whole.forward
        whole_layers = max(whole_layers, of_rank + lost / m)
    busiest = max(whole.work / pp, whole_layers)
    return max(m * busiest, whole.forward + whole.input) + _least_around(job, sizes, twins)


def _least_around(job: Question, sizes: ParallelSizes, twins: int) -> float:
    mean = Part._make(each * twins / sizes.pp for each in _model(job, sizes).whole)
    return _around_step(job, sizes, mean, twins)


def _replicas(job: Question, sizes: ParallelSizes, twins: int) -> tuple[int, int]:
    """Return how many devices hold the same weights, and the same experts."""
    return sizes.replicas * sizes.cp * twins, job.num_devices // (sizes.pp * sizes.ep) * twins


def _static(job: Question, sizes: ParallelSizes, part: Part, twins: int) -> float:
    """Return the bytes of weights, gradients and optimizer on one device."""
    found = part.copies
    both = zip((part.params, part.expert_params), _replicas(job, sizes, twins), strict=True)
    for params, replicas in both:
        states = _STATE_BYTES / (replicas if job.shards_optimizer else 1)
        found += params * (_WEIGHT_BYTES + job.techniques.gradient_bytes + states)
    return found


def _limit(job: Question) -> float:
    return (job.device.memory_gib - job.device.reserve_gib) * _GIB


def _message(job: Question, sizes: ParallelSizes) -> float:
    return 2 * job.sequence * sizes.micro_batch * job.model.hidden / sizes.cp / sizes.tp


@lru_cache(maxsize=4096)
def _table(name: str, pp: int, num_microbatches: int, chunks: int, pairs: bool) -> Any:
    own = chunks if get(name).free_chunks else None
    return generate(name, pp, num_microbatches, own, pairs=pairs)


@lru_cache(maxsize=4096)
def _uses(name: str, pp: int, num_microbatches: int, chunks: int, pairs: bool) -> Any:
    return uses_of(_table(name, pp, num_microbatches, chunks, pairs))


def _table_bound(job: Question, sizes: ParallelSizes, schedule: str, chunks: int) -> float:
    """Return a time that no cut of a schedule beats; infinite if none fits into memory."""
    pp, pairs, simulated = sizes.pp, _has_pairs(job, sizes), _simulated(sizes, schedule)
    if pp == 1:
        plan = forecast(job, sizes, schedule, chunks)
        return plan.step_s if plan is not None else math.inf
    twins = get(schedule).twins
    stages = pp * chunks // twins
    least = [0] * stages
    if "layout" not in job.fixed:
        ends = _least(job.model, stages)
        least = [ends["least_first"], *[1] * (stages - 2), ends["least_last"]]
    if sum(least) > job.model.num_layers:
        return math.inf
    try:
        key = schedule, pp, simulated, chunks, pairs
        table = _table(*key)
    except ScheduleError:
        return math.inf
    layers, first, last, *_ = _model(job, sizes)
    span = CutBound(
        table=table,
        uses=_uses(*key),
        layers=layers,
        first=first,
        last=last,
        least=least,
        overlap=job.device.pair_overlap if pairs else 0.0,
        later=(sizes.num_microbatches - simulated) / twins,
        limit=_limit(job) - 2 * _message(job, sizes),
        static=lambda part: _static(job, sizes, part, twins),
    ).span_s()
    return max(_bound(job, sizes, twins), span + _least_around(job, sizes, twins))


def forecast(
    job: Question,
    sizes: ParallelSizes,
    schedule: str,
    chunks: int,
    counts: Sequence[int] | None = None,
    worst_s: float = math.inf,
) -> Layout | None:
    """Return the plan of a schedule, or None if it is impossible or too large for the memory.

    Args:
        job: What is to be planned.
        sizes: Everything but cut and schedule.
        schedule: A registered name.
        chunks: Stages on each rank.
        counts: Layers of each stage; None: the faster of the cuts into even ranks and even stages.
        worst_s: Step time that a plan has to beat; of one that does not, the time may be too short.
    """
    layers, first, last, whole, *_ = _model(job, sizes)
    device, pp, m = job.device, sizes.pp, sizes.num_microbatches
    pairs, hidden = _has_pairs(job, sizes), 0.0
    if pp == 1:
        table, twins, parts = None, 1, [[*layers, first, last]]
        counts, rank_of = [len(layers)], (0,)
        # Layer by layer a pair's backward frees what its forward keeps.
        kept = (1 + (1 / len(layers) if pairs and m > 1 else 0)) * whole.saved
        in_flight, without_logits = [kept + whole.logits], [kept]
        span = m * whole.work
        if pairs:  # all but the first forward and the last backward have a partner
            hidden = device.pair_overlap * (m - 1) / m
            span -= hidden * m * whole.exchange
    else:
        simulated = _simulated(sizes, schedule)
        try:
            table = _table(schedule, pp, simulated, chunks, pairs)
            placement = table.placement
            if counts is None:
                overlap = device.pair_overlap if pairs else 0.0
                *works, end = (beside(part, overlap).work for part in (*layers, last))
                least = _least(job.model, placement.num_stages)
                cuts = {
                    tuple(cut(works, first.work, end, placement, by_stage=even, **least))
                    for even in ((False, True) if chunks > 1 else (False,))
                }
                plans = [
                    forecast(job, sizes, schedule, chunks, counts, worst_s)
                    for counts in sorted(cuts)
                ]
                fitting = filter(None, plans)
                return min(fitting, key=lambda plan: plan.step_s, default=None)
        except ScheduleError:
            return None
        if len(counts) != placement.num_stages:
            return None
        twins, rank_of = placement.twins, placement.rank_of
        parts = _of_stages(job, sizes, counts)
        stages = [total(own) for own in parts]
        in_flight = [_kept_at_most(row, stages) for row in table.rows]
        bare = [stage._replace(logits=0.0) for stage in stages]
        without_logits = [_kept_at_most(row, bare) for row in table.rows]
    num_ranks = len(in_flight)
    by_rank = [
        total([part for s, own in enumerate(parts) if rank_of[s] == rank for part in own])
        for rank in range(num_ranks)
    ]
    message = _message(job, sizes) if pp > 1 else 0.0
    static = [_static(job, sizes, rank, twins) for rank in by_rank]
    # Logits are gone when the backwards of layers begin.
    memory = [
        held + max(kept, bare_kept + rank.transient) + rank.dummies + 2 * message
        for rank, held, kept, bare_kept in zip(
            by_rank, static, in_flight, without_logits, strict=True
        )
    ]
    if max(memory) > _limit(job):
        return None
    around = max(_around_step(job, sizes, rank, twins) for rank in by_rank)
    if table is not None:
        costs = _costs(job, sizes, stages, twins)
        timeline = simulate(table, costs)
        each = max(
            rank.work - share * rank.exchange
            for rank, share in zip(by_rank, timeline.hidden_in_pairs, strict=True)
        )
        span = timeline.makespan + (m - simulated) / twins * each
        if m > simulated and span + around < worst_s:
            # A round more shows what ranks wait for in each.
            longer = simulate(_table(schedule, pp, simulated + 2 * pp, chunks, pairs), costs)
            by_batch = (longer.makespan - timeline.makespan) / (2 * pp)
            span = max(span, timeline.makespan + (m - simulated) * by_batch)
        hidden = timeline.hidden
    return Layout(
        job=job,
        sizes=sizes,
        schedule=schedule,
        chunks=chunks,
        counts=tuple(counts),
        shares=tuple(rank.work / whole.work / twins for rank in by_rank),
        step_s=span + around,
        pipeline_s=span,
        memory_gib=tuple(size / _GIB for size in memory),
        static_gib=tuple(size / _GIB for size in static),
        kept_gib=tuple(size / _GIB for size in in_flight),
        hidden=hidden,
    )


def _least(model: ModelSizes, stages: int) -> dict[str, int]:
    """Return the layers that the ends need: none if embedding and loss have to be stages."""
    short = stages - model.num_layers
    last = 0 if model.mtp_layers or short > 0 else 1
    return {"least_first": 0 if short > 1 - bool(model.mtp_layers) else 1, "least_last": last}


def _simulated(sizes: ParallelSizes, schedule: str) -> int:
    """Return the number of micro-batches after which a table repeats itself, if there are more."""
    m, pp = sizes.num_microbatches, sizes.pp
    if m > 2 * _ENOUGH * pp and schedule != "gpipe":
        # The same remainder for tables that come in rounds.
        return m - (m - _ENOUGH * pp) // (2 * pp) * 2 * pp
    return m


def _costs(job: Question, sizes: ParallelSizes, stages: Sequence[Part], twins: int) -> Costs:
    """Return what the simulator takes, in seconds."""
    device, pp, whole = job.device, sizes.pp, total(list(stages))
    far = job.num_devices // pp * twins >= device.node_size
    rate = device.network_bytes * device.network if far else device.link_bytes * device.collective
    return Costs(
        whole.forward / pp,
        whole.input / pp,
        whole.weight / pp,
        latency=device.message_s + _message(job, sizes) / rate,
        all_to_all=whole.exchange / (whole.forward + whole.input),
        # A stage may have nothing to compute.
        exchanges=tuple(stage.exchange / (stage.forward + stage.input or 1.0) for stage in stages),
        hides=device.pair_overlap,
        stages=tuple((max(SHORTEST, s.forward), s.input, s.weight) for s in stages),
    )


def timeline_of(plan: Layout) -> Timeline:
    """Return the simulated table of a layout with a pipeline, in seconds.

    Where it has many micro-batches, as many as it takes until the table repeats itself.
    """
    sizes, name = plan.sizes, plan.schedule
    table = _table(name, sizes.pp, _simulated(sizes, name), plan.chunks, plan.pairs)
    costs = _costs(plan.job, sizes, stage_parts(plan), table.placement.twins)
    return simulate(table, costs)


def _kept_at_most(row: Row, stages: Sequence[Part]) -> float:
    """Return the most bytes of activations that a rank keeps, in the order of its row."""
    now = most = 0.0
    for action in row:
        part = stages[action.stage]
        if action.kind == "F":
            now += part.saved + part.logits
        elif action.kind == "I":  # of all else, only the operands of weight gradients stay
            now += part.waiting - part.saved - part.logits
        elif action.kind in ("B", "W"):
            now -= part.saved + part.logits if action.kind == "B" else part.waiting
        most = max(most, now)
    return most


def _around_step(job: Question, sizes: ParallelSizes, rank: Part, twins: int) -> float:
    """Return the seconds of a step that the pipeline does not hide: reductions and optimizer."""
    device, (d, experts) = job.device, _replicas(job, sizes, twins)
    spans = [(rank.params, d, sizes.tp), (rank.expert_params, experts, sizes.ep)]
    reduced, gathered, updated = 0.0, 0.0, 0.0
    for params, replicas, stride in spans:
        if params:
            reduced += gather_s(device, job.techniques.gradient_bytes * params, replicas, stride)
            gathered += gather_s(device, _WEIGHT_BYTES * params, replicas, stride)
            updated += params * (34 / replicas + 8) / (device.memory_bytes * device.memory)
    if not job.overlaps:
        return updated + reduced + gathered
    shown = max(0.0, reduced - rank.input - rank.weight) + max(0.0, gathered - rank.forward)
    return updated + shown
