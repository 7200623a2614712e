"""Finds the traces of a run in its folder, and what each says about the rank that wrote it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.tools.trace.reader import TraceFile, decode
from megatron_ext.tracing.records import FILE_NAME, FORMAT, Header

__all__ = ["find_files", "open_run"]

_MAX_HEADER_BYTES = 1 << 20
_FOLDER = re.compile(r"data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})-.*")


def open_run(directory: Path | str) -> tuple[list[TraceFile], list[str]]:
    """Return the files of a run by global rank, and what is wrong with it in words.

    Raises:
        DataError: The directory does not exist or contains no trace.
    """
    directory = Path(directory)
    found: list[TraceFile] = []
    notes: list[str] = []
    for path in find_files(directory):
        header = _header(path)
        if isinstance(header, Header):
            found.append(TraceFile(path, header))
        else:
            notes.append(f"{path.name}: {header}")
    if not found:
        why = f": {notes[0]}" if notes else ""
        raise DataError(
            f"{directory} holds no trace of a rank{why}; give the folder of a run, such as "
            f"benchmark/data-1-pipeline-4-tensor-1-pp, that was trained with --trace"
        )
    found.sort(key=lambda file: file.header.rank)
    by_rank: dict[int, TraceFile] = {}
    for file in found:
        other = by_rank.setdefault(file.header.rank, file)
        if other is not file:
            notes.append(f"{file.path.name} says that it is of rank {file.header.rank}, as does "
                         f"{other.path.name}; it is left out")  # fmt: skip
    return list(by_rank.values()), notes + _missing(list(by_rank.values()))


def find_files(directory: Path) -> list[Path]:
    """Return the regular files of a run's folder that have the name of a trace.

    Raises:
        DataError: The folder cannot be listed.
    """
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if FILE_NAME.fullmatch(path.name) and path.is_file()
        )
    except OSError as error:
        raise DataError(f"{directory} cannot be listed: {error.strerror}") from error


def _missing(files: list[TraceFile]) -> list[str]:
    """Return a note about ranks of the world without a file."""
    data, pipeline, tensor = max(file.header.sizes for file in files)
    there = {(h.data, h.pipeline, h.tensor) for h in (file.header for file in files)}
    count = data * pipeline * tensor - len(there)
    return [f"{count} of {data * pipeline * tensor} ranks left no trace"] if count > 0 else []


def _header(path: Path) -> Header | str:
    """Read the first record, or return what is wrong with it.

    A file of MegatronApp has no such record; the names of file and folder say enough.
    """
    match = FILE_NAME.fullmatch(path.name)
    assert match is not None
    data, pipeline, tensor = map(int, match.groups())
    try:
        with path.open("rb") as file:
            start = file.read(_MAX_HEADER_BYTES).lstrip()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not start.startswith(b"["):
        return "it is not a trace, it does not begin with ["
    line = start[1:].lstrip().partition(b"\n")[0]
    record = decode(line.rstrip(b",] \r").decode("utf-8", "replace"))
    match record:
        case {"name": "run", "args": {**found}}:
            return _checked({str(name): value for name, value in found.items()})
        case {"name": "run"}:
            return "its first record is damaged"
    sizes = data + 1, pipeline + 1, tensor + 1
    named = _FOLDER.fullmatch(path.parent.name)
    if named is not None:
        sizes = int(named[1]), int(named[2]), int(named[3])
    rank = (pipeline * sizes[0] + data) * sizes[2] + tensor
    return Header(rank, data, pipeline, tensor, sizes)


def _checked(found: dict[str, Any]) -> Header | str:
    """Return the header that a first record holds, or what is wrong with it."""
    if found.pop("format", None) != FORMAT:
        return f"it has another format than {FORMAT}; use the version that recorded it"
    try:
        header = Header(**{**found, "sizes": tuple(found["sizes"])})
    except (KeyError, TypeError):
        return "its first record is damaged"
    numbers = [header.rank, header.data, header.pipeline, header.tensor, *header.sizes]
    if len(numbers) != 7 or any(type(number) is not int for number in numbers):
        return "its first record is damaged"
    return header
