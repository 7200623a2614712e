"""Messages past stages: each has two ends, and no timing needs more slots than counted."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.schedules.table.communication import exchanges
from megatron_ext.schedules.table.memory import slots_needed
from tests.schedules.message_ends import check_message_ends
from tests.schedules.strategies import bypassed_schedules

if TYPE_CHECKING:
    from megatron_ext.schedules import Schedule


@given(table=bypassed_schedules())
def test_every_message_is_sent_and_received_once(table: Schedule) -> None:
    check_message_ends(table)


@given(table=bypassed_schedules(), draw=st.randoms(use_true_random=False))
def test_no_timing_needs_more_slots(table: Schedule, draw: random.Random) -> None:
    """Ranks run in any order that their inputs allow; nobody gets stuck."""
    slots = slots_needed(table)
    rows = [exchanges(table, rank) for rank in range(len(table.rows))]
    position = [0] * len(rows)
    under_way: Counter[tuple[int, int, str]] = Counter()
    arrived: set[object] = set()
    left = list(range(len(rows)))
    order = draw.sample(
        left, len(left)
    )  # one rank runs as far as it can, then the next
    while left:
        runnable = [
            r for r in order if r in left and _can_run(rows[r], position, r, arrived)
        ]
        assert runnable, "bypasses add no cycle"
        rank = runnable[0] if draw.random() < 0.7 else draw.choice(runnable)
        exchange = rows[rank][position[rank]]
        for needed in exchange.inputs:
            if needed.verb == "RECV":
                under_way[needed.peer, rank, needed.message.kind] -= 1
        for made in exchange.outputs:
            arrived.add((made.peer if made.verb == "SEND" else rank, made.message))
            if made.verb == "SEND":
                edge = rank, made.peer, made.message.kind
                under_way[edge] += 1
                assert under_way[edge] <= slots[edge]
        position[rank] += 1
        left = [rank for rank in left if position[rank] < len(rows[rank])]


def _can_run(row: Any, position: list[int], rank: int, arrived: set[object]) -> bool:
    return all(
        (rank, needed.message) in arrived for needed in row[position[rank]].inputs
    )
