"""Reads the trace file of a rank, one iteration at a time, whatever state it is in.

A file may be still growing, cut off, damaged or somebody else's: what is no record is skipped and
counted. Memory is bounded by the limits below, not by the file, and nothing read is ever executed.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from megatron_ext.errors import DataError
from megatron_ext.trace.records import FILE_NAME, FORMAT, Header, Span

__all__ = ["Iteration", "TraceFile", "find_files", "open_run"]

MAX_SPANS = 200_000
"""Of one iteration; what is beyond is dropped and counted."""
MAX_FILES = 100_000
_MAX_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 20
_MAX_NS = 1 << 62
_MAX_TEXT = 200

_MAX_ATTRIBUTES = 12

_NUMBERS = ("rank", "data", "pipeline", "tensor", "clock_ns", "wall_ns")
_FOLDER = re.compile(r"data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})-.*")

_OPENS = b'\n,{"name":"iteration","ph":"B"'
_CLOSES = '\n,{"name":"iteration","ph":"E"'
_OPENING = re.compile(r'\n,\{"name":"iteration","ph":"B"[^\n]*')
_NUMBER = re.compile(r'^\n,\{"name":"iteration","ph":"B"[^\n]*"iteration":(\d{1,18})')
_SPANS = re.compile(
    r'\n,\{"name":"([a-z_]{1,40})","ph":"B","rel_ts":(\d{1,18})\}'
    r'\n,\{"name":"\1","ph":"E","rel_ts":(\d{1,18})'
    r'((?:,"[a-z_]{1,40}":(?:-?\d{1,18}|"[\w .:>-]{0,80}")){0,12})\}(?=\n|$)'
)
"""A span as the recorder writes it: name, begin, end, attributes."""


@dataclass
class Iteration:
    """One iteration of one rank."""

    number: int
    begin_ns: int
    """On the clock of the rank."""
    duration_ns: int
    spans: list[Span] = field(default_factory=list)
    end: dict[str, int] = field(default_factory=dict)
    """Fields of the closing record; empty if the iteration was cut off."""


@dataclass
class TraceFile:
    """The file of one rank."""

    path: Path
    header: Header
    damaged: int = 0
    """Lines and records that were skipped, counted while iterations are read."""

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield the iterations in the order of the file; counts `damaged` anew.

        Args:
            only: The number of the iteration to read; others are passed over unread where the file
                is as the recorder writes it.

        Raises:
            DataError: The file can no longer be read, or is none of ours.
        """
        self.damaged = 0
        clock_ns = 0
        attributes = _AttributeCache()
        for block in _blocks(self.path):
            for part in _parts(block):
                number = _NUMBER.search(part[:_MAX_TEXT])
                if only is not None and number is not None and int(number[1]) != only:
                    continue
                found = _recorded(part, attributes)
                if found is None:
                    found, damaged = _repaired(part, clock_ns, attributes)
                    self.damaged += damaged
                for iteration in found:
                    clock_ns = iteration.begin_ns + iteration.duration_ns
                    if only in (None, iteration.number):
                        yield iteration


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
    record = _decode(line.rstrip(b",] \r").decode("utf-8", "replace"))
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
    if not all(map(_is_count, (*numbers.values(), *sizes))):
        return "its first record is damaged"
    return Header(
        **{name: int(value or 0) for name, value in numbers.items()},
        sizes=(sizes[0], sizes[1], sizes[2]),
        host=str(found.get("host", ""))[:_MAX_TEXT],
        clock=str(found.get("clock", ""))[:_MAX_TEXT],
        settings=_texts(found.get("settings")),
        versions=_texts(found.get("versions")),
    )


def _texts(value: Any) -> dict[str, Any]:
    """Settings are names with numbers or short texts."""
    if not isinstance(value, dict):
        return {}
    kept = {}
    for name, item in list(value.items())[:_MAX_TEXT]:
        number = isinstance(item, bool | int | float) and abs(item) < _MAX_NS
        kept[name[:_MAX_TEXT]] = item if number or item is None else str(item)[: 20 * _MAX_TEXT]
    return kept


def _blocks(path: Path) -> Iterator[str]:
    """Yield some whole iterations at a time; of a file that is not ours, all of it."""
    rest = b""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                rest += block
                cut = rest.rfind(_OPENS)
                if cut > 0:
                    yield rest[:cut].decode("utf-8", "replace")
                    rest = rest[cut:]
                elif len(rest) > _MAX_WHOLE_BYTES:
                    raise DataError(
                        f"{path.name} has more than {_MAX_WHOLE_BYTES >> 20} MiB in one iteration; "
                        f"it is damaged, or no trace"
                    )
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}") from error
    yield rest.decode("utf-8", "replace")


def _parts(block: str) -> list[str]:
    """Cut a block where iterations begin; each part begins with the line break before it."""
    cuts = [match.start() for match in _OPENING.finditer(block)]
    ends = [*cuts, len(block)]
    return [block[begin:end] for begin, end in zip([0, *cuts], ends, strict=True) if end > begin]


