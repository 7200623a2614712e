"""Searches sizes, cuts, schedules and recomputation for the shortest step and bounds its time."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from megatron_ext.errors import ArgumentsError
from megatron_ext.planning.forked import Caller, callers, ended
from megatron_ext.planning.layer_costs import FULL, recompute_modes
from megatron_ext.planning.layout_forecast import (
    Layout,
    forecast,
    is_tight,
    least_step_s,
    num_simulated,
    table_bound_s,
)
from megatron_ext.planning.question import (
    ParallelSizes,
    Question,
    fixed_text,
    runs_pairs,
    with_graphs,
)
from megatron_ext.schedules.generators.catalog import get, registered

MEGATRONS = ("1f1b", "interleaved")
"""The schedules that Megatron has, too."""
_MAX_PAIRED_RANKS = 16
"""With more ranks than this, pairs are tried only on request. Searching tables with pairs takes
seconds up to this number but minutes for 64 ranks."""
_MAX_STAGES = 64
_MAX_CHUNKS = 8


@dataclass
class SearchResult:
    """The result of a search, which may still be in progress."""

    plans: list[Layout] = field(default_factory=list)
    """The best layouts, sorted by step time."""
    bound_s: float = math.inf
    """Lower bound on the step time over all layouts in the search space."""
    num_sizes: int = 0
    num_evaluated: int = 0
    is_complete: bool = True
    """False if the search was interrupted. The bound then covers the remaining sizes as well."""

    @property
    def gap(self) -> float:
        """The relative gap between the best layout and the bound."""
        return self.plans[0].step_s / self.bound_s - 1


class _Visit(NamedTuple):
    """Sizes to visit. Sorting visits puts them in visiting order."""

    is_tight: bool
    bound_s: float
    number: int
    """Position in the search space, as a tie-breaker for equal bounds."""
    sizes: ParallelSizes


_Group = tuple[int, int]
"""(pipeline ranks, simulated micro-batches). Sizes for which both are the same share tables."""


class _Queue:
    """The remaining visits.

    Generating tables takes most of the time, so sizes that share tables go to the same visitor.
    """

    def __init__(self, visits: Sequence[_Visit]) -> None:
        self._groups: dict[_Group, deque[_Visit]] = defaultdict(deque)
        for visit in visits:
            num_microbatches = num_simulated(visit.sizes, MEGATRONS[0])
            group = (visit.sizes.pp, num_microbatches)
            self._groups[group].append(visit)
        # Group -> the visitor for its sizes. The visitor's process has cached the
        # tables.
        self._owners: dict[_Group, Caller] = {}
        self.num_groups = len(self._groups)

    def __len__(self) -> int:
        return sum(len(visits) for visits in self._groups.values())

    def pop(self, visitor: Caller) -> _Visit:
        """Return a visitor's next visit, from another group if its own groups are empty."""
        # The visitor's own groups, and groups that no visitor has started.
        own_groups = []
        for candidate in self._groups:
            if self._owners.get(candidate, visitor) is visitor:
                own_groups.append(candidate)

        def first_visit(group: _Group) -> _Visit:
            return self._groups[group][0]

        group = min(own_groups or self._groups, key=first_visit)
        self._owners[group] = visitor
        visit = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return visit

    def bounds_s(self) -> list[float]:
        """Return the bounds of all remaining visits."""
        bounds_s = []
        for visits in self._groups.values():
            bounds_s += [visit.bound_s for visit in visits]
        return bounds_s


