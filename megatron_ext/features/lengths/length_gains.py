"""Simulates how much a data set gains from balancing by cost, given its sample lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_balance import (
    best_order,
    deal_out,
    fills_of,
    makespan_of,
    packs_in_file_order,
    shortest,
)
from megatron_ext.features.lengths.length_slices import (
    SLICED_BY_LENGTH,
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.schedules.comparison import Choice, possible_tables
from megatron_ext.schedules.generators.catalog import (
    generate,
    registered,
)
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.costs import MAX_ATTENTION
from megatron_ext.schedules.table.memory import activation_peaks

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs
    from megatron_ext.schedules.table.length_cost import LengthCost

MAX_BATCHES = 4
"""Number of global batches to simulate, from the start of the data."""


class Sizes(NamedTuple):
    """Sizes of one step."""

    pp: int
    """Number of pipeline ranks."""
    num_microbatches: int
    """Number of micro-batches per replica."""
    num_replicas: int
    """Number of data-parallel replicas."""
    max_tokens: int
    """Maximum number of tokens in a micro-batch."""


class LengthGains(NamedTuple):
    """One schedule's mean step times over the global batches.

    Times are in units of an average micro-batch's forward pass through 1/pp of the model.
    """

    schedule: str
    """Name of the schedule, with its options."""
    in_file_order: float
    """Step time without balancing."""
    order: float
    """Step time with `--pipeline-balance order`."""
    pack: float
    """Step time with `--pipeline-balance pack`: micro-batches are distributed over replicas and
    ordered."""
    sliced: float | None
    """Step time with `--pipeline-slice-tokens` in addition to `pack`, or None if the schedule does
    not support slices by length."""
    sliced_peak: float | None
    """Peak activations on a rank with these slices, in units of the longest micro-batch on 1/pp of
    the model."""
    bound: float
    """Lower bound on the step time for any packing and order."""


class _StepWithSlices(NamedTuple):
    """One step whose micro-batches are cut by length."""

    time: float
    """In mean micro-batches."""
    peak: float
    """Peak activations on a rank, in the unit of `LengthGains.sliced_peak`."""


class _Batch(NamedTuple):
    """A global batch. Costs are relative to its mean micro-batch."""

    microbatches: list[float]
    """Cost of each micro-batch, in data order."""
    samples: list[float]
    """Cost of each sample."""
    packs: list[list[int]]
    """[micro-batch][sample] -> number of tokens."""
    mean_cost: float
    """Cost of the mean micro-batch, in the unit of the `LengthCost`."""


def predict_lengths(
    lengths: Sequence[int],
    name: str,
    sizes: Sizes,
    length_cost: LengthCost,
    costs: Costs,
    slice_tokens: int | None = None,
) -> tuple[list[LengthGains], list[str]]:
    """Simulate schedules with a data set's sample lengths.

    Args:
        lengths: Number of tokens in each sample, in the order in which a sampler reads them.
        name: Name of a registered schedule, or `all`, which excludes mirrored pipelines.
        sizes: Sizes of a step.
        length_cost: Cost of a sample as a function of its length.
        costs: Durations of actions on the mean micro-batch, and of messages.
        slice_tokens: T. A micro-batch of L > T tokens is cut into L / T slices (rounded up) of
            equal cost. None: micro-batches stay whole.

    Returns:
        The predictions, sorted by step time under `pack`, and the reasons why other schedules were
        left out.

    Raises:
        ScheduleError: The lengths do not fill one global batch, a sample is longer than a
            micro-batch, or no schedule can run with these sizes.
    """
    batches = _global_batches(lengths, sizes, length_cost)
    choices: list[Choice] = []
    # The reasons, one line per schedule.
    left_out: list[str] = []
    for generator in registered().values():
        if name not in ("all", generator.name):
            continue
        if generator.twins > 1:
            left_out.append(
                f"{generator.name} mirrors two pipelines, for which lengths cannot be simulated; "
                "use a different schedule"
            )
            continue
        for variant in generator.variants:
            choices.append(Choice(generator.name, variant))
    schedules, reasons = possible_tables(
        choices, sizes.pp, sizes.num_microbatches, costs
    )
    left_out += reasons
    if not schedules:
        # No registered schedule has this name.
        if not left_out:
            left_out = [
                f"--lengths can only simulate registered schedules, not {name}; use one of those"
            ]
        raise ScheduleError("; ".join(left_out))
    gains = []
    for schedule in schedules:
        schedule_gains = _gains(schedule, batches, sizes.num_replicas, costs)
        if slice_tokens is not None and schedule.name in SLICED_BY_LENGTH:
            slicing = _Slicing(schedule, sizes, length_cost, costs, slice_tokens)
            steps = [slicing.step(batch) for batch in batches]
            schedule_gains = schedule_gains._replace(
                sliced=fmean(step.time for step in steps),
                sliced_peak=max(step.peak for step in steps),
            )
        gains.append(schedule_gains)
    fastest_first = sorted(gains, key=lambda gains: gains.pack)
    return fastest_first, left_out


def _global_batches(
    lengths: Sequence[int],
    sizes: Sizes,
    length_cost: LengthCost,
) -> list[_Batch]:
    """Return the first global batches that samples of these lengths fill.

    Raises:
        ScheduleError: The samples do not fill one batch, or a sample is longer than a micro-batch.
    """
    batch_size = sizes.num_microbatches * sizes.num_replicas
    all_packs = packs_in_file_order(lengths, sizes.max_tokens)
    packs = list(islice(all_packs, batch_size * MAX_BATCHES))
    if len(packs) < batch_size:
        raise ScheduleError(
            f"the lengths fill {len(packs)} micro-batches of {sizes.max_tokens} tokens, but a step "
            f"needs {sizes.num_microbatches} on each of {sizes.num_replicas} replicas; provide "
            "more lengths, or lower --microbatches, --replicas or --max-tokens"
        )
    batches: list[_Batch] = []
    # Drop the last batch if it is incomplete.
    num_batches = len(packs) // batch_size
    for index in range(num_batches):
        first = index * batch_size
        batch_packs = packs[first : first + batch_size]
        samples: list[int] = []
        for pack in batch_packs:
            samples += pack
        # Use the mean micro-batch as the cost unit, so that steps from different data
        # sets are comparable.
        mean_cost = length_cost.of_pack(samples) / batch_size
        batch = _Batch(
            microbatches=[
                length_cost.of_pack(pack) / mean_cost for pack in batch_packs
            ],
            samples=[length_cost.of_length(length) / mean_cost for length in samples],
            packs=batch_packs,
            mean_cost=mean_cost,
        )
        batches.append(batch)
    return batches


def _gains(
    schedule: Schedule,
    batches: Sequence[_Batch],
    num_replicas: int,
    costs: Costs,
) -> LengthGains:
    """Return one schedule's mean step times over the global batches."""

    def in_file_order(microbatches: Sequence[float]) -> Sequence[int]:
        return range(len(microbatches))

    def in_best_order(microbatches: Sequence[float]) -> Sequence[int]:
        return best_order(schedule, microbatches, costs)

    def step(
        replicas: Sequence[Sequence[float]],
        order_of: Callable[[Sequence[float]], Sequence[int]],
    ) -> float:
        """Return a step's duration: the time until the slowest replica finishes."""
        makespans = []
        for microbatches in replicas:
            order = order_of(microbatches)
            makespans.append(makespan_of(schedule, microbatches, order, costs))
        return max(makespans)

    file_steps: list[float] = []
    order_steps: list[float] = []
    pack_steps: list[float] = []
    bounds: list[float] = []
    for batch in batches:
        # Replicas take turns reading micro-batches. Only `pack` redistributes them.
        microbatches = batch.microbatches
        as_read = []
        for replica in range(num_replicas):
            as_read.append(microbatches[replica::num_replicas])
        fills = fills_of(schedule.placement)
        dealt = []
        for share in deal_out(microbatches, num_replicas, fills):
            dealt.append([microbatches[number] for number in share])
        file_steps.append(step(as_read, in_file_order))
        order_steps.append(step(as_read, in_best_order))
        pack_steps.append(step(dealt, in_best_order))
        bound = shortest(
            batch.samples,
            num_replicas,
            schedule.placement,
            costs,
        )
        bounds.append(bound)
    return LengthGains(
        schedule=schedule.label,
        in_file_order=fmean(file_steps),
        order=fmean(order_steps),
        pack=fmean(pack_steps),
        sliced=None,
        sliced_peak=None,
        bound=fmean(bounds),
    )


