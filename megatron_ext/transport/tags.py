"""The encoding of a message's name as a 64-bit tag of the native core."""

from __future__ import annotations

from megatron_ext.errors import TransportError
from megatron_ext.message import LAUNCHED, Message, MessageKind

__all__ = ["NOTE", "NUM_STEPS", "Tags"]

# A tag is, from the highest bit: kind 3, part 4, stage 11, micro-batch 23, step 23.
_KINDS: dict[MessageKind, int] = {"F": 0, "B": 1, "C": 2, "D": 3, "W": 4, "P": 5, "G": 6}
_MAX_STAGES, _MAX_MICROBATCHES = 1 << 11, 1 << 23

NUM_STEPS = 1 << 23
"""Number of steps that tags distinguish; the low bits of a tag are the step modulo this."""

NOTE = 7 << 61
"""Tag of the notes between transports; no message has its kind."""


class Tags(dict[Message, int]):
    """The tags of messages in step 0. It computes each once: all steps have the same messages."""

    def __missing__(self, message: Message) -> int:
        """Compute and store the tag of a message.

        Raises:
            TransportError: A field of the message exceeds its bits.
        """
        if (
            message.stage >= _MAX_STAGES
            or message.microbatch >= _MAX_MICROBATCHES
            or message.part >= 2 * LAUNCHED
        ):
            raise TransportError(
                f"{message} has no tag: a step has at most {_MAX_STAGES} stages, "
                f"{_MAX_MICROBATCHES} micro-batches and {LAUNCHED} tensors for each of them"
            )
        high = (_KINDS[message.kind] << 4 | message.part) << 11 | message.stage
        tag = self[message] = (high << 23 | message.microbatch) << 23
        return tag
