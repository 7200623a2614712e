"""What one rank does in a step, as far as it is known before: looked up once, not at each action.

Between two actions a device waits for the host, so little should be left to do there. Ranks and
names of messages depend on the table and on the shapes only, which stay from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch.distributed as dist

from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    import torch

    from megatron_ext.messages import MessageKind
    from megatron_ext.schedules.representation.communication import Exchange, Transfer
    from megatron_ext.schedules.runtime.rank_table import Table
    from megatron_ext.schedules.search.queues import Post

__all__ = ["Ends", "Form", "Peers", "PipelineEnds", "Program", "Shapes", "make_program"]

Shapes = Mapping[str, Sequence[tuple[int, ...] | None]]
"""By kind (F, B): the shape of each tensor of one hand-over; None: it travels with the tensor."""


@dataclass(frozen=True)
class Peers:
    """Global ranks of those that this rank exchanges tensors with."""

    pipeline: Sequence[int]
    """By rank of the pipeline."""
    twin: int | None = None
    """The rank that holds the same stages in the mirrored pipeline."""
    mirrored: Sequence[int] = ()
    """By rank of the mirrored pipeline, where routes lead to others of it than the twin."""

    def with_mirrored(self, group: dist.ProcessGroup) -> Peers:
        """Return these with the ranks of the mirrored pipeline. Collective over this one."""
        if self.twin is None:
            return self
        ranks = [0] * group.size()
        dist.all_gather_object(ranks, self.twin, group=group)
        return replace(self, mirrored=tuple(ranks))

    def of(self, transfer: Transfer) -> int:
        """Return who is at the other end of a transfer."""
        if not transfer.to_twin:
            return self.pipeline[transfer.peer]
        if self.mirrored:
            return self.mirrored[transfer.peer]
        assert self.twin is not None
        return self.twin


class Form(NamedTuple):
    """What a tensor looks like that arrives."""

    shape: tuple[int, ...] | None
    """None: only the sender knows it."""
    dtype: torch.dtype
    part: int = 0
    """Of its message."""


class Ends(Protocol):
    """Who is at the other end of the transfers of a table, and what goes there."""

    @property
    def leads(self) -> bool:
        """Whether this rank, of two twins, sends before it receives; True without twins."""

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return the global ranks at the other end."""

    def forms(self, kind: MessageKind) -> Sequence[Form]:
        """Return what arrives here for one transfer of a kind, in the order in which it does."""

    def parts(self, transfer: Transfer) -> Sequence[int]:
        """Return the parts that a SEND or LOCAL moves, for each rank at the other end."""


@dataclass(frozen=True)
class PipelineEnds:
    """Those of an ordinary pipeline: one rank for each transfer, tensors of one dtype."""

    peers: Peers
    shapes: Shapes
    """Of what this rank receives."""
    dtype: torch.dtype
    rank: int
    """Of this process in the pipeline."""

    @property
    def leads(self) -> bool:
        """Whether this rank, of two twins, sends before it receives: the lower global rank."""
        return self.peers.twin is None or self.peers.pipeline[self.rank] < self.peers.twin

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return the one global rank at the other end."""
        return (self.peers.of(transfer),)

    def forms(self, kind: MessageKind) -> Sequence[Form]:
        """Return what arrives: the tensors of one hand-over."""
        return [Form(shape, self.dtype, i) for i, shape in enumerate(self.shapes[kind])]

    def parts(self, transfer: Transfer) -> Sequence[int]:
        """Return the numbers of the tensors; what goes forward has the shapes of its gradients."""
        return range(len(self.shapes["B" if transfer.message.kind == "F" else "F"]))


@dataclass(frozen=True)
class Program:
    """The exchanges of one rank by position in the table, and the messages that arrive.

    A peer is a global rank here, and each transfer one tensor: where a transfer of the table has
    several ranks at its other end, or several tensors, all ranks get the first tensor one after the
    other, then the second.
    """

    exchanges: tuple[Exchange, ...]
    expected: tuple[Expected, ...]
    """In the order that all ranks share."""


def make_program(table: Table, ends: Ends) -> Program:
    """Work out whom each tensor of a step comes from and goes to.

    Args:
        table: What this rank runs.
        ends: Whom it exchanges tensors with, and which.
    """
    resolved = tuple(_resolved(exchange, ends) for exchange in table.exchanges)
    if table.schedule.disaggregated:  # only over wires that match messages by name
        turns = [(transfer, 0) for transfer in table.arrivals]
    else:
        turns = _turns(table, resolved, leads=ends.leads)
    expected = (
        Expected(rank, transfer.message._replace(part=form.part), form.shape, form.dtype, after)
        for transfer, after in turns
        for form in ends.forms(transfer.message.kind)
        for rank in ends.ranks(transfer)
    )
    return Program(resolved, tuple(expected))


def _turns(
    table: Table, resolved: Sequence[Exchange], *, leads: bool
) -> list[tuple[Transfer, int]]:
    """Return what arrives in the order that all ranks share, and after how many calls."""
    each = (len(exchange.inputs) + len(exchange.outputs) for exchange in map(_on_wire, resolved))
    calls = list(accumulate(each, initial=0))
    return [
        (post.transfer, calls[post.before] + _num_taken(resolved, post))
        for post in table.order.posts(table.rank, leads=leads)
    ]


def _num_taken(resolved: Sequence[Exchange], post: Post) -> int:
    return len(_on_wire(resolved[post.before]).inputs) if post.taken else 0


def _on_wire(exchange: Exchange) -> Exchange:
    """Leave out what stays on this rank."""
    return exchange._replace(
        inputs=tuple(t for t in exchange.inputs if t.verb == "RECV"),
        outputs=tuple(t for t in exchange.outputs if t.verb == "SEND"),
    )


def _resolved(exchange: Exchange, ends: Ends) -> Exchange:
    return exchange._replace(
        awaits=tuple(_each(exchange.awaits, ends)),
        inputs=tuple(_each(exchange.inputs, ends)),
        grants=tuple(_each(exchange.grants, ends)),
        outputs=tuple(_each(exchange.outputs, ends)),
    )


def _each(transfers: Sequence[Transfer], ends: Ends) -> Iterator[Transfer]:
    for transfer in transfers:
        parts = ends.parts(transfer)
        if transfer.verb == "RECV":
            parts = [form.part for form in ends.forms(transfer.message.kind)]
        for part in parts:
            message = transfer.message._replace(part=part)
            if transfer.verb == "LOCAL":
                yield transfer._replace(message=message)
                continue
            for rank in ends.ranks(transfer):
                yield transfer._replace(message=message, peer=rank, to_twin=False)
