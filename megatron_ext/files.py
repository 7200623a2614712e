"""Reads files up to a size limit and writes files atomically or in place."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAX_DEPTH = 50
"""Maximum nesting depth of brackets in JSON. Our formats do not come close to it, and it keeps code
that prints or compares the content far below Python's recursion limit."""


def is_replaceable(path: Path) -> bool:
    """Return whether a new file can replace this one.

    Devices, pipes, and files in a folder without write permission must be written in place.

    Raises:
        OSError: Links form a cycle or lead through a folder that cannot be accessed.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return True
    is_regular = stat.S_ISREG(mode)
    folder = Path(os.path.realpath(path)).parent
    return is_regular and os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which then replaces the file (or the target of a link).

    If the block raises, the file is unchanged. If the file cannot be replaced (`is_replaceable`),
    this yields the path itself.

    Raises:
        OSError: The file cannot be written.
    """
    if not is_replaceable(path):
        yield path
        return
    final = Path(os.path.realpath(path))
    # A rename only works within one file system.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=final.parent) as folder:
        scratch = Path(folder) / final.name
        yield scratch
        if final.exists():
            # A rename would succeed here, because it only needs write access to the
            # folder.
            if not os.access(final, os.W_OK):
                reason = os.strerror(errno.EACCES)
                raise PermissionError(errno.EACCES, reason, str(path))
            permissions = stat.S_IMODE(final.stat().st_mode)
            scratch.chmod(permissions)
        scratch.replace(final)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content with this text, encoded as UTF-8 with unchanged line endings.

    Raises:
        OSError: The file cannot be written; the old content is intact.
    """
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8", newline="")


def cannot_write(path: Path, error: OSError, remedy: str) -> str:
    """Return the error line for a file that cannot be written, with the reason and the remedy."""
    reason = error.strerror or error
    return f"{path} cannot be written: {reason}; {remedy}"


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a regular file.

    Pipes and devices are rejected: a pipe without a writer would block, and a device may never end.

    Raises:
        OSError: The file cannot be read; `strerror` says why.
        UnicodeDecodeError: The file is not text.
    """
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - Path.open takes no descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(0, "it is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is a pipe or a device, not a regular file", str(path))
        # Read one byte more than the limit instead of trusting the size: the file may be growing.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        max_mib = max_bytes >> 20
        raise OSError(0, f"it is larger than {max_mib} MiB", str(path))
    return content.decode("utf-8")


def read_json(path: Path, max_bytes: int) -> Any:
    """Return the content of a regular JSON file.

    Raises:
        OSError: The file cannot be read; `strerror` says why.
        ValueError: The content is not text, not JSON, or nested too deeply.
    """
    return parse_json(read_text(path, max_bytes))


def parse_json(text: str) -> Any:
    """Return the content of an untrusted JSON text.

    Raises:
        ValueError: The text is not JSON, or nested too deeply.
    """
    too_deep = f"its brackets are nested more than {_MAX_DEPTH} deep"
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    # Few texts contain enough brackets to require the walk.
    num_brackets = text.count("[") + text.count("{")
    if num_brackets > _MAX_DEPTH and not _is_flat(content):
        raise ValueError(too_deep)
    return content


def _is_flat(content: Any) -> bool:
    """Return whether nothing in the content is nested deeper than `_MAX_DEPTH`."""
    level = [content]
    for _ in range(_MAX_DEPTH):
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                children.extend(value.values())
            elif isinstance(value, list):
                children.extend(value)
        level = children
    return not any(isinstance(value, dict | list) for value in level)
