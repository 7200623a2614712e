"""The memory that a table needs, which follows from the order of actions alone.

The activations of one stage and micro-batch live from the start of F to the end of B, or of W if
the backward is split. The part that W needs after I is the *weight stash*. They are counted in Ma:
the activations of one micro-batch for 1/pp of the model, so one stage holds pp/num_stages of it.

Most layers hold less after I than before. Layers that are recomputed, or that keep their gathered
input for W, hold more: the *stash ratio* is what a micro-batch holds between I and W over what it
holds between F and I.

A slice holds its share of a micro-batch's activations. Keys and values of a micro-batch in slices
live from its first F to its last backward, and as much again for their gradients from its first
backward on. They are counted apart, because their size depends on the heads of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import mul
from typing import TYPE_CHECKING

from megatron_ext.schedules.table.route_plan import plan_routes

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Row, Schedule

Edge = tuple[int, int, str]
"""(sending rank, receiving rank, kind of message); equal ranks: to the twin."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of each rank, in Ma unless another unit is named."""

    activations: tuple[float, ...]
    keys_and_values: tuple[float, ...] = ()
    """Keys and values of micro-batches in slices, and their gradients: 1 is those of one
    micro-batch on 1/pp of the model; empty without slices."""


# Memory that a layer saves between F and I if Megatron recomputes a module, in bytes for each token
# and unit of width: outputs of the norms; queries, keys and values; input and output of the
# activation function. Attention itself keeps nothing more than its operands.
_RECOMPUTED = {"layernorm": 4, "mla_up_proj": 6, "mlp": 16, "moe": 16, "moe_act": 8}

