"""The bytes by which ranks tell each other of buffers on their devices."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from megatron_ext.transport.dtypes import DTYPE_OF

__all__ = ["Answer", "packed", "parsed"]

_HEAD = struct.Struct("<QHB")
"""Header of a message: buffer number, dtype code, number of dimensions. The sizes follow (int64
each), then the buffer's handle at its first use."""


class Answer(NamedTuple):
    """The result of mapping a peer's first buffer."""

    reason: str
    """Why the mapping failed; empty if it succeeded."""
    handle: bytes = b""

    def dumps(self) -> bytes:
        """Serialise the answer."""
        return self.reason.encode() + b"\0" + self.handle

    @classmethod
    def parse(cls, text: bytes | None) -> Answer:
        """Parse the output of `dumps`; None is an empty answer."""
        reason, _, handle = (text or b"").partition(b"\0")
        return cls(reason.decode(), handle)


def packed(number: int, code: int, shape: tuple[int, ...], handle: bytes) -> torch.Tensor:
    """Return the message about a tensor in a buffer, as bytes (uint8).

    Args:
        number: Number of the buffer.
        code: Code of the tensor's dtype.
        shape: Its shape.
        handle: Handle of the buffer; empty after its first use.
    """
    place = _HEAD.pack(number, code, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
    return torch.frombuffer(bytearray(place + handle), dtype=torch.uint8)


def parsed(content: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype, bytes]:
    """Return buffer number, shape, dtype and handle (may be empty) from a message's bytes."""
    text = content.numpy().tobytes()
    number, code, num_dims = _HEAD.unpack_from(text)
    sizes = struct.Struct(f"<{num_dims}q")
    end = _HEAD.size + sizes.size
    return number, sizes.unpack_from(text, _HEAD.size), DTYPE_OF[code], text[end:]
