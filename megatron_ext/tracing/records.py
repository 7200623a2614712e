"""The trace file of one rank: its name, its records and their format.

Folders and files have the names of MegatronApp's DPP:

    benchmark/data-2-pipeline-4-tensor-1-dpp-True/benchmark-data-0-pipeline-3-tensor-0.json

A file is a JSON list of Chrome-trace events, which Perfetto opens as it is. The first line names
the rank and the run. Each further one holds the spans of an iteration, on the clock of the rank,
and at its end the iteration itself with the figures of all of it (here broken in two):

    [{"name":"run","ph":"M","args":{"format":2,"rank":3,...}},...
    ,{"name":"forward 0","cat":"forward","ph":"X","pid":3,"tid":0,"ts":81.2,"dur":7.9,"args":{...}}
    ,{"name":"iteration 7","cat":"iteration",...,"args":{"iteration":7,"duration_wall":99120,...}}

The recorder only appends lines, so a file is readable at any time; it writes the closing bracket at
the end of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

FORMAT = 2
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
_ACTIONS = frozenset(ACTION_NAMES.values())
_EXCHANGES = 1000
"""Distance of a rank's second row, that of the stream in which experts exchange tokens."""


class Span(NamedTuple):
    """Something that took time within one iteration of one rank."""

    name: str
    """One of `ACTION_NAMES`, or `send`, `receive`, `wait`, `reduce`, `optimizer`, `weights`,
    `wire`, `exchange`."""
    begin_ns: int
    """Since the begin of the iteration."""
    end_ns: int
    attributes: Mapping[str, Any]
    """Actions: microbatch, slice, model_chunk, stage, pp_rank. `send`: to, and `receive`: from
    (global ranks), for (F: an activation, B: a gradient), stage that needs it, microbatch, slice,
    bytes. `wait`: cause (input, slot, leader, credit, flush) and, for an input, on (the global
    rank), for, stage, microbatch, slice. A first slice, or the only one, is not named. `wire`,
    which takes no time: peer (global rank), and wire, which carries its messages. `exchange`, of
    tokens with other experts, in a stream of its own: of (F, B or I), stage, microbatch."""


@dataclass(frozen=True)
class Header:
    """Identity of the rank that wrote a file, and of its run."""

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


def labels(header: Header) -> list[dict[str, Any]]:
    """Return the events that name the row of a rank."""
    pid, tid = header.row
    place = f"data {header.data} pipeline {header.pipeline}"
    host = f" on {header.host}" if header.host else ""
    found: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": place}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid,
         "args": {"name": f"rank {header.rank}{host}"}},
    ]  # fmt: skip
    if header.settings.get("pairs"):
        name = {"name": f"rank {header.rank}{host}, exchanges of experts"}
        row = {"pid": pid, "tid": tid + _EXCHANGES}
        found.append({"name": "thread_name", "ph": "M", **row, "args": name})
    return found


def header_line(header: Header) -> str:
    """Return the first line of a file, with the bracket that opens the list."""
    run = {"name": "run", "ph": "M", "args": {"format": FORMAT, **asdict(header)}}
    return f"{_compact([run, *labels(header)])[:-1]}\n"


def size_fields(microbatch: int, tokens: int, pairs: int) -> dict[str, int]:
    """Return the fields of a closing record that say how long a micro-batch is.

    Args:
        microbatch: 0 to m-1.
        tokens: All of its tokens.
        pairs: The sum of the squares of the lengths of its samples.
    """
    return {f"tokens {microbatch}": tokens, f"pairs {microbatch}": pairs}


def sizes_in(fields: Mapping[str, int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (micro-batch, (tokens, pairs)) for all that a closing record has."""
    for key, tokens in fields.items():
        what, _, microbatch = key.partition(" ")
        pairs = fields.get(f"pairs {microbatch}")
        if what == "tokens" and microbatch.isdecimal() and pairs is not None:
            yield int(microbatch), (tokens, pairs)


def iteration_line(
    row: tuple[int, int], begin_ns: int, spans: Iterable[Span], end: Mapping[str, int]
) -> str:
    """Return the line of one iteration.

    Args:
        row: Of the rank, see `Header.row`.
        begin_ns: Begin of the iteration on the clock of the rank.
        spans: What belongs to it.
        end: Figures of the iteration, with its number, `iteration`, and its `duration_wall`.
    """
    pid, tid = row
    events: list[dict[str, Any]] = []
    for name, start_ns, end_ns, attributes in spans:
        title = name
        if name == "wait":
            on = attributes.get("on")
            title = f"wait: {attributes.get('cause')}" if on is None else f"wait for rank {on}"
        elif name == "exchange":
            title = f"{attributes.get('of')} {attributes.get('microbatch', '')}"
        elif name in _ACTIONS:
            title = f"{name} {attributes.get('microbatch', '')}"
        events.append({
            "name": title, "cat": name, "ph": "X", "pid": pid,
            "tid": tid + _EXCHANGES if name == "exchange" else tid,
            "ts": (begin_ns + start_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3,
            "args": attributes,
        })  # fmt: skip
    # Last, as the end of a line that is whole.
    events.append({
        "name": f"iteration {end['iteration']}", "cat": "iteration", "ph": "X", "pid": pid,
        "tid": tid, "ts": begin_ns / 1e3, "dur": end["duration_wall"] / 1e3, "args": end,
    })  # fmt: skip
    return f",{_compact(events)[1:-1]}\n"


# One call of the encoder for an iteration: one for each span would take the time of the training.
_compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
