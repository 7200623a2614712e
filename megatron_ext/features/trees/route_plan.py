"""Messages on routes, which send tensors past the stages between the publisher and the takers.

A route has a name, one stage that publishes a tensor, and stages that take it. In the forward pass,
the publisher sends the tensor once to every rank that has takers. In the backward pass, the
gradient goes from the last taker to the one before it, which adds its own gradient, and so on back
to the publisher.

A table that completes without routes also completes with routes, because no route leads to an
earlier stage (`Bypass`).
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
    """The stages that take the tensor, in ascending order."""

    @property
    def links(self) -> Iterator[tuple[int, int]]:
        """Yield each gradient's (sender, receiver): from taker to taker, back to the publisher."""
        # Gradients are added in descending order of stages, as in a backward pass
        # without a pipeline, so the sum has the same bits under every placement.
        # Summing per rank would save messages when a rank has several takers, but the
        # bits would then depend on the placement.
        path = (*reversed(self.takers), self.source)
        return pairwise(path)


def connect(
    publishes: Sequence[Iterable[str]],
    takes: Sequence[Iterable[str]],
) -> tuple[Route, ...]:
    """Return a model's routes, sorted by name.

    `publishes` and `takes` give the route names by stage.

    Raises:
        ScheduleError: A name has several publishers, no publisher or no taker, or is taken by a
            stage before the publisher.
    """
    # name -> stage that publishes it
    sources: dict[str, int] = {}
    for stage, names in enumerate(publishes):
        for name in names:
            if name in sources:
                raise ScheduleError(
                    f"stages {sources[name]} and {stage} both publish the route {name!r}; give "
                    f"each tensor a different name"
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
                    f"publishes; take it in that stage or a later one"
                )
            takers[name].append(stage)
    for name, source in sources.items():
        if not takers[name]:
            raise ScheduleError(
                f"stage {source} publishes the route {name!r}, which no stage takes; remove it"
            )
    routes = []
    for name in sorted(sources):
        routes.append(Route(name, sources[name], tuple(takers[name])))
    return tuple(routes)


_Key = tuple[str, int]
"""(kind of action or message, stage)."""


@dataclass(frozen=True)
class RoutePlan:
    """The messages on all routes under one placement, and the lifetimes of their tensors."""

    bypasses: tuple[Bypass, ...]
    """The messages, each with the sorted names of its routes. A message's taker is the stage on the
    receiving rank that runs first among those that need one of the routes."""
    dropped: Mapping[_Key, Sequence[str]]
    """(F or B, stage) -> routes that the rank drops after this B, or in evaluation after this F."""

    @cached_property
    def sent(self) -> Mapping[_Key, Sequence[Bypass]]:
        """(message kind, sending stage) -> messages, in sending order."""
        sent: dict[_Key, list[Bypass]] = defaultdict(list)
        for bypass in self.bypasses:
            sent[bypass.kind, bypass.stage].append(bypass)
        return sent

    @cached_property
    def received(self) -> Mapping[_Key, Sequence[Bypass]]:
        """(message kind, receiving stage) -> messages, in reading order."""
        received: dict[_Key, list[Bypass]] = defaultdict(list)
        for bypass in self.bypasses:
            received[bypass.kind, bypass.taker].append(bypass)
        return received


class _Place(NamedTuple):
    """The place where a stage runs."""

    rank: int
    """Pipeline rank."""
    is_crossed: bool
    """Whether this stage runs the twin's micro-batches."""


class _Bundle(NamedTuple):
    """The routes that one stage sends to one place as a single message."""

    kind: Literal["P", "G"]
    stage: int
    """The sending stage."""
    place: _Place


_StagesOfRoute = dict[str, list[int]]
"""Route name -> the stages that receive its tensor or gradient."""


# Cached, because every step needs the same plan.
@cache
def plan_routes(routes: tuple[Route, ...], placement: Placement) -> RoutePlan:
    """Derive the messages on routes under a placement. Takers in the same place need none."""
    places = [
        _Place(rank, placement.is_crossed(stage))
        for stage, rank in enumerate(placement.rank_of)
    ]
    bypasses: list[Bypass] = []
    bundles = _bundles(routes, places)
    for bundle, stages_of_route in sorted(bundles.items()):
        receivers: set[int] = set()
        for stages in stages_of_route.values():
            receivers.update(stages)
        # Among several receiving stages on a rank, choose the one that runs first: the lowest in
        # the forward pass, and the highest in the backward pass.
        if bundle.kind == "P":
            taker = min(receivers)
        else:
            taker = max(receivers)
        sender_place = places[bundle.stage]
        names = tuple(sorted(stages_of_route))
        to_twin = bundle.place.is_crossed != sender_place.is_crossed
        bypass = Bypass(bundle.kind, bundle.stage, taker, names, to_twin)
        bypasses.append(bypass)
    return RoutePlan(tuple(bypasses), _dropped(routes, places))


def _bundles(
    routes: Sequence[Route],
    places: Sequence[_Place],
) -> dict[_Bundle, _StagesOfRoute]:
    """Return the messages on routes: message -> route name -> stages that receive it."""
    bundles: dict[_Bundle, _StagesOfRoute] = defaultdict(dict)
    for route in routes:
        source = route.source
        for taker in route.takers:
            if places[taker] != places[source]:
                bundle = _Bundle("P", source, places[taker])
                stages = bundles[bundle].setdefault(route.name, [])
                stages.append(taker)
        for taker, receiver in route.links:
            if places[taker] != places[receiver]:
                bundle = _Bundle("G", taker, places[receiver])
                stages = bundles[bundle].setdefault(route.name, [])
                stages.append(receiver)
    return bundles


def _dropped(
    routes: Sequence[Route],
    places: Sequence[_Place],
) -> Mapping[_Key, Sequence[str]]:
    """Return the routes that a rank drops after each action (`RoutePlan.dropped`)."""
    dropped: dict[_Key, list[str]] = defaultdict(list)
    for route in routes:
        # place -> stages for which the place keeps the route's tensor
        users: dict[_Place, list[int]] = defaultdict(list)
        for stage in (route.source, *route.takers):
            users[places[stage]].append(stage)
        for stages in users.values():
            # A place that has only the publisher sends the tensor and keeps nothing.
            if stages != [route.source]:
                # In evaluation, the last user is the highest stage, which runs forward
                # last. In training, the last user is the lowest stage, which runs
                # backward last.
                dropped["F", max(stages)].append(route.name)
                dropped["B", min(stages)].append(route.name)
    return dropped
