"""Costs of parts of a model that were measured, in place of those of the device's description.

A measurement is kept as factors: seconds measured over seconds by formula, for the computation of a
forward, an input gradient and a weight gradient. So it holds for other shares of a layer and other
micro-batches, too; communication keeps its formula.
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

_LEAST = 0.01
"""Of a factor: a difference of two measurements can come out as nothing."""


class Passes(NamedTuple):
    """Seconds, or factors, of the three passes of a part."""

    forward: float
    input: float
    weight: float


@lru_cache(maxsize=100_000)
def computation(
    model: ModelSizes, kind: Any, by: Sharding, device: DeviceKind, mode: frozenset[str]
) -> Part:
    """Return what a part costs by formula where links take no time."""
    free = replace(device, link_bytes=1e30, network_bytes=1e30, message_s=0.0, hop_s=0.0)
    return layer_costs.part_of(model, kind, by, free, mode)


def part_of(
    model: ModelSizes,
    kind: Any,
    by: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> Part:
    """Return what a part costs, see `layer_costs.part_of`, with what was measured of it.

    Multi-token prediction counts as the layers that it has.
    """
    part = layer_costs.part_of(model, kind, by, device, mode, holds_embedding=holds_embedding)
    name = model.mtp_kind if kind == "mtp" else kind
    found = dict(device.measured).get(name)
    if found is None:
        return part
    alone = computation(model, kind, by, device, mode)
    plain = computation(model, kind, by, device, frozenset())
    again = alone.input - plain.input  # recomputed forwards
    return part._replace(
        forward=part.forward + (found[0] - 1) * alone.forward,
        input=part.input + (found[1] - 1) * plain.input + (found[0] - 1) * again,
        weight=part.weight + (found[2] - 1) * plain.weight,
    )


def parts_of(
    model: ModelSizes,
    by: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> tuple[list[Part], Part, Part]:
    """Return all layers, what the first stage has besides, and what the last has."""
    kinds = {kind: part_of(model, kind, by, device, mode) for kind in set(model.kinds)}
    ends = [part_of(model, "loss", by, device, holds_embedding=holds_embedding)]
    if model.mtp_layers:
        ends.append(part_of(model, "mtp", by, device, mode, holds_embedding=holds_embedding))
    first = part_of(model, "embedding", by, device)
    return [kinds[kind] for kind in model.kinds], first, layer_costs.total(ends)


def factors(
    measured: Mapping[str, Passes], by_formula: Mapping[str, Part]
) -> tuple[tuple[str, Passes], ...]:
    """Return the factors of parts, in the form of `DeviceKind.measured`."""
    found = []
    for name, seconds in measured.items():
        part = by_formula[name]
        expected = (part.forward, part.input, part.weight)
        ratios = [
            max(_LEAST, own / formula) if formula else 1.0
            for own, formula in zip(seconds, expected, strict=True)
        ]
        found.append((name, Passes(*ratios)))
    return tuple(found)
