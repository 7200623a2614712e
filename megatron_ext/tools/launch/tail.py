"""Follows the log files of the ranks and forwards new lines.

Ranks write directly to files on their own host, which stay complete whatever happens to the
launcher: a blocked terminal cannot delay a rank, and unread lines wait on disk, not in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Chunk", "LogFiles", "last_lines"]

CHUNK_BYTES = 1 << 18
"""Most that is read from one file before the others have their turn."""
MAX_BEHIND_BYTES = 16 << 20
"""A reader that is further behind than this gets the newest lines, and is told what it missed."""
_KEPT_BYTES = 1 << 20


class Chunk(NamedTuple):
    """New lines of one file."""

    source: str
    """Their source: a global rank, or empty for a command."""
    data: bytes
    """Whole lines, with their ends."""


class _Follower:
    """The unread part of one file."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._file = path.open("rb", buffering=0)
        self._rest = b""

    def read(self, *, final: bool) -> Chunk | None:
        notice = self._skip()
        data = self._rest + (self._file.read(CHUNK_BYTES) or b"")
        cut = data.rfind(b"\n") + 1
        if len(data) >= CHUNK_BYTES or final:
            cut = cut or len(data)  # a line without an end: a progress bar, or the last one
        elif cut == 0:
            self._rest = data
            return None
        lines, self._rest = data[:cut], data[cut:]
        if not lines:
            return None
        return Chunk(self._source, notice + (lines if lines.endswith(b"\n") else lines + b"\n"))

    def _skip(self) -> bytes:
        """Skip old bytes if there are too many; return a line about the gap."""
        behind = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if behind <= MAX_BEHIND_BYTES:
            return b""
        left_out = behind - _KEPT_BYTES
        self._file.seek(left_out, os.SEEK_CUR)
        self._rest = b""
        return f"... {left_out} bytes are not shown here; they are in {self._path}\n".encode()

    def close(self) -> None:
        self._file.close()


class LogFiles:
    """The log files of one host's processes.

    Args:
        directory: The directory of this job on this host.
        first_rank: Global rank of its first process.
        local_ranks: The processes whose lines to forward.
        plain: File name -> source, of further files.
    """

    def __init__(
        self,
        directory: Path,
        first_rank: int,
        local_ranks: Sequence[int],
        plain: dict[str, str],
    ) -> None:
        self._directory = directory
        self._waiting: dict[str, str] = dict(plain)  # pattern -> source, not there yet
        for local in local_ranks:
            for stream in ("stdout", "stderr"):
                pattern = rank_pattern(local, stream)
                self._waiting[pattern] = str(first_rank + local)
        self._followers: list[_Follower] = []

    def read(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield the new lines of each file, at most `CHUNK_BYTES` each.

        Args:
            final: Whether the processes have ended, so an unterminated line is complete.
        """
        self._look_for_files()
        for follower in self._followers:
            chunk = follower.read(final=final)
            if chunk is not None:
                yield chunk

    def _look_for_files(self) -> None:
        for pattern, source in list(self._waiting.items()):
            for path in self._directory.glob(pattern):
                self._followers.append(_Follower(path, source))
                self._waiting.pop(pattern, None)

    def close(self) -> None:
        """Close all files."""
        for follower in self._followers:
            follower.close()


def rank_pattern(local_rank: int, stream: str) -> str:
    """Return the pattern of torchrun's output files of a rank, below the job's directory."""
    return f"ranks/*/attempt_0/{local_rank}/{stream}.log"


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file that may be large; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
