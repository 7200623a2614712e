"""Computes a table's memory needs from the order of its actions.

A micro-batch's activations on a stage are alive from the start of F to the end of B or, if the
backward pass is split, of W. The part that is kept after I for W is the *weight stash*. The unit is
Ma, the activations of one micro-batch on 1/pp of the model, so one stage holds pp/num_stages Ma.

Most layers hold less memory after I than before. Layers that are recomputed, or that keep their
gathered input for W, hold more. The *stash ratio* is the memory that a micro-batch holds between I
and W divided by the memory that it holds between F and I.

A slice holds its share of a micro-batch's activations. If a micro-batch runs in slices, its keys
and values are alive from its first F to its last backward pass. From its first backward pass on,
their gradients use the same amount of memory. Keys and values are counted separately, because their
size depends on the number of attention heads that share them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Kind, Row, Schedule

Edge = tuple[int, int, str]
"""(sending rank, receiving rank, kind of message). If both ranks are the same, the receiver is the
rank's twin."""


@dataclass(frozen=True)
class Memory:
    """Peak memory on each rank, in Ma unless stated otherwise."""

    activations: tuple[float, ...]
    keys_and_values: tuple[float, ...] = ()
    """Keys and values of sliced micro-batches, including their gradients. The unit is one
    micro-batch's keys and values on 1/pp of the model. Empty without slices."""


# Bytes per token and unit of width that a layer does not keep between F and I if
# Megatron recomputes a module: the norms' outputs; queries, keys and values; and the
# activation function's input and output. Attention itself keeps only its operands.
_RECOMPUTED = {
    "layernorm": 4,
    "mla_up_proj": 6,
    "mlp": 16,
    "moe": 16,
    "moe_act": 8,
}


class _OffloadedBytes(NamedTuple):
    """Device memory that a layer saves if Megatron offloads a module until its backward pass.

    Both fields are in bytes per token and unit of width.
    """

    undivided: int = 0
    """Memory for tensors as wide as the model."""
    divided: int = 0
    """Memory for tensors that are divided across tensor-parallel ranks."""


_OFFLOADED = {
    "attn_norm": _OffloadedBytes(undivided=2),
    "qkv_linear": _OffloadedBytes(undivided=2),
    "core_attn": _OffloadedBytes(divided=6),
    "attn_proj": _OffloadedBytes(divided=2),
    "mlp_norm": _OffloadedBytes(undivided=2),
    "expert_fc1": _OffloadedBytes(undivided=2),
    "moe_act": _OffloadedBytes(divided=8),
    "fused_group_mlp": _OffloadedBytes(undivided=2, divided=16),
}


def stash_ratio(
    tensor_parallel: int = 1,
    *,
    sequence_parallel: bool = False,
    keeps_gathered: bool = False,
    recomputed: Collection[str] = (),
    offloaded: Collection[str] = (),
    recomputed_layers: float = 0.0,
    kept_inputs: float = 1.0,
    divides_inputs: bool = False,
) -> float:
    """Return a transformer layer's stash ratio: bytes kept for W divided by bytes kept for I.

    The layer has width h and a feed-forward width of 4h, in 16 bits. Its activations are those in
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    Args:
        tensor_parallel: Number of ranks that divide the layer.
        sequence_parallel: Whether these ranks also divide the tensors that are as wide as the
            model.
        keeps_gathered: Whether tensors that I gathers are kept until W, as in Transformer Engine.
        recomputed: Recomputed modules, by their names in Megatron.
        offloaded: Modules, by their names in Megatron, whose inputs stay on the host until I.
            After that, the operands for their W are on the device.
        recomputed_layers: Share of layers that are recomputed entirely, between 0 and 1.
        kept_inputs: Number of inputs kept per recomputed layer: 1/n if n layers are recomputed
            together.
        divides_inputs: Whether tensor-parallel ranks divide these inputs even without sequence
            parallelism.

    Returns:
        The ratio, which is at least 1 and a multiple of 1/16, so that sums of it are exact.
    """
    divided = tensor_parallel if sequence_parallel else 1
    # Per token and unit of width: 10 + 24/t bytes, or 34/t with sequence parallelism.
    kept_bytes = 10 / divided + 24 / tensor_parallel
    recomputed_modules = set(recomputed)
    if "moe" in recomputed_modules:
        # A recomputed expert layer includes its activation function, so count that only
        # once.
        recomputed_modules.discard("moe_act")
    for module in recomputed_modules:
        # Norm outputs are as wide as the model.
        ranks = divided if module == "layernorm" else tensor_parallel
        kept_bytes -= _RECOMPUTED.get(module, 0) / ranks
    for module in offloaded:
        saved = _OFFLOADED.get(module, _OffloadedBytes())
        kept_bytes -= saved.undivided / divided + saved.divided / tensor_parallel
    # A module may be both recomputed and offloaded, but saves its memory only once.
    kept_bytes = max(kept_bytes, 2 / divided)
    # A recomputed layer keeps only its input.
    holders_of_inputs = divided
    if divides_inputs:
        holders_of_inputs = tensor_parallel
    inputs = 2 * kept_inputs / holders_of_inputs
    kept_bytes = recomputed_layers * inputs + (1 - recomputed_layers) * kept_bytes
    # Recomputed or not, each of the four linear layers keeps two operands until W. One
    # of them is as wide as the model (a column-parallel layer's input, a row-parallel
    # layer's gradient), and the other is divided (3h/t, h/t, 4h/t and 4h/t). That adds
    # up to 8 + 24/t bytes, or 32/t if sequence parallelism divides the former and W
    # gathers them again.
    stash_bytes = 8.0
    if sequence_parallel and not keeps_gathered:
        stash_bytes = 8 / tensor_parallel
    stash_bytes += 24 / tensor_parallel
    sixteenths = ceil(16 * stash_bytes / kept_bytes)
    return max(1.0, sixteenths / 16)