def search(
    job: Question,
    keep: int = 5,
    progress: Callable[[SearchResult, int], None] = lambda _result, _num_left: None,
    processes: int = 1,
    *,
    stops_at_first: bool = False,
) -> SearchResult:
    """Return the layouts with the shortest steps, using branch and bound over all sizes.

    Sizes are visited in order of their bounds, except that sizes that barely fit come last. All
    schedules and cuts that can still beat the worst layout kept so far are evaluated. Several
    processes, forked from this one, find the same layouts as a single process. If the search is
    interrupted, it returns the best layouts so far.

    Args:
        job: The planner's question.
        keep: Number of layouts to return.
        progress: Called with the result so far and the number of remaining sizes.
        processes: Number of processes.
        stops_at_first: Whether to return as soon as any layout fits.

    Raises:
        ArgumentsError: No sizes are compatible with the fixed values, or with the devices and the
            batch.
        MegatronExtError: A process was killed.
    """
    space = list(_space(job))
    if not space:
        fixed_flag = f" with --fix {fixed_text(job.fixed)}" if job.fixed else ""
        raise ArgumentsError(
            f"{job.num_devices} devices and --global-batch-size {job.global_batch} allow no sizes"
            f"{fixed_flag}; use sizes whose product divides the devices, and a batch that the "
            "replicas divide"
        )
    result = SearchResult(num_sizes=len(space))
    # Report progress now, because bounding thousands of sizes takes seconds.
    progress(result, len(space))
    queue = _Queue(_visits(job, space))
    bounds_s: list[float] = []
    """The bounds of all sizes that were visited or ruled out."""
    # Visitor -> bound of the sizes that it is evaluating.
    busy: dict[Caller, float] = {}
    visit_sizes = partial(_visited, job, keep)
    num_visitors = min(processes, queue.num_groups)
    with callers(visit_sizes, num_visitors) as visitors:
        try:
            while True:
                for visitor in visitors:
                    # Give every idle visitor the next sizes that could still beat the
                    # worst layout.
                    while visitor not in busy and len(queue):
                        visit = queue.pop(visitor)
                        is_full = len(result.plans) == keep
                        # The result's bound covers sizes that are ruled out as well.
                        if is_full and visit.bound_s >= result.plans[-1].step_s:
                            bounds_s.append(visit.bound_s)
                            continue
                        busy[visitor] = visit.bound_s
                        progress(result, len(queue) + len(busy))
                        visitor.begin(result.plans, visit.sizes)
                if not busy:
                    break
                # Each result may rule out sizes that are still in the queue.
                for visitor in ended(busy):
                    visited: _Visited = visitor.result()
                    del busy[visitor]
                    all_plans = [*result.plans, *visited.plans]
                    result.plans = _best(all_plans, keep)
                    result.num_evaluated += visited.num_evaluated
                    bounds_s += visited.bounds_s
                if stops_at_first and result.plans:
                    result.is_complete = False
                    break
        except KeyboardInterrupt:  # keep the layouts so far, which may have taken hours
            result.is_complete = False
    if not result.is_complete:
        bounds_s += busy.values()
        bounds_s += queue.bounds_s()
    result.bound_s = min(bounds_s, default=math.inf)
    return result


def fits(job: Question) -> bool:
    """Return whether any layout fits. The search stops at the first layout that does.

    Raises:
        KeyboardInterrupt: The user interrupted the search.
    """
    try:
        result = search(job, keep=1, stops_at_first=True)
    except ArgumentsError:  # the devices and the batch allow no sizes
        return False
    # If the search was interrupted before it found a layout, the answer is unknown.
    if not (result.plans or result.is_complete):
        raise KeyboardInterrupt
    return bool(result.plans)


def _visits(job: Question, space: Sequence[ParallelSizes]) -> list[_Visit]:
    """Return the visits to all sizes that may fit, in visiting order."""
    visits = []
    for number, sizes in enumerate(space):
        bound_s = math.inf
        for variant in _variants(job, sizes):
            bound_s = min(bound_s, least_step_s(variant, sizes))
        if bound_s < math.inf:
            # Visit tight sizes last, because nearly all of them are ruled out in the
            # end, which takes a long time. Ordered by bound alone, one search took 18 s
            # to find its first layout.
            tight = is_tight(with_graphs(job, sizes), sizes)
            visits.append(_Visit(tight, bound_s, number, sizes))
    return sorted(visits)


class _Visited(NamedTuple):
    """The outcome of a visit."""

    plans: list[Layout]
    """The best plans, including those that the visitor started with."""
    bounds_s: list[float]
    """One bound per schedule."""
    num_evaluated: int


def _visited(
    job: Question,
    keep: int,
    plans: list[Layout],
    sizes: ParallelSizes,
) -> _Visited:
    """Evaluate all schedules for these sizes that may beat the worst of the given plans."""
    bounds_s = []
    num_evaluated = 0
    for variant, schedule, chunks in _orders(job, sizes):
        # Every better layout lowers the limit for the schedules that follow.
        worst_s = math.inf
        if len(plans) == keep:
            worst_s = plans[-1].step_s
        # Without a pipeline, the schedule is "none", which has no generator.
        twins = 1
        if sizes.pp > 1:
            twins = get(schedule).twins
        # Check this bound first, because the next one needs the table, which is slow to
        # generate.
        if least_step_s(variant, sizes, twins) >= worst_s:
            continue
        bound_s = table_bound_s(variant, sizes, schedule, chunks)
        bounds_s.append(bound_s)
        if bound_s < worst_s:
            counts = job.fixed.get("layout")
            plan = forecast(variant, sizes, schedule, chunks, counts, worst_s)
            num_evaluated += 1
            if plan is not None:
                plans = _best([*plans, plan], keep)
    return _Visited(plans, bounds_s, num_evaluated)


