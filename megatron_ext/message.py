"""The name of a message between ranks, from the table to the wire.

The tables of `megatron_ext/schedules` derive messages, and the transports carry them. Neither may
import the other, so their shared name is defined here, with the standard library only.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["HEADER", "LAUNCHED", "Message", "MessageKind"]

MessageKind = Literal["F", "B", "C", "D", "W", "P", "G"]
"""F: an activation. B: the gradient of one. C: a credit, which lets a rank run one more micro-batch
ahead. D: a decision of the rank that leads others. W: weights, and news about them. P: tensors that
a stage published on routes. G: their gradients."""

HEADER = 7
"""The part of F and P that says what the tensors of a hand-over are."""

LAUNCHED = 8
"""Added to the part: not the tensor, but the news that its sender's device will compute it."""

_OF_MICROBATCHES: dict[MessageKind, str] = {
    "F": "the activation that stage {} needs",
    "B": "the gradient that stage {} needs",
    "P": "what stage {} published",
    "G": "the gradient of routes from stage {}",
    "C": "the credit of stage {}",
}

_HOST_KINDS: frozenset[MessageKind] = frozenset(("C", "D"))


class Message(NamedTuple):
    """Identity of a tensor that crosses ranks, unique in a step for each pair of ranks."""

    kind: MessageKind
    stage: int
    """F, B: the stage that needs it. C: the one that may begin a micro-batch. W: the one whose
    weights they are. P, G: the one that made it. D: 0."""
    microbatch: int
    """D: the number of the decision, or of the action, in the step. W: 0 says whether weights
    follow, n is their n-th bucket."""
    part: int = 0
    """F, B: which tensor of one hand-over it is, where stages exchange several; F, P: `HEADER` for
    what says how to read them. W: 1 for the layout of the buckets. D: 1 for what a rank tells
    itself, that its device has ended an action."""

    @classmethod
    def end_of(cls, number: int) -> Message:
        """Return what a rank tells itself when its device has ended an action of the step."""
        return cls("D", 0, number, 1)

    @property
    def is_own(self) -> bool:
        """Whether a rank tells it itself."""
        return self.kind == "D" and self.part == 1

    @property
    def launch(self) -> Message:
        """The news that the sender has launched what computes this tensor."""
        return self._replace(part=self.part | LAUNCHED)

    @property
    def is_launch(self) -> bool:
        """Whether it is such news."""
        return bool(self.part & LAUNCHED)

    @property
    def launched(self) -> Message:
        """The tensor that such news is about."""
        return self._replace(part=self.part & ~LAUNCHED)

    @property
    def for_host(self) -> bool:
        """Whether the host acts on it: its tensor never goes to a device."""
        return self.kind in _HOST_KINDS or (self.part == HEADER and self.kind in ("F", "P"))

    def __str__(self) -> str:
        """Return its name for error messages."""
        kind, stage, microbatch, part = self
        if self.is_launch:
            return f"the launch of {self.launched}"
        if kind in _OF_MICROBATCHES:
            return _OF_MICROBATCHES[kind].format(stage) + f" for micro-batch {microbatch}"
        if self.is_own:
            return f"the end of action {microbatch} on this rank's device"
        if kind == "D":
            return f"decision {microbatch} of the leader"
        if part:
            return f"the layout of stage {stage}'s weights"
        if microbatch == 0:
            return f"the news about stage {stage}'s weights"
        return f"bucket {microbatch - 1} of stage {stage}'s weights"
