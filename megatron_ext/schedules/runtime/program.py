"""What one rank does in a step, as far as it is known before: looked up once, not at each action.

Between two actions a device waits for the host, so little should be left to do there. Ranks, keys
of messages and the like depend on the table and on the shapes only, which stay from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.messages import Message
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.representation.messages import Operation, Transfer
    from megatron_ext.schedules.runtime.tables import Table

__all__ = ["Peers", "Program", "Shapes", "Work", "make_program"]

Shapes = Mapping[str, Sequence[tuple[int, ...] | None]]
"""By kind (F, B): the shape of each tensor of one hand-over; None: it travels with the tensor."""


@dataclass(frozen=True)
class Peers:
    """Global ranks of those that this rank exchanges tensors with."""

    pipeline: Sequence[int]
    """By rank of the pipeline."""
    twin: int | None = None
    """The rank that holds the same stages in the mirrored pipeline."""

    def of(self, transfer: Transfer) -> int:
        """Return who is at the other end of a transfer."""
        if not transfer.to_twin:
            return self.pipeline[transfer.peer]
        assert self.twin is not None
        return self.twin


class Work(NamedTuple):
    """One action and where its tensors come from and go to."""

    action: Action
    source: int | None
    """Global rank that sends the inputs; None: nobody does."""
    arriving: tuple[Message, ...]
    """The messages from there."""
    handed: Message | None
    """Under which the stage before, on this rank, leaves the inputs, if it does; None for W."""
    num_inputs: int
    """Of an action without inputs: so many None."""
    target: int | None
    """Global rank that the results go to; None: they stay, or there are none."""
    leaving: tuple[Message, ...]
    """The messages to there."""
    left: Message | None
    """Under which the results stay for the next stage of this rank."""


@dataclass(frozen=True)
class Program:
    """All of it, by position in the table, and the messages that arrive."""

    works: tuple[Work, ...]
    expected: tuple[Expected, ...]
    """In the order that all ranks share."""


def make_program(table: Table, peers: Peers, shapes: Shapes, dtype: torch.dtype) -> Program:
    """Look everything up.

    Args:
        table: What this rank runs.
        peers: Whom it exchanges tensors with.
        shapes: Of what it receives: activations (F) and gradients (B).
        dtype: Of these tensors.
    """
    works = tuple(_work(operation, peers, shapes) for operation in table.operations)
    leads = peers.twin is None or peers.pipeline[table.rank] < peers.twin
    calls = _calls_before(works)
    expected = (
        Expected(
            peers.of(post.transfer),
            post.transfer.message._replace(part=part),
            shape,
            dtype,
            calls[post.before] + (len(works[post.before].arriving) if post.taken else 0),
        )
        for post in table.order.posts(table.rank, leads=leads)
        for part, shape in enumerate(shapes[post.transfer.message.kind])
    )
    return Program(works, tuple(expected))


def _calls_before(works: Sequence[Work]) -> list[int]:
    """Return how many messages are taken and sent before each action, and before the end."""
    each = (len(work.arriving) + len(work.leaving) for work in works)
    return list(accumulate(each, initial=0))


def _work(operation: Operation, peers: Peers, shapes: Shapes) -> Work:
    action, needs, makes = operation.action, operation.needs, operation.makes
    is_forward = action.kind == "F"
    sends = makes is not None and makes.verb == "SEND"
    message = Message("F" if is_forward else "B", action.stage, action.microbatch)
    # What is sent forward has the shapes of the gradients that come back for it.
    num_sent = len(shapes["B" if is_forward else "F"])
    return Work(
        action=action,
        source=None if needs is None else peers.of(needs),
        arriving=() if needs is None else _keys(needs.message, len(shapes[needs.message.kind])),
        handed=None if action.kind == "W" or needs is not None else message,
        # The first stage has data and no input, the last stage a loss and no gradient.
        num_inputs=len(shapes["F"]) if is_forward else 1,
        target=peers.of(makes) if makes is not None and sends else None,
        leaving=_keys(makes.message, num_sent) if makes is not None and sends else (),
        left=makes.message if makes is not None and not sends else None,
    )


def _keys(message: Message, num_parts: int) -> tuple[Message, ...]:
    return tuple(message._replace(part=part) for part in range(num_parts))
