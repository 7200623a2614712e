"""The trace file of one rank: its name, its records and their format.

The layout is that of MegatronApp's DPP, so that its tools read these files too:

    benchmark/data-2-pipeline-4-tensor-1-dpp-True/benchmark-data-0-pipeline-3-tensor-0.json

A file is a JSON list with one record on each line. The first record, `run`, identifies the rank and
the run. Each traced iteration is a record `iteration` of phase B, the spans, and a record
`iteration` of phase E. A span is a pair of records of phases B and E with the nanoseconds since the
begin of the iteration as `rel_ts`; the second one holds its attributes.

    [{"name":"run","ph":"M","args":{"format":1,"rank":3,...}}
    ,{"name":"iteration","ph":"B","pad_before":81123,"iteration":7,"at_ns":5120081123}
    ,{"name":"forward","ph":"B","rel_ts":1204}
    ,{"name":"forward","ph":"E","rel_ts":9120,"microbatch":0,"model_chunk":0,"stage":3,"pp_rank":3}
    ,{"name":"iteration","ph":"E","duration_wall":99120,"duration_cuda":0,"memory_bytes":123456}

The recorder only appends lines, so a file is readable at any time; it writes the closing bracket at
the end of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "ACTION_NAMES",
    "FILE_NAME",
    "FORMAT",
    "SCHEDULE_FILE",
    "Header",
    "Span",
    "directory_name",
    "file_name",
    "header_line",
    "iteration_lines",
    "sizes_in",
    "size_fields",
]

FORMAT = 1
"""Raised when a reader of today could misunderstand a file."""

FILE_NAME = re.compile(r"benchmark-data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})\.json")

SCHEDULE_FILE = "schedule.json"
"""The table of a full batch, beside the files of the ranks."""

ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
}
"""By kind of action: how its spans are called."""


class Span(NamedTuple):
    """Something that took time within one iteration of one rank."""

    name: str
    """One of `ACTION_NAMES`, or `send`, `receive`, `wait`, `reduce`, `optimizer`, `weights`,
    `wire`."""
    begin_ns: int
    """Since the begin of the iteration."""
    end_ns: int
    attributes: Mapping[str, Any]
    """Actions: microbatch, model_chunk, stage, pp_rank. `send`: to, and `receive`: from (global
    ranks), for (F: an activation, B: a gradient), stage that needs it, microbatch, bytes. `wait`:
    cause (input, slot, leader, credit, flush) and, for an input, on (the global rank), for, stage,
    microbatch. `wire`, which takes no time: peer (global rank), and wire, which carries its
    messages."""


@dataclass(frozen=True)
class Header:
    """Who wrote a file, and what it ran."""

    rank: int
    """Global rank."""
    data: int
    pipeline: int
    tensor: int
    """Ranks within their groups; with context parallelism `data` counts both."""
    sizes: tuple[int, int, int]
    """Of the data (with context), pipeline and tensor groups."""
    host: str = ""
    clock: str = ""
    """Ranks with the same clock measure the same time; one for each boot of a host."""
    clock_ns: int = 0
    wall_ns: int = 0
    """The clock, and the time since 1970, at one moment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run: schedule, transport, sizes of the model and so on."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self) -> tuple[int, int]:
        """Process and thread of the Chrome trace: data * pipeline size + pipeline, tensor."""
        return self.data * self.sizes[1] + self.pipeline, self.tensor

    @property
    def label(self) -> str:
        """The rank for people."""
        data, pipeline, tensor = self.sizes
        parts = [f"pp {self.pipeline}"] if pipeline > 1 else []
        parts += [f"dp {self.data}"] if data > 1 else []
        parts += [f"tp {self.tensor}"] if tensor > 1 else []
        return f"rank {self.rank}" + (f" ({', '.join(parts)})" if parts else "")


def directory_name(sizes: tuple[int, int, int], *, dynamic: bool) -> str:
    """Return the folder of a run, by the sizes of its data, pipeline and tensor groups."""
    data, pipeline, tensor = sizes
    kind = "dpp-True" if dynamic else "pp"
    return f"data-{data}-pipeline-{pipeline}-tensor-{tensor}-{kind}"


def file_name(data: int, pipeline: int, tensor: int) -> str:
    """Return the file of a rank within the folder of the run."""
    return f"benchmark-data-{data}-pipeline-{pipeline}-tensor-{tensor}.json"


def header_line(header: Header) -> str:
    """Return the first record of a file, with the bracket that opens the list."""
    content = {"name": "run", "ph": "M", "args": {"format": FORMAT, **asdict(header)}}
    return f"[{_compact(content)}\n"


def size_fields(microbatch: int, tokens: int, pairs: int) -> dict[str, int]:
    """Return the fields of a closing record that say how long a micro-batch is.

    Args:
        microbatch: 0 to m-1.
        tokens: All of its tokens.
        pairs: The sum of the squares of the lengths of its samples.
    """
    return {f"tokens {microbatch}": tokens, f"pairs {microbatch}": pairs}


def sizes_in(fields: Mapping[str, int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (micro-batch, (tokens, pairs)) for all that a closing record tells."""
    for key, tokens in fields.items():
        what, _, microbatch = key.partition(" ")
        pairs = fields.get(f"pairs {microbatch}")
        if what == "tokens" and microbatch.isdecimal() and pairs is not None:
            yield int(microbatch), (tokens, pairs)


def iteration_lines(
    spans: Iterable[Span], begin: Mapping[str, int] | None, end: Mapping[str, int] | None
) -> Iterator[str]:
    """Yield the lines of one iteration, or of a part of it.

    Args:
        spans: In the order of their ends.
        begin: Further fields of the record that opens it; None: it was written before.
        end: Further fields of the record that closes it; None: it comes later.
    """
    if begin is not None:
        yield f",{_compact({'name': 'iteration', 'ph': 'B', **begin})}\n"
    for name, begin_ns, end_ns, attributes in spans:
        yield f',{{"name":"{name}","ph":"B","rel_ts":{begin_ns}}}\n'
        about = "".join([
            f',"{key}":{value}' if type(value) is int else f',"{key}":{_compact(value)}'
            for key, value in attributes.items()
        ])  # fmt: skip
        yield f',{{"name":"{name}","ph":"E","rel_ts":{end_ns}{about}}}\n'
    if end is not None:
        yield f",{_compact({'name': 'iteration', 'ph': 'E', **end})}\n"


_compact = json.JSONEncoder(separators=(",", ":")).encode
