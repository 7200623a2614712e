"""Finds the traces of a run in its folder, and what each says about the rank that wrote it."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.trace.reader import TraceFile
from megatron_ext.trace.records import FILE_NAME, FORMAT, Header
from megatron_ext.trace.untrusted import MAX_NUMBER, MAX_TEXT, decode, is_count

__all__ = ["find_files", "open_run"]

MAX_FILES = 100_000
_MAX_HEADER_BYTES = 1 << 20
_NUMBERS = ("rank", "data", "pipeline", "tensor", "clock_ns", "wall_ns")
_FOLDER = re.compile(r"data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})-.*")


def open_run(directory: Path | str) -> tuple[list[TraceFile], list[str]]:
    """Return the files of a run by global rank, and what is wrong with it in words.

    Raises:
        DataError: There is no such directory, or no trace in it.
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
        found = []
        for path in directory.iterdir():
            if FILE_NAME.fullmatch(path.name) and stat.S_ISREG(path.stat().st_mode):
                found.append(path)
            if len(found) > MAX_FILES:
                raise DataError(f"{directory} holds more than {MAX_FILES} traces")
    except OSError as error:
        raise DataError(f"{directory} cannot be listed: {error.strerror}") from error
    return sorted(found)


def _missing(files: list[TraceFile]) -> list[str]:
    """Say which ranks of the world left no file."""
    data, pipeline, tensor = max(file.header.sizes for file in files)
    there = {(h.data, h.pipeline, h.tensor) for h in (file.header for file in files)}
    count = data * pipeline * tensor - len(there)
    return [f"{count} of {data * pipeline * tensor} ranks left no trace"] if count > 0 else []


def _header(path: Path) -> Header | str:
    """Read the first record, or say why it is none.

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
        return "it is no trace, it does not begin with ["
    line = start[1:].lstrip().partition(b"\n")[0]
    record = decode(line.rstrip(b",] \r").decode("utf-8", "replace"))
    if isinstance(record, dict) and record.get("name") == "run":
        return _checked(record.get("args"))
    sizes = data + 1, pipeline + 1, tensor + 1
    named = _FOLDER.fullmatch(path.parent.name)
    if named is not None:
        sizes = int(named[1]), int(named[2]), int(named[3])
    rank = (pipeline * sizes[0] + data) * sizes[2] + tensor
    return Header(rank, data, pipeline, tensor, sizes)


def _checked(found: Any) -> Header | str:
    """Take over what has the right type; text is cut to a length that fits a page."""
    if not isinstance(found, dict):
        return "its first record is damaged"
    if found.get("format") != FORMAT:
        return (
            f"it has format {str(found.get('format'))[:20]}, this version reads {FORMAT}; use the "
            f"version that recorded it"
        )
    sizes = found.get("sizes")
    numbers = {name: found.get(name) for name in _NUMBERS}
    if not isinstance(sizes, list) or len(sizes) != 3:
        return "its first record is damaged"
    if not all(map(is_count, (*numbers.values(), *sizes))):
        return "its first record is damaged"
    return Header(
        **{name: int(value or 0) for name, value in numbers.items()},
        sizes=(sizes[0], sizes[1], sizes[2]),
        host=str(found.get("host", ""))[:MAX_TEXT],
        clock=str(found.get("clock", ""))[:MAX_TEXT],
        settings=_texts(found.get("settings")),
        versions=_texts(found.get("versions")),
    )


def _texts(value: Any) -> dict[str, Any]:
    """Settings are names with numbers or short texts."""
    if not isinstance(value, dict):
        return {}
    kept = {}
    for name, item in list(value.items())[:MAX_TEXT]:
        number = isinstance(item, bool | int | float) and abs(item) < MAX_NUMBER
        kept[name[:MAX_TEXT]] = item if number or item is None else str(item)[: 20 * MAX_TEXT]
    return kept
