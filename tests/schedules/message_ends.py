"""Checks that the messages of a table have both ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.schedules.table.communication import exchanges

if TYPE_CHECKING:
    from megatron_ext.schedules import Schedule


def check_message_ends(table: Schedule) -> None:
    """Check that every message is sent once and received once, under a name unique to its ranks."""
    ends: dict[str, list[Any]] = {"SEND": [], "RECV": []}
    for rank in range(len(table.rows)):
        for exchange in exchanges(table, rank):
            for transfer in (*exchange.inputs, *exchange.outputs):
                if transfer.verb == "LOCAL":
                    continue
                sender, receiver = rank, transfer.peer
                if transfer.verb == "RECV":
                    sender, receiver = transfer.peer, rank
                message = (sender, receiver, transfer.to_twin, transfer.message)
                ends[transfer.verb].append(message)
    assert len(set(ends["SEND"])) == len(ends["SEND"]), "a name is unique for two ranks"
    assert sorted(ends["SEND"]) == sorted(ends["RECV"])
