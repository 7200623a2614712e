"""Messages of routes, which carry tensors past the stages between publisher and takers.

A route is a name, the stage that publishes it, and the stages that take it. In the forward, the
publisher sends the tensor once to each rank with takers. In the backward, the gradient goes from
the last taker to the previous taker, which adds its gradient, and so on down to the publisher.

A table that completes without routes completes with them, because no route leads to an earlier
stage (`Bypass`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Bypass

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement


class Route(NamedTuple):
    """A tensor that one stage publishes and later stages take."""

    name: str
    source: int
    """The stage that publishes the tensor."""
    takers: tuple[int, ...]
    """The stages that take the tensor, ascending."""

    @property
    def links(self) -> Iterator[tuple[int, int]]:
        """Yield (sender, receiver) of each gradient: from taker to taker, down to the publisher."""
        # Gradients are added in descending stage order, as in the backward of an unpipelined model,
        # so the sum has the same bits under every placement. Summing per rank first would save
        # messages if a rank has several takers, but the bits would depend on the placement.
        return pairwise((*reversed(self.takers), self.source))


def connect(
    publishes: Sequence[Iterable[str]], takes: Sequence[Iterable[str]]
) -> tuple[Route, ...]:
    """Return the routes of a model, sorted by name.

    `publishes` and `takes` hold the names by stage.

    Raises:
        ScheduleError: A name has several publishers, no publisher or no taker, or a stage before
            its publisher takes it.
    """
    sources: dict[str, int] = {}
    for stage, names in enumerate(publishes):
        for name in names:
            if name in sources:
                raise ScheduleError(
                    f"stages {sources[name]} and {stage} both publish the route {name!r}; give "
                    f"each tensor a name of its own"
                )
            sources[name] = stage
    takers: dict[str, list[int]] = {name: [] for name in sources}
    for stage, names in enumerate(takes):
        for name in names:
            if name not in sources:
                raise ScheduleError(
                    f"stage {stage} takes the route {name!r}, which no stage publishes; publish it "
                    f"in this stage or an earlier one"
                )
            if stage < sources[name]:
                raise ScheduleError(
                    f"stage {stage} takes the route {name!r}, which stage {sources[name]} "
                    f"publishes; a route leads to its own stage or a later one"
                )
            takers[name].append(stage)
    for name, source in sources.items():
        if not takers[name]:
            raise ScheduleError(
                f"stage {source} publishes the route {name!r}, which no stage takes; leave it out"
            )
    return tuple(
        Route(name, sources[name], tuple(takers[name])) for name in sorted(sources)
    )


@dataclass(frozen=True)
class RoutePlan:
    """The messages of all routes under one placement, and the lifetime of their tensors."""

    bypasses: tuple[Bypass, ...]
    """The messages, each with the sorted names of the routes that it carries. The taker of a
    message is the first stage to run on its rank that needs any of them."""
    dropped: Mapping[tuple[str, int], Sequence[str]]
    """By (F or B, stage): routes that the rank drops after this B, or after this F in
    evaluation."""

    @cached_property
    def sent(self) -> Mapping[tuple[str, int], Sequence[Bypass]]:
        """By (message kind, sending stage), in sending order."""
        sent = defaultdict[tuple[str, int], list[Bypass]](list)
        for bypass in self.bypasses:
            sent[bypass.kind, bypass.stage].append(bypass)
        return sent

    @cached_property
    def received(self) -> Mapping[tuple[str, int], Sequence[Bypass]]:
        """By (message kind, receiving stage)."""
        received = defaultdict[tuple[str, int], list[Bypass]](list)
        for bypass in self.bypasses:
            received[bypass.kind, bypass.taker].append(bypass)
        return received


class _Place(NamedTuple):
    """Where a stage runs."""

    rank: int
    """Pipeline rank."""
    is_crossed: bool
    """Whether the twin's micro-batches run there."""


class _Bundle(NamedTuple):
    """The routes that one stage sends to one place, as one message."""

    kind: Literal["P", "G"]
    stage: int
    """The sending stage."""
    place: _Place


@cache
def plan_routes(routes: tuple[Route, ...], placement: Placement) -> RoutePlan:
    """Derive the messages of routes under a placement. Takers on the same rank need no message."""
    places = [
        _Place(rank, placement.is_crossed(stage))
        for stage, rank in enumerate(placement.rank_of)
    ]
    bypasses: list[Bypass] = []
    for bundle, stages_by_route in sorted(_bundles(routes, places).items()):
        receivers: set[int] = set()
        for stages in stages_by_route.values():
            receivers.update(stages)
        # Among several takers on a rank, choose the one that runs first: forwards go up the stages,
        # backwards down.
        taker = min(receivers) if bundle.kind == "P" else max(receivers)
        to_twin = bundle.place.is_crossed != places[bundle.stage].is_crossed
        names = tuple(sorted(stages_by_route))
        bypasses.append(Bypass(bundle.kind, bundle.stage, taker, names, to_twin))
    return RoutePlan(tuple(bypasses), _dropped(routes, places))


def _bundles(
    routes: Sequence[Route], places: Sequence[_Place]
) -> dict[_Bundle, dict[str, list[int]]]:
    """Return the messages of routes, each with its routes and the stages that take them."""
    bundles: dict[_Bundle, dict[str, list[int]]] = defaultdict(dict)
    for route in routes:
        source = route.source
        for taker in route.takers:
            if places[taker] != places[source]:
                bundle = _Bundle("P", source, places[taker])
                bundles[bundle].setdefault(route.name, []).append(taker)
        for taker, receiver in route.links:
            if places[taker] != places[receiver]:
                bundle = _Bundle("G", taker, places[receiver])
                bundles[bundle].setdefault(route.name, []).append(receiver)
    return bundles


def _dropped(
    routes: Sequence[Route], places: Sequence[_Place]
) -> Mapping[tuple[str, int], Sequence[str]]:
    """Return which routes a rank drops after which action (`RoutePlan.dropped`)."""
    dropped = defaultdict[tuple[str, int], list[str]](list)
    for route in routes:
        # By place: the stages for which the place keeps the route's tensor.
        users: dict[_Place, list[int]] = defaultdict(list)
        for stage in (route.source, *route.takers):
            users[places[stage]].append(stage)
        for stages in users.values():
            # A place that only publishes sends the tensor and keeps nothing.
            if stages != [route.source]:
                dropped["F", max(stages)].append(route.name)
                dropped["B", min(stages)].append(route.name)
    return dropped
