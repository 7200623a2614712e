"""Reads the trace file of a rank, one iteration at a time, whatever state it is in.

A file may be still growing, cut off, damaged or somebody else's: what is no record is skipped and
counted. Memory is bounded by the limits below, not by the file, and nothing read is ever executed.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_ext.errors import DataError
from megatron_ext.trace.records import Header, Span
from megatron_ext.trace.untrusted import MAX_TEXT, decode, is_attributes, is_count

__all__ = ["MAX_SPANS", "Attributes", "Iteration", "TraceFile"]

MAX_SPANS = 200_000
"""Of one iteration; what is beyond is dropped and counted."""
_MAX_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20

_OPENS = b'\n,{"name":"iteration","ph":"B"'
_CLOSES = '\n,{"name":"iteration","ph":"E"'
_OPENING = re.compile(r'\n,\{"name":"iteration","ph":"B"[^\n]*')
_NUMBER = re.compile(r'^\n,\{"name":"iteration","ph":"B"[^\n]*"iteration":(\d{1,18})')
_SPANS = re.compile(
    r'\n,\{"name":"([a-z_]{1,40})","ph":"B","rel_ts":(\d{1,18})\}'
    r'\n,\{"name":"\1","ph":"E","rel_ts":(\d{1,18})'
    r"((?:,[^\n]{1,600})?)\}(?=\n|$)"
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
                number = _NUMBER.search(part[:MAX_TEXT])
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
    first = decode(part[2 : opening.end()])
    body = part[opening.end() : closing]
    found = _SPANS.findall(body)
    last = decode(part[closing + 2 :].strip("], \r\n"))
    if 2 * len(found) != body.count("\n") or len(found) > MAX_SPANS:
        return None
    if not (isinstance(first, dict) and isinstance(last, dict)):
        return None
    number, at_ns = first.get("iteration"), first.get("at_ns")
    if not (is_count(number) and is_count(at_ns)):
        return None
    names, begins, ends, texts = zip(*found, strict=True) if found else ((), (), (), ())
    begins_ns, ends_ns = list(map(int, begins)), list(map(int, ends))
    abouts = list(map(attributes.__getitem__, zip(names, texts, strict=True)))
    if None in abouts or any(map(operator.gt, begins_ns, ends_ns)):
        return None
    spans = list(map(_as_span, zip(names, begins_ns, ends_ns, abouts, strict=True)))
    end_fields = {key: value for key, value in last.items() if is_count(value)}
    duration_ns = max(end_fields.get("duration_wall", 0), *ends_ns, 0)
    return [Iteration(number, at_ns, duration_ns, spans, end_fields)]


_as_span = cast("Callable[[tuple[Any, ...]], Span]", partial(tuple.__new__, Span))
"""Makes a span of its four fields, without a call of Python for each of millions."""


class Attributes(dict[str, Any]):
    """What is known about a span, and the same as the inside of a JSON object."""

    def __init__(self, content: dict[str, Any], text: str) -> None:
        super().__init__(content)
        self.text = text


class _AttributeCache(dict[tuple[str, str], Attributes | None]):
    """Attributes by the name of the span and their text: iterations repeat them."""

    def __missing__(self, key: tuple[str, str]) -> Attributes | None:
        """Make the attributes of a text such as `,"stage":3`; None if it gives none."""
        if len(self) >= MAX_SPANS:
            self.clear()
        text = key[1][1:]
        content = decode("{" + text + "}")
        clean = isinstance(content, dict) and is_attributes(content)
        self[key] = Attributes(content, text) if clean else None
        return self[key]


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
    whole = decode(f"[{text}]")
    if isinstance(whole, list):
        return whole, 0
    records, damaged = [], 0
    for line in text.split("\n"):
        record = decode(line.strip("[], \r"))
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


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
    if not is_count(number) or not (is_count(at_ns) or is_count(pad)):
        return None, len(records)
    iteration = Iteration(number, at_ns if is_count(at_ns) else clock_ns + pad, 0)
    damaged = 0
    begins: dict[str, list[int]] = {}
    for record in records[1:]:
        try:
            name, phase = record["name"], record["ph"]
            if name == "iteration":
                iteration.end = {k: v for k, v in record.items() if is_count(v)}
            elif not is_count(record["rel_ts"]) or len(name) > MAX_TEXT:
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
    if begin_ns > record["rel_ts"] or len(iteration.spans) >= MAX_SPANS or not is_attributes(about):
        return False
    kept = attributes[record["name"], "," + _encode(about)[1:-1]]
    if kept is None:
        return False
    iteration.spans.append(Span(record["name"], begin_ns, record["rel_ts"], kept))
    return True


_encode = json.JSONEncoder(separators=(",", ":")).encode