def _recorded(part: str, attributes: _AttributeCache) -> list[Iteration] | None:
    """Read an iteration that is as the recorder writes it; None if it is not, in any detail."""
    opening = _OPENING.match(part)
    closing = part.rfind(_CLOSES)
    if opening is None or closing < 0:
        return None
    first = _decode(part[2 : opening.end()])
    body = part[opening.end() : closing]
    found = _SPANS.findall(body)
    last = _decode(part[closing + 2 :].strip("], \r\n"))
    if 2 * len(found) != body.count("\n") or len(found) > MAX_SPANS:
        return None
    if not (isinstance(first, dict) and isinstance(last, dict)):
        return None
    number, at_ns = first.get("iteration"), first.get("at_ns")
    if not (_is_count(number) and _is_count(at_ns)):
        return None
    spans, latest = [], 0
    for name, begin, end, text in found:
        about = attributes[text]
        begin_ns, end_ns = int(begin), int(end)
        if about is None or begin_ns > end_ns:
            return None
        spans.append(Span(name, begin_ns, end_ns, about))
        latest = max(latest, end_ns)
    end_fields = {key: value for key, value in last.items() if _is_count(value)}
    duration_ns = max(end_fields.get("duration_wall", 0), latest)
    return [Iteration(number, at_ns, duration_ns, spans, end_fields)]


class Attributes(dict[str, Any]):
    """What is known about a span, and the same as the inside of a JSON object."""

    def __init__(self, content: dict[str, Any], text: str) -> None:
        super().__init__(content)
        self.text = text


class _AttributeCache(dict[str, Attributes | None]):
    """Attributes by their text: iterations repeat them."""

    def __missing__(self, text: str) -> Attributes | None:
        """Make the attributes of a text such as `,"stage":3`; None if it gives none."""
        if len(self) >= MAX_SPANS:
            self.clear()
        content = _decode("{" + text[1:] + "}")
        clean = isinstance(content, dict) and _is_clean(content)
        self[text] = Attributes(content, text[1:]) if clean else None
        return self[text]


def _repaired(part: str, clock_ns: int, attributes: _AttributeCache) -> tuple[list[Iteration], int]:
    """Read whatever records there are; returns the number of those that are of no use."""
    records, damaged = _records(part)
    found = []
    for group in _split(records):
        iteration, dropped = _iteration(group, clock_ns, attributes)
        damaged += dropped
        if iteration is not None:
            clock_ns = iteration.begin_ns + iteration.duration_ns
            found.append(iteration)
    return found, damaged


def _records(text: str) -> tuple[list[Any], int]:
    """Decode all records at once, or line by line where some are damaged."""
    text = text.strip().removeprefix("[").removesuffix("]").strip(", \r\n")
    whole = _decode(f"[{text}]")
    if isinstance(whole, list):
        return whole, 0
    records, damaged = [], 0
    for line in text.split("\n"):
        record = _decode(line.strip("[], \r"))
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


def _decode(text: str) -> Any:
    """Return what a JSON text says, None if it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _split(records: list[Any]) -> Iterator[list[Any]]:
    """Yield the records of each iteration, its opening record first."""
    part: list[Any] = []
    for record in records:
        opens = (
            isinstance(record, dict)
            and record.get("name") == "iteration"
            and record.get("ph") == "B"
        )
        if opens and part:
            yield part
            part = []
        if opens or part:
            part.append(record)
    if part:
        yield part


def _iteration(
    records: list[Any], clock_ns: int, attributes: _AttributeCache
) -> tuple[Iteration | None, int]:
    """Pair the records of an iteration by name; returns how many were of no use."""
    opening = records[0]
    number, at_ns = opening.get("iteration", 0), opening.get("at_ns")
    pad = opening.get("pad_before", 0)
    if not _is_count(number) or not (_is_count(at_ns) or _is_count(pad)):
        return None, len(records)
    iteration = Iteration(number, at_ns if _is_count(at_ns) else clock_ns + pad, 0)
    damaged = 0
    begins: dict[str, list[int]] = {}
    for record in records[1:]:
        try:
            name, phase = record["name"], record["ph"]
            if name == "iteration":
                iteration.end = {k: v for k, v in record.items() if _is_count(v)}
            elif not _is_count(record["rel_ts"]) or len(name) > _MAX_TEXT:
                damaged += 1
            elif phase == "B":
                begins.setdefault(name, []).append(record["rel_ts"])
            elif phase == "E" and not _close(iteration, record, begins[name].pop(), attributes):
                damaged += 1
        except (KeyError, TypeError, IndexError):  # noqa: PERF203 - any record may be damaged
            damaged += 1
    last = max((span.end_ns for span in iteration.spans), default=0)
    iteration.duration_ns = max(iteration.end.get("duration_wall", 0), last)
    return iteration, damaged + sum(map(len, begins.values()))


def _close(
    iteration: Iteration, record: dict[str, Any], begin_ns: int, attributes: _AttributeCache
) -> bool:
    """Add the span that a record ends; tells whether it was one."""
    about = {key: record[key] for key in record.keys() - {"name", "ph", "rel_ts"}}
    if begin_ns > record["rel_ts"] or len(iteration.spans) >= MAX_SPANS or not _is_clean(about):
        return False
    kept = attributes["," + _encode(about)[1:-1]]
    if kept is None:
        return False
    iteration.spans.append(Span(record["name"], begin_ns, record["rel_ts"], kept))
    return True


def _is_clean(attributes: dict[str, Any]) -> bool:
    """Tell whether attributes are few, and numbers or short texts."""
    if len(attributes) > _MAX_ATTRIBUTES:
        return False
    for name, value in attributes.items():
        kind = type(value)
        if len(name) > _MAX_TEXT or (kind is not int and kind is not str):
            return False
        if len(value) > _MAX_TEXT if kind is str else abs(value) >= _MAX_NS:
            return False
    return True


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_NS


_encode = json.JSONEncoder(separators=(",", ":")).encode