def running_peak(changes: Iterable[float]) -> float:
    """Return the maximum of the changes' running sum, but at least 0.

    All memory peaks are computed this way, from the changes in the respective kind of memory.
    """
    return max(accumulate(changes, initial=0))


def most_alive(
    row: Row,
    stash_ratio: float = 1.0,
    slices: Sequence[float] = (1.0,),
    slice_sizes: Sequence[Sequence[float]] = (),
) -> float:
    """Return a row's peak of live activations, counted separately per stage and micro-batch.

    Args:
        row: A rank's actions.
        stash_ratio: Size of a weight stash, in activations.
        slices: Each slice's share of a micro-batch.
        slice_sizes: Slice sizes by micro-batch, if they differ (`Schedule.slice_sizes`).
    """
    kinds = [action.kind for action in row]
    present = set(kinds)
    # During evaluation, no backward pass needs activations, so only the current forward
    # pass's are alive.
    if present <= {"F"}:
        return len(present)
    change_of: dict[Kind, float] = {
        "F": 1,
        "B": -1,
        "I": stash_ratio - 1,
        "W": -stash_ratio,
    }
    if "R" in present:
        # R produces the activations that the backward pass needs, so forward passes in
        # the same row keep none.
        change_of["F"] = 0
        change_of["R"] = 1
    # Use `map` rather than a loop, because tables may have millions of actions.
    changes: Iterable[float] = map(change_of.__getitem__, kinds)
    if slice_sizes:
        sizes = [slice_sizes[action.microbatch][action.slice] for action in row]
        changes = map(mul, changes, sizes)
    elif len(slices) > 1:
        sizes = [slices[action.slice] for action in row]
        changes = map(mul, changes, sizes)
    return running_peak(changes)


def peak_of_row(row: Row, schedule: Schedule, stash_ratio: float = 1.0) -> float:
    """Return the peak of live activations of a row that runs actions of a schedule.

    The unit is one stage's activations for a whole micro-batch, the longest if lengths differ.
    """
    return most_alive(row, stash_ratio, schedule.slices, schedule.slice_sizes)


def _keys_and_values_changes(row: Row, schedule: Schedule) -> Iterator[float]:
    """Yield the changes in keys, values and their gradients, in micro-batches on one stage."""
    # If all micro-batches have the same length, their slices add up to 1.
    length_of: list[float] = [1] * schedule.num_microbatches
    if schedule.slice_sizes:
        length_of = [sum(sizes) for sizes in schedule.slice_sizes]
    for _, kind, microbatch, slice_index in row:
        length = length_of[microbatch]
        if kind == "F" and slice_index == 0:
            yield length  # keys and values, from the first forward pass on
        if kind in ("B", "I"):
            if slice_index == schedule.num_slices_of(microbatch) - 1:
                yield length  # their gradients, from the first backward pass on
            if slice_index == 0:
                yield -2 * length  # the last backward pass frees both


