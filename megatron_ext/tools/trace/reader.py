"""Reads the trace file of a rank, one iteration at a time.

A file may still grow, or be truncated where its rank died: other text is skipped and counted.
MegatronApp writes the same records with other white space, and without the first one.
"""

from __future__ import annotations

import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_ext.errors import DataError
from megatron_ext.tracing.records import Header, Span

__all__ = ["Attributes", "Iteration", "TraceFile", "decode"]

_BLOCK_BYTES = 1 << 20

_OPENS = b'\n,{"name":"iteration","ph":"B"'
_CLOSES = '\n,{"name":"iteration","ph":"E"'
_OPENING = re.compile(r'\n,\{"name":"iteration","ph":"B"[^\n]*')
_NUMBER = re.compile(r'^\n,\{"name":"iteration","ph":"B"[^\n]*"iteration":(\d{1,18})')
_SPANS = re.compile(
    r'\n,\{"name":"([a-z_]{1,40})","ph":"B","rel_ts":(\d{1,18})\}'
    r'\n,\{"name":"\1","ph":"E","rel_ts":(\d{1,18})'
    r"((?:,[^\n]*)?)\}(?=\n|$)"
)
"""A span as the recorder writes it: name, begin, end, attributes."""


def decode(text: str) -> Any:
    """Decode a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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

    def close(self, record: dict[str, Any]) -> None:
        """Apply the fields of the closing record."""
        self.end = {key: value for key, value in record.items() if type(value) is int}
        self.duration_ns = max(self.duration_ns, self.end.get("duration_wall", 0))


@dataclass
class TraceFile:
    """The file of one rank."""

    path: Path
    header: Header
    damaged: int = 0
    """Lines and records that were skipped, counted while iterations are read."""

    def iterations(self, only: int | None = None) -> Iterator[Iteration]:
        """Yield the iterations in the order of the file, and reset the count `damaged`.

        Args:
            only: The number of the iteration to read; others are passed over unread where the file
                is as the recorder writes it.

        Raises:
            DataError: The file can no longer be read.
        """
        self.damaged = 0
        clock_ns = 0
        attributes = _AttributeCache()
        for block in _blocks(self.path):
            for part in _parts(block):
                number = _NUMBER.match(part)
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
    body = part[opening.end() : closing]
    found = _SPANS.findall(body)
    last = decode(part[closing + 2 :].strip("], \r\n"))
    iteration = _opened(decode(part[2 : opening.end()]))
    if iteration is None or not isinstance(last, dict) or 2 * len(found) != body.count("\n"):
        return None
    names, begins, ends, texts = zip(*found, strict=True) if found else ((), (), (), ())
    begins_ns, ends_ns = list(map(int, begins)), list(map(int, ends))
    abouts = list(map(attributes.__getitem__, zip(names, texts, strict=True)))
    if None in abouts or any(map(operator.gt, begins_ns, ends_ns)):
        return None
    iteration.spans = list(map(_as_span, zip(names, begins_ns, ends_ns, abouts, strict=True)))
    iteration.close(last)
    iteration.duration_ns = max(iteration.duration_ns, *ends_ns, 0)
    return [iteration]


_as_span = cast("Callable[[tuple[Any, ...]], Span]", partial(tuple.__new__, Span))
"""Makes a span of its four fields, without a call of Python for each of millions."""


def _opened(record: Any, clock_ns: int | None = None) -> Iteration | None:
    """Return the iteration that a record opens, or None.

    Args:
        record: The record.
        clock_ns: When the iteration before ended, for files that only say how much later this one
            began.
    """
    match record:
        case {"name": "iteration", "ph": "B", "iteration": int(number), "at_ns": int(at_ns)}:
            return Iteration(number, at_ns, 0)
        case {"name": "iteration", "ph": "B", "pad_before": int(pad_ns)} if clock_ns is not None:
            number = record.get("iteration", 0)
            return Iteration(number, clock_ns + pad_ns, 0) if isinstance(number, int) else None
    return None


class Attributes(dict[str, Any]):
    """The attributes of a span, also as the text inside a JSON object."""

    def __init__(self, content: dict[str, Any], text: str) -> None:
        super().__init__(content)
        self.text = text


class _AttributeCache(dict[tuple[str, str], Attributes | None]):
    """Attributes by the name of the span and their text: iterations repeat them."""

    def __missing__(self, key: tuple[str, str]) -> Attributes | None:
        """Make the attributes of a text such as `,"stage":3`; None if it gives none."""
        text = key[1][1:]
        content = decode("{" + text + "}")
        self[key] = Attributes(content, text) if isinstance(content, dict) else None
        return self[key]


def _repaired(part: str, clock_ns: int, attributes: _AttributeCache) -> tuple[list[Iteration], int]:
    """Read all records; return the number of unusable ones."""
    records, damaged = _records(part)
    found: list[Iteration] = []
    begins: dict[str, list[int]] = defaultdict(list)
    for record in records:
        opened = _opened(record, clock_ns)
        if opened is not None:
            found.append(opened)
            damaged += sum(map(len, begins.values()))
            begins.clear()
        elif found:
            damaged += not _add(found[-1], record, begins, attributes)
            clock_ns = found[-1].begin_ns + found[-1].duration_ns
    return found, damaged + sum(map(len, begins.values()))


def _records(text: str) -> tuple[list[Any], int]:
    """Decode all records at once, or line by line if some are damaged."""
    text = text.strip().removeprefix("[").removesuffix("]").strip(", \r\n")
    whole = decode(f"[{text}]")
    if isinstance(whole, list):
        return whole, 0
    records = [decode(line.strip("[], \r")) for line in text.split("\n")]
    readable = [record for record in records if isinstance(record, dict)]
    return readable, len(records) - len(readable)


def _add(
    iteration: Iteration,
    record: Any,
    begins: dict[str, list[int]],
    attributes: _AttributeCache,
) -> bool:
    """Add a record to its iteration; return whether it was usable."""
    match record:
        case {"name": "iteration"}:
            iteration.close(record)
        case {"name": str(name), "ph": "B", "rel_ts": int(at_ns)} if at_ns >= 0:
            begins[name].append(at_ns)
        case {"name": str(name), "ph": "E", "rel_ts": int(at_ns), **about} if begins[name]:
            begin_ns, known = begins[name].pop(), attributes[name, "," + _encode(about)[1:-1]]
            if known is None or begin_ns > at_ns:
                return False
            iteration.spans.append(Span(name, begin_ns, at_ns, known))
            iteration.duration_ns = max(iteration.duration_ns, at_ns)
        case {"ph": str(phase)} if phase not in ("B", "E"):
            pass
        case _:
            return False
    return True


_encode = json.JSONEncoder(separators=(",", ":")).encode