@dataclass(frozen=True)
class _Slicing:
    """Simulates one schedule's steps with micro-batches that are cut by length."""

    schedule: Schedule
    sizes: Sizes
    length_cost: LengthCost
    costs: Costs
    slice_tokens: int

    def step(self, batch: _Batch) -> _StepWithSlices:
        """Simulate a step. It ends when the slowest replica finishes."""
        fills = fills_of(self.schedule.placement)
        replicas: list[list[list[int]]] = []
        for share in deal_out(batch.microbatches, self.sizes.num_replicas, fills):
            packs = [batch.packs[number] for number in share]
            # In training, `LengthSlicer` sorts a replica's micro-batches the same way.
            order = rising([batch.microbatches[number] for number in share])
            replicas.append([packs[place] for place in order])
        # All replicas run the same table, so at each place all of them have as many
        # slices as the replica that needs the most.
        counts = []
        for packs_at_place in zip(*replicas, strict=True):
            most_tokens = max(map(sum, packs_at_place))
            counts.append(
                slices_needed(most_tokens, self.slice_tokens, "--slice-tokens")
            )
        steps = []
        for packs in replicas:
            steps.append(self._of_replica(packs, counts, batch.mean_cost))
        return _StepWithSlices(
            time=max(step.time for step in steps),
            peak=max(step.peak for step in steps),
        )

    def _of_replica(
        self,
        packs: Sequence[Sequence[int]],
        counts: Sequence[int],
        mean_cost: float,
    ) -> _StepWithSlices:
        """Simulate one replica's step."""
        longest = max(map(sum, packs))
        # In the table, the cost unit is one sample as long as the longest micro-batch.
        unit = self.length_cost.of_length(longest)
        # [micro-batch][slice] -> length relative to the longest micro-batch; cost in
        # units
        slice_sizes = []
        slice_costs = []
        for samples, count in zip(packs, counts, strict=True):
            bounds = equal_cost_bounds(samples, count, self.length_cost)
            widths = [end - begin for begin, end in pairwise(bounds)]
            slice_sizes.append(tuple(width / longest for width in widths))
            # All slices of a micro-batch cost about the same.
            slice_cost = self.length_cost.of_pack(samples) / unit / count
            slice_costs.append((slice_cost,) * count)
        # The caller's latency and launch time are relative to the mean micro-batch, so convert them
        # to the table's unit. Without linear cost, the attention share is 1, which `Costs` rejects.
        costs = replace(
            self.costs,
            latency=self.costs.latency * mean_cost / unit,
            launch=self.costs.launch * mean_cost / unit,
            attention=min(self.length_cost.attention_share(longest), MAX_ATTENTION),
            slice_scale=tuple(slice_costs),
        )
        chunks: Any = None
        if self.schedule.name == "interleaved":
            chunks = self.schedule.options.get("chunks")
        table = generate(
            self.schedule.name,
            self.sizes.pp,
            len(packs),
            chunks,
            costs,
            slice_sizes=tuple(slice_sizes),
        )
        makespan = simulate(table, costs).makespan
        return _StepWithSlices(
            # Convert the time back to mean micro-batches.
            time=makespan * unit / mean_cost,
            peak=max(activation_peaks(table)),
        )
