"""Simulations of policies that were tried beside `hint`, with the same tables and draws.

All hold as many activations as `hint +0`, except the one below each rank's own peak, which holds
fewer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.greedy import Problem, Variant, search, spread
from megatron_ext.schedules.search.patience import policies, quiet, waits_of
from megatron_ext.schedules.search.policies import Hint, activation_cap
from megatron_ext.schedules.table.memory import live_counts

from . import expected
from .systems import Own, disturbed_systems

if TYPE_CHECKING:
    from megatron_ext.schedules import Schedule
    from megatron_ext.schedules.search.policies import Policy

    from .ops import Sizes

__all__ = ["markdown"]

_SCENARIOS = (
    "quiet", "jitter-0.3", "jitter-0.6", "microbatch-0.5", "spikes", "link-0.5", "slow-hop",
    "uneven",
)  # fmt: skip
_TABLES = ("interleaved chunks=2, static, split", "bitpipe order=paper, static, split")
_WITHOUT_ROOM = ("zb-v", "zb-h1", "v-half")
"""Tables with places for W, which jumps can make slower."""


class _BackwardsFirst(Hint):
    """Any backward that is ready, before every forward."""

    def _first(self) -> list[int] | None:
        return self.progress.backwards or super()._first()


class _ForwardsFirst(Hint):
    """Any forward that has room, before every backward: what has the longest way to go."""

    def _first(self) -> list[int] | None:
        forwards = self.progress.forwards
        if forwards and self._is_admissible(forwards[0]):
            return forwards
        return super()._first()


class _RoomFirst(Hint):
    """W where it makes room for a forward that waits for some."""

    def _first(self) -> list[int] | None:
        progress = self.progress
        waits = progress.forwards and not self._is_admissible(progress.forwards[0])
        return progress.weights if waits and progress.weights else super()._first()


class _OldWeightsFirst(Hint):
    """W before what comes many actions later in the table."""

    lag = 8

    def _first(self) -> list[int] | None:
        best, weights = super()._first(), self.progress.weights
        if best and weights and weights[0] < best[0] - self.lag:
            return weights
        return best


_Make = Callable[["Schedule", int], Hint]


def _by(policy: type[Hint], *, weights_fill: bool = True) -> _Make:
    return lambda table, rank: policy(table, rank, activation_cap(table), weights_fill=weights_fill)


def _own_peaks(table: Schedule, rank: int) -> Hint:
    return Hint(table, rank, max(live_counts(table.rows[rank])), weights_fill=True)


_POLICIES: dict[str, _Make] = {
    "hint": _by(Hint),
    "hint, each rank below its own peak": _own_peaks,
    "hint, W where the table has it": _by(Hint, weights_fill=False),
    "hint, W after 8 actions at most": _by(_OldWeightsFirst),
    "hint, W first where a forward needs room": _by(_RoomFirst),
    "backwards first": _by(_BackwardsFirst),
    "forwards first": _by(_ForwardsFirst),
}


def markdown(sizes: Sizes) -> str:
    """Return one table for each schedule, of speeds over its own order with split backwards."""
    systems = {system.name: system for system in disturbed_systems()}
    texts = []
    for name in _TABLES:
        system = systems[name]
        assert isinstance(system, Own)
        texts += _section(system, sizes, _rows(system, sizes))
    for name in _WITHOUT_ROOM:
        system = Own(name, name)
        texts += _section(system, sizes, _patient_rows(system, sizes))
    return "\n\n".join(texts)


def _section(system: Own, sizes: Sizes, rows: Iterator[list[str]]) -> list[str]:
    lines = [["policy", *_SCENARIOS], ["---"] * (1 + len(_SCENARIOS)), *rows]
    return [
        f"Policies on the {system.schedule} table, {sizes.pp} ranks, at +0:",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
    ]


def _rows(system: Own, sizes: Sizes) -> Iterator[list[str]]:
    pipeline = system.pipeline(sizes.pp, sizes.num_microbatches)
    table = pipeline.full
    for name, make in _POLICIES.items():
        yield [name, *_speeds(system, sizes, table, partial(make, table))]
    searched = _searched(table)
    hint = partial(_by(Hint), searched)
    yield ["hint over a searched order", *_speeds(system, sizes, table, hint, searched)]


def _patient_rows(system: Own, sizes: Sizes) -> Iterator[list[str]]:
    table = generate(system.schedule, sizes.pp, sizes.num_microbatches)
    made = {
        "hint": policies("hint", table),
        "hint, head never waited for": partial(_by(Hint, weights_fill=False), table),
        "hint, head waited for as in the table": _waiting(table, float("inf")),
        "hint, the same for 0.1 forwards at most": _waiting(table, 0.1),
        "hint, W fills": partial(_by(Hint), table),
    }
    for name, policy in made.items():
        yield [name, *_speeds(system, sizes, table, policy)]


def _waiting(table: Schedule, most: float) -> Callable[[int], Hint]:
    static = simulate(table, quiet())
    cap = activation_cap(table)

    def make(rank: int) -> Hint:
        found = waits_of(static, rank)
        patience = replace(found, waits=[min(wait, most) for wait in found.waits])
        return Hint(table, rank, cap, weights_fill=False, patience=patience)

    return make


def _speeds(
    system: Own,
    sizes: Sizes,
    static: Schedule,
    policy: Callable[[int], Policy],
    table: Schedule | None = None,
) -> Iterator[str]:
    for name in _SCENARIOS:
        found = []
        for number in range(sizes.steps):
            costs = expected.costs_of(system, sizes, name, number)
            dynamic = simulate_dynamic(table or static, policy, costs)
            found.append(simulate(static, costs).makespan / dynamic.makespan)
        yield f"{statistics.median(found):.3f}"


def _searched(table: Schedule) -> Schedule:
    """Return the same actions in the order that is best while nothing is late, in that memory."""
    problem = Problem(
        table.placement, table.num_microbatches, activation_cap(table), Costs(latency=0.01)
    )
    return replace(table, rows=search(problem, [Variant(), *map(Variant, spread(1, 2 * table.pp))]))
