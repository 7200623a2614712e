"""The protocol between launcher and agent: JSON lines over standard input and output.

A message is one line: a mark, then a JSON object. If the object has `bytes`, that many raw bytes
follow, so logs need no encoding. Login scripts and ssh may write to the same stream before the
agent does: lines without the mark are noise, kept for error messages.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["MARK", "MAX_LINE_BYTES", "VERSION", "Message", "Reader", "decode", "encode"]

VERSION = 1
"""Both sides must agree on it; raised when a message changes its meaning."""

MARK = b"\x1emegatron-ext "
MAX_LINE_BYTES = 1 << 20
"""Longest line that either side accepts; a command with its environment is far shorter."""

Message = dict[str, Any]


def encode(message: Message, payload: bytes | None = None) -> bytes:
    """Return a message as bytes to send."""
    if payload is not None:
        message = {**message, "bytes": len(payload)}
    line = MARK + json.dumps(message, separators=(",", ":")).encode() + b"\n"
    return line + (payload or b"")


def decode(line: bytes) -> Message | None:
    """Return the message that a line is, or None for noise."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class Reader:
    """Takes messages off a file descriptor that is also waited for with `selectors`.

    Args:
        fd: A blocking descriptor; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""

    def fill(self) -> bool:
        """Read available bytes, blocking if there are none; return False at the end of the stream.

        A line longer than `MAX_LINE_BYTES` counts as the end: the peer does not speak our protocol.
        """
        data = os.read(self._fd, 1 << 16)
        self._buffer += data
        return bool(data) and len(self._buffer) <= MAX_LINE_BYTES

    def take(self) -> Message | None:
        """Return the next whole message that was read, or None."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            message = decode(line)
            if message is not None:
                return message
        return None

    def wait(self) -> Message | None:
        """Wait for the next message; None at the end of the stream."""
        message = self.take()
        while message is None and self.fill():
            message = self.take()
        return message
