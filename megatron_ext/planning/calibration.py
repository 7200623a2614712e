"""Uses measurements to correct the estimated costs of model parts.

A measurement is stored as three factors: measured time divided by estimated time, for the
computation in the forward pass, the input gradient and the weight gradient. The factors therefore
apply to other shardings of a layer and other micro-batch sizes as well. Communication is always
estimated by formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.planning import layer_costs

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.layer_costs import Part, Sharding
    from megatron_ext.planning.model_sizes import ModelSizes

_MIN_FACTOR = 0.01
"""Lower limit, because the difference between two measurements may be zero or negative."""


class Passes(NamedTuple):
    """Times in seconds, or factors, for a part's three passes."""

    forward: float
    input: float
    weight: float


@lru_cache(maxsize=100_000)
def computation(
    model: ModelSizes,
    kind: Any,
    sharding: Sharding,
    device: DeviceKind,
    mode: frozenset[str],
) -> Part:
    """Return a part's estimated cost, excluding communication time."""
    instant_links = replace(
        device,
        link_bytes=1e30,
        network_bytes=1e30,
        message_s=0.0,
        hop_s=0.0,
    )
    return layer_costs.part_of(model, kind, sharding, instant_links, mode)


def part_of(
    model: ModelSizes,
    kind: Any,
    sharding: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> Part:
    """Return a part's cost (see `layer_costs.part_of`), corrected by the part's measurements.

    Multi-token prediction uses the measurements for its layer kind.
    """
    part = layer_costs.part_of(
        model,
        kind,
        sharding,
        device,
        mode,
        holds_embedding=holds_embedding,
    )
    measured_kind = model.mtp_kind if kind == "mtp" else kind
    factors = dict(device.measured).get(measured_kind)
    if factors is None:
        return part
    forward_factor, input_factor, weight_factor = factors
    # Scale only the computation in `part`, not the communication.
    computed = computation(model, kind, sharding, device, mode)
    # Handle recomputation separately, because the forward pass's factor applies to it,
    # not the input gradient's.
    plain = computation(model, kind, sharding, device, frozenset())
    recomputed_s = computed.input - plain.input
    return part._replace(
        forward=part.forward + (forward_factor - 1) * computed.forward,
        input=part.input
        + (input_factor - 1) * plain.input
        + (forward_factor - 1) * recomputed_s,
        weight=part.weight + (weight_factor - 1) * plain.weight,
    )


def parts_of(
    model: ModelSizes,
    sharding: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> tuple[list[Part], Part, Part]:
    """Return all layers and the extra parts of the first and last stages."""
    part_by_kind = {
        kind: part_of(model, kind, sharding, device, mode) for kind in set(model.kinds)
    }
    layers = [part_by_kind[kind] for kind in model.kinds]
    # Only layers are recomputed, so the embedding and the loss have no `mode`.
    first = part_of(model, "embedding", sharding, device)
    ends = [part_of(model, "loss", sharding, device, holds_embedding=holds_embedding)]
    if model.mtp_layers:
        ends.append(
            part_of(
                model,
                "mtp",
                sharding,
                device,
                mode,
                holds_embedding=holds_embedding,
            )
        )
    return layers, first, layer_costs.total(ends)


def factors(
    measured: Mapping[str, Passes], by_formula: Mapping[str, Part]
) -> tuple[tuple[str, Passes], ...]:
    """Return the parts' factors in the format of `DeviceKind.measured`."""
    factors_by_part = []
    for name, seconds in measured.items():
        part = by_formula[name]
        part_factors = Passes(
            _factor(seconds.forward, part.forward),
            _factor(seconds.input, part.input),
            _factor(seconds.weight, part.weight),
        )
        factors_by_part.append((name, part_factors))
    return tuple(factors_by_part)


def _factor(measured_s: float, formula_s: float) -> float:
    # Some passes take no time, such as an embedding's input gradient.
    if not formula_s:
        return 1.0
    return max(_MIN_FACTOR, measured_s / formula_s)
