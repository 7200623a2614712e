"""What names a message between ranks, from the table to the wire.

The tables of `megatron_ext/schedules` derive messages and the transports carry them; neither may
import the other, so the name that they share stands here, on the standard library alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["HOST_KINDS", "Message", "MessageKind"]

MessageKind = Literal["F", "B", "C", "D", "W"]
"""F: an activation. B: the gradient of one. C: a credit, which lets a rank run one more micro-batch
ahead. D: a decision of the rank that leads others. W: weights, and news about them."""

HOST_KINDS: frozenset[MessageKind] = frozenset(("C", "D"))
"""Kinds that the host acts on: their tensors never go to a device."""


class Message(NamedTuple):
    """Identity of a tensor that crosses ranks, unique in a step for each pair of ranks."""

    kind: MessageKind
    stage: int
    """F, B: the stage that needs it. C: the one that may begin a micro-batch. W: the one whose
    weights they are. D: 0."""
    microbatch: int
    """D: the number of the decision in the step. W: 0 says whether weights follow, n is their n-th
    bucket."""
    part: int = 0
    """F, B: which tensor of one hand-over it is, where stages exchange several. W: 1 for the layout
    of the buckets."""

    def __str__(self) -> str:
        """Return what an error message calls it."""
        kind, stage, microbatch, part = self
        if kind == "F":
            return f"the activation that stage {stage} needs for micro-batch {microbatch}"
        if kind == "B":
            return f"the gradient that stage {stage} needs for micro-batch {microbatch}"
        if kind == "C":
            return f"the credit of stage {stage} for micro-batch {microbatch}"
        if kind == "D":
            return f"decision {microbatch} of the leader"
        if part:
            return f"the layout of stage {stage}'s weights"
        if microbatch == 0:
            return f"the news about stage {stage}'s weights"
        return f"bucket {microbatch - 1} of stage {stage}'s weights"