def activation_peaks(schedule: Schedule, stash_ratio: float = 1.0) -> tuple[float, ...]:
    """Return a schedule's peak activations, in Ma, by rank."""
    share = schedule.pp / schedule.num_stages
    peaks = []
    for row in schedule.rows:
        peak = peak_of_row(row, schedule, stash_ratio)
        peaks.append(share * peak)
    return tuple(peaks)


def measure(schedule: Schedule) -> Memory:
    """Return a schedule's peak memory."""
    activations = activation_peaks(schedule)
    if schedule.num_slices == 1:
        return Memory(activations)
    share = schedule.pp / schedule.num_stages
    keys_and_values = []
    for row in schedule.rows:
        changes = _keys_and_values_changes(row, schedule)
        keys_and_values.append(share * running_peak(changes))
    return Memory(activations, tuple(keys_and_values))


def slots_needed(schedule: Schedule) -> Mapping[Edge, int]:
    """Return how many receive slots every edge needs so that no send ever waits.

    Until the receiver uses an activation, that activation is still alive on the sender. Until the
    receiver uses a gradient, the corresponding activation is still alive on the receiver. In both
    directions and for any order of arrival, an edge therefore needs no more slots than the peak
    number of activations that are alive between F and B (or I) on the stages that the edge serves.
    """
    if schedule.disaggregated:
        return _slots_of_roles(schedule)
    slots: dict[Edge, int] = {}
    # By stage: the rank that receives its output. A twin has the same number as the
    # sending rank.
    receivers: list[int | None] = []
    for outputs in schedule.links["F"]:
        receiver = None
        for output in outputs:
            if output.link:
                receiver = output.link[1]
                break
        receivers.append(receiver)
    for rank, row in enumerate(schedule.rows):
        peak_by_receiver = _alive_by_group(row, receivers)
        for receiver, peak in peak_by_receiver.items():
            # Gradients come back over the same link, and the same activations bound
            # their number.
            slots[rank, receiver, "F"] = peak
            slots[receiver, rank, "B"] = peak
    if schedule.bypasses:
        _add_slots_of_bypasses(schedule, slots)
    return dict(sorted(slots.items()))


def _slots_of_roles(schedule: Schedule) -> dict[Edge, int]:
    """Return the slots for a disaggregated table.

    Forward passes do not wait for backward passes, so all micro-batches may be in flight on an edge
    at once.
    """
    edges: set[Edge] = set()
    for kind, outputs_by_stage in schedule.links.items():
        for stage, outputs in enumerate(outputs_by_stage):
            if kind == "F" and not schedule.runs_forward(stage):
                continue
            direction = "F" if kind == "F" else "B"
            for output in outputs:
                if output.link:
                    edges.add((*output.link, direction))
    return dict.fromkeys(sorted(edges), schedule.num_microbatches)


def _add_slots_of_bypasses(schedule: Schedule, slots: dict[Edge, int]) -> None:
    """Add the slots for bypasses to every edge.

    A tensor in a slot belongs to a micro-batch that is still alive on the sender. A gradient in a
    slot belongs to a micro-batch that is still alive on the receiver.
    """
    rank_of = schedule.placement.rank_of
    alive: dict[int, int] = {}
    for row in schedule.rows:
        alive |= _alive_by_group(row, range(schedule.num_stages))
    for bypass in schedule.bypasses:
        sender = rank_of[bypass.stage]
        receiver = rank_of[bypass.taker]
        edge = (sender, receiver, bypass.kind)
        holding_stage = bypass.stage if bypass.kind == "P" else bypass.taker
        slots[edge] = slots.get(edge, 0) + alive[holding_stage]


def most_bypasses(schedule: Schedule) -> int:
    """Return the maximum number of bypasses that a micro-batch sends between any two ranks."""
    rank_of = schedule.placement.rank_of
    count_by_link: Counter[tuple[int, int]] = Counter()
    for bypass in schedule.bypasses:
        if bypass.kind == "P":
            link = (rank_of[bypass.stage], rank_of[bypass.taker])
            count_by_link[link] += 1
    return max(count_by_link.values(), default=0)


def _alive_by_group(row: Row, group_of: Sequence[int | None]) -> dict[int, int]:
    """Return the peak number of activations alive between F and B (or I), by group of stages."""
    changes: dict[int, list[int]] = defaultdict(list)
    for stage, kind, _, _ in row:
        group = group_of[stage]
        if group is None or kind == "W":
            continue
        if kind == "F":
            changes[group].append(1)
        else:
            changes[group].append(-1)
    peaks: dict[int, int] = {}
    for group, group_changes in changes.items():
        peaks[group] = int(running_peak(group_changes))
    return peaks
