"""The encoding of a message's name as a 64-bit tag of the native core."""

from __future__ import annotations

from megatron_ext.errors import TransportError
from megatron_ext.message import Message, MessageKind

__all__ = ["NOTE", "NUM_STEPS", "WAKE", "Tags"]

# A tag is, from the highest bit: kind 4, launched 1, header 1, part 3, slice 6, stage 11,
# micro-batch 17, step 21.
_KINDS: dict[MessageKind, int] = {"F": 0, "B": 1, "C": 2, "D": 3, "W": 4, "P": 5, "G": 6}
_MAX_PARTS, _MAX_SLICES, _MAX_STAGES, _MAX_MICROBATCHES = 1 << 3, 1 << 6, 1 << 11, 1 << 17

NUM_STEPS = 1 << 21
"""Number of steps that tags distinguish; the low bits of a tag are the step modulo this."""

NOTE = 15 << 60
"""Tag of the notes between transports; no message has its kind."""

WAKE = NOTE | 1
"""Tag of what a rank sends itself to end its own `poll`."""


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
            or message.slice >= _MAX_SLICES
            or message.part >= _MAX_PARTS
        ):
            raise TransportError(
                f"{message} has no tag: a step has at most {_MAX_STAGES} stages, "
                f"{_MAX_MICROBATCHES} micro-batches, {_MAX_SLICES} slices of each and {_MAX_PARTS} "
                f"tensors for each of these"
            )
        high = (_KINDS[message.kind] << 1 | message.launched) << 1 | message.header
        place = ((high << 3 | message.part) << 6 | message.slice) << 11 | message.stage
        tag = self[message] = (place << 17 | message.microbatch) << 21
        return tag