def _best(plans: Sequence[Layout], keep: int) -> list[Layout]:
    """Return the plans with the shortest steps, one per combination of sizes and schedule."""
    distinct: dict[tuple[ParallelSizes, str], Layout] = {}
    fastest_first = sorted(plans, key=lambda plan: plan.step_s)
    for plan in fastest_first:
        distinct.setdefault((plan.sizes, plan.schedule), plan)
    return list(distinct.values())[:keep]


# -- the space -----------------------------------------------------------------------------------


def _powers_of_two(limit: int) -> list[int]:
    """Return the powers of two up to a limit, starting with 1, which is always included."""
    num_powers = max(1, limit).bit_length()
    return [2**exponent for exponent in range(num_powers)]


def _space(job: Question) -> Iterator[ParallelSizes]:
    """Yield all sizes that Megatron accepts, whether or not they fit in memory."""
    # The order of these loops breaks ties between equal bounds (`_Visit.number`).
    choices = _Choices(job)
    for tp in choices.tensor():
        for pp in choices.pipeline(tp):
            for cp in choices.context(tp, pp):
                replicas = job.num_devices // (tp * pp * cp)
                for micro_batch in choices.micro_batch():
                    batch_per_round = replicas * micro_batch
                    num_microbatches, num_left_over = divmod(
                        job.global_batch, batch_per_round
                    )
                    if num_left_over or not num_microbatches:
                        continue
                    for ep in choices.expert(pp):
                        for mode in choices.recompute():
                            yield ParallelSizes(
                                tp=tp,
                                pp=pp,
                                cp=cp,
                                ep=ep,
                                micro_batch=micro_batch,
                                mode=mode,
                                num_microbatches=num_microbatches,
                                replicas=replicas,
                            )


