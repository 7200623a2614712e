"""The encoding of a message's name in the 64 bits that the native core's wires have for it."""

from __future__ import annotations

from megatron_ext.errors import TransportError
from megatron_ext.messages import Message, MessageKind

__all__ = ["NOTE", "NUM_STEPS", "Tags"]

# A tag is, from the highest bit: kind 3, part 3, stage 11, micro-batch 24, step 23.
_KINDS: dict[MessageKind, int] = {"F": 0, "B": 1, "C": 2, "D": 3, "W": 4, "P": 5, "G": 6}
_MAX_PARTS, _MAX_STAGES, _MAX_MICROBATCHES = 1 << 3, 1 << 11, 1 << 24

NUM_STEPS = 1 << 23
"""Steps that tags tell apart; the number of the step is added to a tag."""

NOTE = 7 << 61
"""Tag of what transports tell each other besides messages: a kind that no message has."""


class Tags(dict[Message, int]):
    """Tags of messages, in step 0. Each is computed once: every step has the same messages."""

    def __missing__(self, message: Message) -> int:
        """Compute a tag.

        Raises:
            TransportError: A number of the message is too large for its bits.
        """
        if (
            message.stage >= _MAX_STAGES
            or message.microbatch >= _MAX_MICROBATCHES
            or message.part >= _MAX_PARTS
        ):
            raise TransportError(
                f"{message} has no tag: there are at most {_MAX_STAGES} stages, "
                f"{_MAX_MICROBATCHES} micro-batches and {_MAX_PARTS} tensors in one hand-over"
            )
        high = (_KINDS[message.kind] << 3 | message.part) << 11 | message.stage
        tag = self[message] = (high << 24 | message.microbatch) << 23
        return tag
