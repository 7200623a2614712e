"""Hypothesis strategies: sizes, schedules of every registered generator, costs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.feature_list import TABLES
from megatron_ext.schedules import Costs, Schedule, generate, registered
from megatron_ext.schedules.table.actions import Bypass
from megatron_ext.schedules.table.table_change import in_use

TIMES = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.25, 2.0, 3.0])
EQUAL = st.builds(lambda time: Costs(time, time, time), TIMES)
UNEQUAL = st.builds(Costs, TIMES, TIMES, TIMES)
COSTS = EQUAL | UNEQUAL


@st.composite
def schedules(
    draw: st.DrawFn, name: str | None = None, largest: int = 24, *, slices: bool = True
) -> Schedule:
    """A schedule of any size that its generator accepts (by default, any generator).

    Some schedules have slices, and then fewer micro-batches.
    """
    generator = registered()[name or draw(st.sampled_from(list(registered())))]
    pp = draw(st.integers(1, 9))
    count = draw(st.integers(1, largest))
    options = {
        key: draw(st.sampled_from(values)) for key, values in generator.options.items()
    }
    chunks = draw(st.integers(2, 4)) if generator.free_chunks else None
    has_slices = slices and "slices" in TABLES
    num_slices = draw(st.sampled_from([1, 1, 1, 2, 3])) if has_slices else 1
    costs = (
        Costs(attention=draw(st.sampled_from([0.0, 0.4])))
        if num_slices > 1
        else Costs()
    )
    count = -(-count // num_slices)
    # Starting there, use the next sizes that the generator accepts.
    for ranks in (pp, pp + 1, 4):
        for number in range(count, count + 2 * ranks + 2):
            try:
                options |= in_use(slices=num_slices)
                return generate(generator.name, ranks, number, chunks, costs, **options)
            except ScheduleError:  # noqa: PERF203 - sizes are refused by an exception
                continue
    raise AssertionError(
        f"{generator.name} takes no size near pp {pp}, m {count}, {options}"
    )


@st.composite
def bypassed_schedules(draw: st.DrawFn, largest: int = 8) -> Schedule:
    """A schedule with messages past stages: tensors, and their gradients in the other direction."""
    table = draw(schedules(largest=largest))
    assume(table.num_stages > 1 and not table.disaggregated)
    placement = table.placement
    places = [
        (rank, placement.is_crossed(stage))
        for stage, rank in enumerate(placement.rank_of)
    ]
    bypasses: list[Bypass] = []
    for index in range(draw(st.integers(1, 6))):
        source = draw(st.integers(0, table.num_stages - 2))
        taker = draw(st.integers(source + 1, table.num_stages - 1))
        if places[source] == places[taker]:
            continue
        to_twin = places[source][1] != places[taker][1]
        bypasses.append(Bypass("P", source, taker, (f"t{index}",), to_twin))
        bypasses.append(Bypass("G", taker, source, (f"t{index}",), to_twin))
    # A stage sends at most one message of a kind to each place.
    by_place = {(b.kind, b.stage, places[b.taker]): b for b in bypasses}
    return replace(table, bypasses=tuple(by_place.values()))
