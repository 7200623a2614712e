"""A hypothesis strategy: schedules of models with routes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import assume
from hypothesis import strategies as st

from megatron_ext.features.trees.route_plan import Route, plan_routes
from tests.schedules.strategies import schedules

if TYPE_CHECKING:
    from megatron_ext.schedules import Schedule


@st.composite
def routed_schedules(draw: st.DrawFn, largest: int = 8) -> Schedule:
    """A schedule with tensors that skip stages."""
    table = draw(schedules(largest=largest))
    assume(table.num_stages > 1 and not table.disaggregated)
    routes = []
    for index in range(draw(st.integers(1, 4))):
        source = draw(st.integers(0, table.num_stages - 2))
        takers = draw(st.sets(st.integers(source, table.num_stages - 1), min_size=1))
        routes.append(Route(f"r{index}", source, tuple(sorted(takers))))
    return replace(table, bypasses=plan_routes(tuple(routes), table.placement).bypasses)
