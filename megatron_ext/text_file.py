"""Reads text files named by the user: regular files of bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a regular file.

    Reading a pipe without a writer would block forever, and a device never ends.

    Raises:
        OSError: It cannot be read; `strerror` says why.
        UnicodeDecodeError: It is not text.
    """
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(0, "it is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is not a regular file, but a pipe or a device", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"it has more than {max_bytes >> 20} MiB", str(path))
    return content.decode("utf-8")
