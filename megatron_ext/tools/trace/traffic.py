"""The bytes that stages hand on in a step: as traced, and what they are under other schedules.

Counted are activations and gradients between stages, trees of tensors too, and tensors on routes
and their gradients. A boundary inside a rank sends nothing, so its size is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.tools.trace.survey import RankSurvey

__all__ = ["Traffic", "measured_traffic"]

_EQUAL = 0.01
"""Boundaries that differ by less than this part have one size."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of all micro-batches of one pipeline, or of two mirrored ones, in a step."""

    placement: Placement
    """Where the stages were when it was measured."""
    boundaries: Mapping[int, float]
    """By stage: between it and the next, in both directions, if that is on another rank."""
    routes: float
    """On routes, which depends on the placement."""

    def under(self, placement: Placement) -> int | None:
        """Return the bytes under a placement; None: the trace does not tell them."""
        if placement.rank_of == self.placement.rank_of and placement.hops == self.placement.hops:
            return round(sum(self.boundaries.values()) + self.routes)
        if self.routes:
            return None
        crossing = [stage for stage, hop in enumerate(placement.hops) if hop != "local"]
        same_stages = placement.num_stages == self.placement.num_stages
        known = self.boundaries if same_stages else {}
        sizes = [known.get(stage, self._size) for stage in crossing]
        found = [size for size in sizes if size is not None]
        return round(sum(found)) if len(found) == len(sizes) else None

    @property
    def _size(self) -> float | None:
        """The size of every boundary, if those that are known have one."""
        sizes = sorted(self.boundaries.values())
        if not sizes or sizes[0] < (1 - _EQUAL) * sizes[-1]:
            return None
        return sizes[-1]


def measured_traffic(surveys: Iterable[RankSurvey], placement: Placement) -> Traffic | None:
    """Return the traffic of a traced run; None: its ranks have recorded no message.

    Args:
        surveys: Of all ranks. Tensor-parallel ranks send their own bytes; replicas are averaged.
        placement: Where the stages were.
    """
    boundaries: dict[int, float] = defaultdict(float)
    routes = 0.0
    surveys = list(surveys)
    worlds = len({survey.header.data for survey in surveys}) / placement.twins
    for survey in surveys:
        for (kind, stage), num_bytes in survey.sent.items():
            of_step = num_bytes / max(survey.counted, 1) / worlds
            if kind in ("F", "B"):  # for this stage, of the one before or behind
                boundaries[stage - (kind == "F")] += of_step
            elif kind in ("P", "G"):
                routes += of_step
    crossing = {stage for stage, hop in enumerate(placement.hops) if hop != "local"}
    found = {stage: boundaries[stage] for stage in sorted(crossing & boundaries.keys())}
    return Traffic(placement, found, routes) if found else None
