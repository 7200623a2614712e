"""The 64 bits that stand for the key of a message on the native core's wires."""

from __future__ import annotations

from megatron_ext.errors import TransportError
from megatron_ext.transport.base import Key

__all__ = ["NOTE", "NUM_STEPS", "Tags"]

# A tag is, from the highest bit: kind 2, part 3, stage 12, micro-batch 24, step 23.
_KINDS = {"F": 0, "B": 1, "C": 2}
_MAX_PARTS, _MAX_STAGES, _MAX_MICROBATCHES = 1 << 3, 1 << 12, 1 << 24

NUM_STEPS = 1 << 23
"""Steps that tags tell apart; the number of the step is added to a tag."""

NOTE = 3 << 62
"""Tag of what transports tell each other besides messages: a kind that no key has."""


class Tags(dict[Key, int]):
    """Tags of keys, in step 0. They are computed once: the keys of each step are the same."""

    def __missing__(self, key: Key) -> int:
        """Compute a tag.

        Raises:
            TransportError: A number of the key is too large for its bits.
        """
        if (
            key.stage >= _MAX_STAGES
            or key.microbatch >= _MAX_MICROBATCHES
            or key.part >= _MAX_PARTS
        ):
            raise TransportError(
                f"{key} has no tag: there are at most {_MAX_STAGES} stages, {_MAX_MICROBATCHES} "
                f"micro-batches and {_MAX_PARTS} tensors in one hand-over"
            )
        high = (_KINDS[key.kind] << 3 | key.part) << 12 | key.stage
        tag = self[key] = (high << 24 | key.microbatch) << 23
        return tag
