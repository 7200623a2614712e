"""Run folders, which only their owner can change.

A run folder names the job's hosts and the launcher's process, so anyone who can write to the folder
controls where `stop` connects and which process it kills. The folder may be on a shared disk, where
other users can write. This module therefore rejects a folder that belongs to another user or that
other users can write to, and never follows links. Each folder is opened once and files are opened
relative to it, so that the folder that was checked is the one that is used, even after a rename.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ext.errors import LaunchError, reason_of
from megatron_ext.files import parse_json

MAX_JSON_BYTES = 64 << 20
_NEW_FOLDER_MODE = 0o700
_NEW_FILE_MODE = 0o600
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RunFolder:
    """An open folder that belongs to this user; a `with` block closes it at the end.

    `path` is the folder's name in messages. Methods take the names of files in the folder.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, root: Path, *names: str, create: bool = False) -> RunFolder:
        """Open the folder `root/names[0]/...`; with `create`, create missing folders.

        The user chose the root, so it may be a link and belong to anyone. Each folder inside it
        must belong to this user.

        Raises:
            FileNotFoundError: The folder does not exist.
            OSError: The folder cannot be opened or created.
            LaunchError: Another user owns it or can write to it, or it is a link.
        """
        if create:
            root.mkdir(parents=True, exist_ok=True)
        path = root
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        # Open each folder relative to its open parent, so that nobody can replace a part of the
        # path after the check.
        for name in names:
            parent = descriptor
            path = path / name
            try:
                if create:
                    # Hosts that share a disk may create the folder at the same time.
                    with suppress(FileExistsError):
                        os.mkdir(name, _NEW_FOLDER_MODE, dir_fd=parent)
                descriptor = _open_below(parent, name, path, os.O_DIRECTORY)
            finally:
                os.close(parent)
        return cls(path, descriptor)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def anchor(self) -> Path:
        """This process's path to the folder, which stays valid if the folder is renamed."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def exists(self, name: str) -> bool:
        """Return whether the folder contains an entry with this name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file, which may be of any type, or None if there is no file.

        Raises:
            LaunchError: The file cannot be read, or another user could have written it.
        """
        path = self.path / name
        try:
            # Without O_NONBLOCK, opening a pipe blocks until the pipe has a writer.
            descriptor = _open_below(self._descriptor, name, path, os.O_NONBLOCK)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - opens a descriptor
                content = file.read(MAX_JSON_BYTES + 1)
            if len(content) > MAX_JSON_BYTES:
                raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
            return parse_json(content.decode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{path} cannot be read: {reason_of(error)}; delete it"
            ) from None

    def write_json(self, name: str, value: object) -> None:
        """Replace a file with a JSON document that only this user can read.

        Raises:
            OSError: The file cannot be written. The old content stays intact.
        """
        # Write to a temporary file and rename it, so that readers never see a partial
        # document. Its name is random, so that two writers never use the same file.
        scratch = f".{name}.{secrets.token_hex(4)}"
        try:
            with self.create(scratch) as file:
                text = json.dumps(value, indent=1)
                file.write(text.encode() + b"\n")
            os.rename(
                scratch,
                name,
                src_dir_fd=self._descriptor,
                dst_dir_fd=self._descriptor,
            )
        except BaseException:
            with suppress(OSError):
                os.unlink(scratch, dir_fd=self._descriptor)
            raise

    def create(self, name: str) -> BinaryIO:
        """Create or truncate a file that only this user can read, and open it for writing.

        The file is unbuffered, because with a buffer, a full disk would not raise an error until
        the file is closed.

        Raises:
            OSError: The file cannot be created, or is a link.
        """
        # With O_NOFOLLOW, a link with this name cannot redirect the write to another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, _NEW_FILE_MODE, dir_fd=self._descriptor)
        return open(descriptor, "wb", buffering=0)  # noqa: PTH123 - opens a descriptor


def _open_below(
    parent: int,
    name: str,
    path: Path,
    flags: int,
) -> int:
    """Open an entry in an open folder for reading; return its descriptor."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except OSError:
        with suppress(OSError):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise LaunchError(
                    f"{path} is a link, but run folders must not contain links; remove it, or use "
                    f"another --run-id"
                ) from None
        raise
    try:
        # Check the open descriptor instead of the path, which could be replaced in the
        # meantime.
        _require_private(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_private(status: os.stat_result, path: Path) -> None:
    """Reject anything that another user owns or can write to, or that is not a file or folder.

    Raises:
        LaunchError: Names the entry and the remedy.
    """
    is_folder = stat.S_ISDIR(status.st_mode)
    is_file = stat.S_ISREG(status.st_mode)
    if not is_folder and not is_file:
        raise LaunchError(f"{path} is a pipe or a device; delete it")
    if status.st_uid != os.geteuid():
        raise LaunchError(
            f"{path} belongs to user {status.st_uid}, but you are user {os.geteuid()}; use another "
            f"--run-id, or set MEGATRON_EXT_RUNS to a folder that you own"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise LaunchError(
            f"other users can write to {path} (mode {stat.S_IMODE(status.st_mode):o}); if you "
            f"trust its content, run chmod -R go-w {path}"
        )
