"""Copies directories to the hosts, for clusters without a shared file system.

One tar stream over ssh for each host, unpacked by the host's own tar: nothing of this package has
to be there yet. Files are written to the same paths as here; none is ever removed.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.ssh import Ssh, explain

if TYPE_CHECKING:
    from megatron_ext.tools.launch.plan import Plan

__all__ = ["MAX_BYTES", "directories", "pack", "push"]

MAX_BYTES = 1 << 30
"""More than this is data or checkpoints, which are not copied with every start."""
_LEFT_OUT = {".git", "__pycache__", ".venv"}


def directories(plan: Plan) -> list[Path]:
    """Return what has to be on every host: the work directory, and this package's checkout."""
    checkout = Path(__file__).resolve().parents[3]
    found = [Path(plan.workdir)]
    installed = {"site-packages", "dist-packages"} & set(checkout.parts)
    if not installed and not checkout.is_relative_to(plan.workdir):
        found.append(checkout)
    return found


def pack(folders: Sequence[Path]) -> bytes:
    """Return a compressed archive of directories, with absolute paths less the first slash.

    In a git checkout these are the files that git knows or would add; elsewhere all files.

    Raises:
        LaunchError: They are larger than `MAX_BYTES`.
    """
    files = sorted({path for folder in folders for path in _files(folder)})
    total = sum(path.lstat().st_size for path in files)
    if total > MAX_BYTES:
        raise LaunchError(
            f"--push would copy {total >> 20} MiB from {', '.join(map(str, folders))}, the limit "
            f"is {MAX_BYTES >> 20} MiB; start from a directory that holds the code only, or let "
            f"git ignore the data in it"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in files:
            archive.add(path, str(path).lstrip("/"), recursive=False)
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    command = ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False)
    if listed.returncode == 0:
        paths = (folder / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
        yield from (path for path in paths if path.is_symlink() or path.is_file())
        return
    for directory, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        yield from (Path(directory) / file for file in files)


async def push(plan: Plan, ssh: Ssh, timeout_s: float) -> int:
    """Copy what `directories` names to every host but this one.

    Returns:
        The number of bytes sent to each.

    Raises:
        LaunchError: A host cannot receive them; one line for each.
    """
    archive = await asyncio.to_thread(pack, directories(plan))
    remote = [node.host for node in plan.nodes if not node.local]
    results = await asyncio.gather(
        *(_unpack(ssh.argv(host, ["tar", "-xzf", "-", "-C", "/"]), archive, timeout_s)
          for host in remote)
    )  # fmt: skip
    problems = [
        f"{host.name}: --push failed: {explain(host.name, code, stderr.splitlines())}"
        for host, (code, stderr) in zip(remote, results, strict=True)
        if code != 0
    ]
    if problems:
        raise LaunchError("\n".join(problems))
    return len(archive)


async def _unpack(argv: Sequence[str], archive: bytes, timeout_s: float) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(archive), timeout_s)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return -1, f"it took longer than {timeout_s:g} s"
    return process.returncode or 0, stderr.decode(errors="replace")
