"""The name of a message between ranks, from the table to the wire.

The tables in `megatron_ext/schedules` name messages, and the transports carry them. Neither package
may import the other, so the shared name is defined here, using only the standard library.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MessageKind = Literal["F", "B", "C", "D", "W", "P", "G"]
"""F: an activation. B: the gradient of an activation. C: a credit, which lets a rank run one more
micro-batch ahead. D: a decision made by the leading rank. W: weights, and notices about them. P:
tensors that a stage publishes for a later stage, bypassing the stages in between. G: the gradients
of P."""

_OF_MICROBATCHES: dict[MessageKind, str] = {
    "F": "the activation that stage {} needs",
    "B": "the gradient that stage {} needs",
    "P": "the routes from stage {}",
    "G": "the gradient of routes from stage {}",
    "C": "the credit of stage {}",
}


class Message(NamedTuple):
    """Identity of a tensor sent between two ranks, unique within a step for these two ranks."""

    kind: MessageKind
    stage: int
    """F, B: the stage that needs the tensor. C: the stage that may start a micro-batch. W: the
    stage whose weights are sent. P, G: the stage that produced the tensor. D: 0."""
    microbatch: int
    """D: the decision's number within the step. W: 0 is the notice that says whether weights
    follow; n > 0 is the n-th bucket."""
    slice: int = 0
    """F, B, P, G: position of the slice within its micro-batch."""
    part: int = 0
    """F, B: index of the tensor if stages exchange several at once. P, G: 1 for the twin, which may
    receive different tensors from the same stage."""
    header: bool = False
    """F, P, W: the message describes how to interpret the tensors that follow under the same
    identity."""
    launched: bool = False
    """Whether this is a notice that the sender has launched the tensor's computation. The tensor
    follows."""

    @property
    def notice(self) -> Message:
        """The notice that the sender has launched this tensor's computation."""
        return self._replace(launched=True)

    @property
    def tensor(self) -> Message:
        """The tensor that a notice announces."""
        return self._replace(launched=False)

    @property
    def for_host(self) -> bool:
        """Whether the host reads the message, in which case it stays in host memory."""
        return self.header or self.kind in ("C", "D")

    def __str__(self) -> str:
        """Return the message's name for error texts."""
        kind, stage, microbatch, position = self[:4]
        if self.launched:
            return f"the launch of {self.tensor}"
        if kind in _OF_MICROBATCHES:
            tensor = _OF_MICROBATCHES[kind].format(stage)
            if position:
                return f"{tensor} for slice {position} of micro-batch {microbatch}"
            return f"{tensor} for micro-batch {microbatch}"
        if kind == "D":
            return f"decision {microbatch} of the leader"
        if self.header:
            return f"the layout of stage {stage}'s weights"
        if microbatch == 0:
            return f"the notice about stage {stage}'s weights"
        return f"bucket {microbatch - 1} of stage {stage}'s weights"