# The same if Megatron offloads a module until its backward: of tensors as wide as the model, and of
# those that tensor-parallel ranks divide.
_OFFLOADED = {
    "attn_norm": (2, 0),
    "qkv_linear": (2, 0),
    "core_attn": (0, 6),
    "attn_proj": (0, 2),
    "mlp_norm": (2, 0),
    "expert_fc1": (2, 0),
    "moe_act": (0, 8),
    "fused_group_mlp": (2, 16),
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
    """Return the stash ratio of a transformer layer: bytes held for W over bytes held for I.

    The layer has width h and a feed-forward network of 4h, in 16 bits; what it keeps is that of
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    Layers of Transformer Engine keep what they gathered from I to W (`keeps_gathered`). Modules
    have Megatron's names; inputs of `offloaded` ones are on the host until I, which leaves the
    operands of W on the device. A share of the layers, `recomputed_layers`, is recomputed whole;
    each keeps `kept_inputs` inputs, 1/n if n layers are recomputed at once, which tensor-parallel
    ranks may divide without sequence parallelism too (`divides_inputs`).

    Returns:
        A ratio of at least 1, a multiple of 1/16, so that sums of it are exact.
    """
    t = tensor_parallel
    divided = t if sequence_parallel else 1
    # For each token and unit of width: 10 + 24/t bytes, 34/t with sequence parallelism.
    kept = 10 / divided + 24 / t
    # A recomputed expert layer includes its activation function, which counts once.
    for module in set(recomputed) - ({"moe_act"} if "moe" in recomputed else set()):
        kept -= _RECOMPUTED.get(module, 0) / (divided if module == "layernorm" else t)
    for module in offloaded:
        of_width, of_ranks = _OFFLOADED.get(module, (0, 0))
        kept -= of_width / divided + of_ranks / t
    kept = max(kept, 2 / divided)  # modules may be recomputed and offloaded
    # A recomputed layer keeps only its input.
    inputs = 2 * kept_inputs / (t if divides_inputs else divided)
    kept = recomputed_layers * inputs + (1 - recomputed_layers) * kept
    # The four linear layers keep two operands each until W, recomputed or not: one is as wide as
    # the model (the input of a column-parallel layer, the gradient of a row-parallel one), the
    # other divided (3h/t, h/t, 4h/t and 4h/t). That makes 8 + 24/t bytes, and 32/t if sequence
    # parallelism divides the first ones and W gathers them again.
    stash = (8 if keeps_gathered or not sequence_parallel else 8 / t) + 24 / t
    return max(1.0, ceil(16 * stash / kept) / 16)


def most_alive(row: Row, stash_ratio: float = 1.0, slices: Sequence[float] = (1.0,)) -> float:
    """Return the most activations (one stage, one micro-batch) that a row keeps at once.

    A weight stash counts `stash_ratio` times the activations, each slice its share.
    """
    kinds = [action.kind for action in row]
    found = set(kinds)
    if found <= {"F"}:  # no backward needs them
        return len(found)
    opens = {"F": 0, "R": 1} if "R" in found else {"F": 1, "R": 0}
    changes = {**opens, "B": -1, "I": stash_ratio - 1, "W": -stash_ratio}
    # Without a step of a loop for each action: tables have millions.
    taken = map(changes.__getitem__, kinds)
    if len(slices) > 1:
        taken = map(mul, taken, [slices[action.slice] for action in row])
    return max(accumulate(taken, initial=0))


def _keys_peak(row: Row, num_slices: int) -> int:
    """Return the peak of keys and values, or their gradients, of a micro-batch on one stage."""
    kept = peak = 0
    for _, kind, _, part in row:
        if kind == "F":
            kept += part == 0
        elif kind in ("B", "I"):
            kept += part == num_slices - 1
        peak = max(peak, kept)
        # The last backward of a micro-batch ends both, the keys and values and their gradients.
        if kind in ("B", "I") and part == 0:
            kept -= 2
    return peak


def activation_peaks(schedule: Schedule, stash_ratio: float = 1.0) -> tuple[float, ...]:
    """Return the peak of activations on each rank of a schedule, in Ma."""
    share = schedule.pp / schedule.num_stages
    return tuple(share * most_alive(row, stash_ratio, schedule.slices) for row in schedule.rows)


def measure(schedule: Schedule) -> Memory:
    """Return the peak memory of a schedule."""
    share, rows, count = schedule.pp / schedule.num_stages, schedule.rows, schedule.num_slices
    return Memory(
        activation_peaks(schedule),
        tuple(share * _keys_peak(row, count) for row in rows) if count > 1 else (),
    )


def slots_needed(schedule: Schedule) -> Mapping[Edge, int]:
    """Return the number of receive slots on each edge with which no send ever waits.

    An activation that its receiver has not used yet is still alive at its sender, and an unused
    gradient belongs to an activation that is alive at its receiver. So the peak of activations
    alive between F and B (or I), on the stages that an edge serves, is enough for either direction,
    in any order of arrival.
    """
    slots: dict[Edge, int] = {}
    if schedule.disaggregated:
        # Forwards do not wait for backwards, so all micro-batches may be in flight on each edge.
        for kind, of_stages in schedule.links.items():
            for stage, fed in enumerate(of_stages):
                for _, link in fed if schedule.runs_forward(stage) or kind != "F" else ():
                    if link:
                        edge = (*link, "F" if kind == "F" else "B")
                        slots[edge] = schedule.num_microbatches
        return dict(sorted(slots.items()))
    # The rank that takes each stage's output; the twin counts as that rank itself.
    takers = [next((link[1] for _, link in fed if link), None) for fed in schedule.links["F"]]
    for rank, row in enumerate(schedule.rows):
        for peer, peak in _most_by_group(row, takers).items():
            slots[rank, peer, "F"] = slots[peer, rank, "B"] = peak
    # A tensor of a route that waits for its taker is of a micro-batch that is alive in its
    # publisher; a gradient that waits is of one that is alive in the stage that takes it.
    rank_of = schedule.placement.rank_of
    alive: dict[int, int] = {}
    for row in schedule.rows if schedule.routes else ():
        alive |= _most_by_group(row, range(schedule.num_stages))
    for hops in plan_routes(schedule.routes, schedule.placement).sent.values():
        for hop in hops:
            edge = (rank_of[hop.stage], rank_of[hop.taker], hop.kind)
            waits = alive[hop.stage if hop.kind == "P" else hop.taker]
            slots[edge] = slots.get(edge, 0) + waits
    return dict(sorted(slots.items()))


def _most_by_group(row: Row, group_of: Sequence[int | None]) -> dict[int, int]:
    """Return the peak of activations between F and B (or I), by the group of their stage."""
    alive: dict[int, int] = {}
    peak: dict[int, int] = {}
    for stage, kind, _, _ in row:
        group = group_of[stage]
        if group is None or kind == "W":
            continue
        alive[group] = count = alive.get(group, 0) + (1 if kind == "F" else -1)
        if count > peak.get(group, 0):
            peak[group] = count
    return peak