class _Choices:
    """Candidate values for each size, or its fixed value, except those that Megatron rejects."""

    def __init__(self, job: Question) -> None:
        self._job = job
        self._model = job.model

    def tensor(self) -> list[int]:
        model = self._model
        job = self._job
        # Across nodes, every layer would wait for the network.
        most_ranks = min(job.device.node_size, model.query_groups * 2, 8)
        divided = (
            job.num_devices,
            model.heads,
            model.query_groups,
            model.ffn,
        )
        sizes = []
        for tp in self._fixed_or("tp", _powers_of_two(most_ranks)):
            if all(size % tp == 0 for size in divided):
                sizes.append(tp)
        return sizes

    def pipeline(self, tp: int) -> list[int]:
        num_devices = self._job.num_devices
        num_groups = num_devices // tp
        # The embedding and the loss may form stages without layers.
        most_stages = self._model.num_layers + 2
        longest = min(most_stages, _MAX_STAGES, num_devices)
        lengths = [pp for pp in range(1, longest + 1) if num_groups % pp == 0]
        return self._fixed_or("pp", lengths)

    def context(self, tp: int, pp: int) -> list[int]:
        job = self._job
        powers = _powers_of_two(job.sequence // 4096)
        sizes = []
        for cp in self._fixed_or("cp", powers):
            parts = tp
            # Every context-parallel rank has parts of both halves of a sequence.
            if cp > 1:
                parts *= 2 * cp
            divides_devices = job.num_devices % (tp * pp * cp) == 0
            if divides_devices and job.sequence % parts == 0:
                sizes.append(cp)
        return sizes

    def expert(self, pp: int) -> list[int]:
        num_experts = self._model.num_experts
        devices_of_stage = self._job.num_devices // pp
        divisors = [1]
        if num_experts:
            divisor = math.gcd(num_experts, devices_of_stage)
            powers = _powers_of_two(divisor)
            divisors = [power for power in powers if divisor % power == 0]
        sizes = []
        # Every rank has the same number of experts. Without experts, ep is 1.
        num_divided = num_experts or 1
        for ep in self._fixed_or("ep", divisors):
            if devices_of_stage % ep == 0 and num_divided % ep == 0:
                sizes.append(ep)
        return sizes

    def micro_batch(self) -> list[int]:
        return self._fixed_or("micro_batch", _powers_of_two(8))

    def recompute(self) -> list[frozenset[str]]:
        return self._fixed_or("recompute", recompute_modes(self._model))

    def _fixed_or(self, name: str, sizes: list[Any]) -> list[Any]:
        fixed = self._job.fixed
        if name in fixed:
            return [fixed[name]]
        return sizes


def _variants(job: Question, sizes: ParallelSizes) -> list[Question]:
    """Return the question without pairs, with pairs, or both, as possible and requested."""
    job = with_graphs(job, sizes)
    # `--fix pairs=...` overrides the flag. If neither is set, try both variants.
    wants_pairs = job.fixed.get("pairs")
    if wants_pairs is None and job.techniques.overlaps_experts:
        wants_pairs = True
    without_pairs = _with_pairs(job, is_on=False)
    exchanges_tokens = job.model.num_experts and sizes.ep > 1
    if not exchanges_tokens or wants_pairs is False:
        return [without_pairs]
    variants = [] if wants_pairs else [without_pairs]
    is_short = sizes.pp <= _MAX_PAIRED_RANKS
    if (wants_pairs or is_short) and not _refuses_pairs(job, sizes):
        variants.append(_with_pairs(job, is_on=True))
    return variants


def _with_pairs(job: Question, *, is_on: bool) -> Question:
    techniques = replace(job.techniques, overlaps_experts=is_on)
    return replace(job, techniques=techniques)


def _refuses_pairs(job: Question, sizes: ParallelSizes) -> bool:
    """Return whether Megatron or a rule in this package rejects pairs for these sizes."""
    model = job.model
    mode = sizes.mode
    # Without a pipeline, Megatron's own overlap is used, which has more restrictions.
    is_restricted = mode == FULL or model.mtp_layers > 0
    if sizes.pp == 1 and is_restricted:
        return True
    granularity = "selective"
    if mode == FULL:
        granularity = "full"
    is_plain_model = {"dense", "moe"}.issuperset(model.kinds)
    # The rules read only these arguments.
    args = Namespace(
        recompute_granularity=granularity,
        recompute_modules=sorted(mode),
        fp8=job.techniques.precision != "bf16",
        mtp_num_layers=model.mtp_layers,
        is_hybrid_model=not is_plain_model,
    )
    return any(rule.refuses(args) for rule in job.pair_rules)


def _orders(job: Question, sizes: ParallelSizes) -> Iterator[tuple[Question, str, int]]:
    """Yield every variant of the question with every schedule and its number of stages per rank."""
    for variant in _variants(job, sizes):
        # CUDA graphs work only with Megatron's own schedules, of which only interleaved
        # has pairs.
        takes_graphs: Sequence[str] = MEGATRONS
        if runs_pairs(variant, sizes):
            takes_graphs = ("interleaved",)
        takes_all = sizes.pp == 1 or variant.techniques.graphs == "none"
        for schedule, chunks in _schedules(job, sizes):
            if takes_all or schedule in takes_graphs:
                yield variant, schedule, chunks


def _schedules(job: Question, sizes: ParallelSizes) -> Iterator[tuple[str, int]]:
    """Yield schedules, each with a number of stages per rank."""
    fixed = job.fixed
    if sizes.pp == 1:  # without a pipeline, there is no schedule or cut to fix
        num_stages = 1
        if "layout" in fixed:
            num_stages = len(fixed["layout"])
        has_one_chunk = fixed.get("vp", 1) == 1
        if num_stages == 1 and has_one_chunk and "schedule" not in fixed:
            yield "none", 1
        return
    most_stages = job.model.num_layers + 2
    most_chunks = min(most_stages // sizes.pp, _MAX_CHUNKS)
    generators = registered()
    # Try searched tables last, because they take the longest and other schedules may
    # rule them out.
    names = sorted(generators, key=lambda name: generators[name].needs_costs)
    for name in names:
        generator = generators[name]
        if "schedule" in fixed:
            if name != fixed["schedule"]:
                continue
        elif name == "gpipe":  # keeps every micro-batch for no benefit
            continue
        if not generator.free_chunks:
            num_chunks = generator.num_chunks
            if fixed.get("vp", num_chunks) == num_chunks:
                yield name, num_chunks
            continue
        chunk_counts = [*range(2, most_chunks + 1)]
        if "vp" in fixed:
            chunk_counts = [fixed["vp"]]
        for chunks in chunk_counts:
            if chunks > 1:
                yield name, chunks
