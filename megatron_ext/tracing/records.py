"""One rank's trace file: its name, its records and their format.

Folders and files have the same names as in MegatronApp's DPP:

    benchmark/data-2-pipeline-4-tensor-1-dpp-True/benchmark-data-0-pipeline-3-tensor-0.json

A file is a JSON list of Chrome-trace events, which Perfetto can open. The first line describes the
rank and the run. Each subsequent line contains one iteration's spans, on the rank's clock, followed
by the iteration itself with its values (shown as two lines here):

    [{"name":"run","ph":"M","args":{"format":5,"rank":3,...}},...
    ,{"name":"forward 0","cat":"forward","ph":"X","pid":3,"tid":0,"ts":81.2,"dur":7.9,"args":{...}}
    ,{"name":"iteration 7","cat":"iteration",...,"args":{"iteration":7,"wires":{"2":"shm"},...}}

The recorder only appends lines, so a file is readable at any time; the closing bracket is written
at the end of the run.

The category (`cat`) is the type of a span. Attributes by category (slice 0 is omitted):

    forward, ...   `ACTION_NAMES`: stage, microbatch, slice
    send, receive  to, or from (global ranks), for (F: an activation, B: a gradient), stage that
                   needs it, microbatch, slice, bytes; `bind_id` joins the two ends of a message
    wait           cause (input, slot, leader, credit); all but slot: on (the global rank), for,
                   stage, microbatch, slice, if a message ended the wait
    exchange       (of tokens with other experts, in a separate stream) of (F, B or I), stage,
                   microbatch, layer (its index within the stage)
    reduce, optimizer, weights

An iteration has `wires` (global rank of a peer -> the wire to it), `failed` if an error stopped it,
`slice_sizes` if slices depend on lengths (`Schedule.slice_sizes`) and, on ranks that read data,
`lengths` (micro-batch -> number of tokens, and sum of the squared lengths of its samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Kind

FORMAT = 5
"""Increased whenever older readers could misread a file."""

FILE_NAME = "benchmark-data-{}-pipeline-{}-tensor-{}.json"
"""Template for the data, pipeline and tensor ranks of `Header`."""

SCHEDULE_FILE = "schedule.json"
"""The table for a full batch, in the same folder as the ranks' files."""

ACTION_NAMES: dict[Kind, str] = {
    "R": "forward",  # readers look up kinds by name and use the last match, F
    "F": "forward",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
}
"""Action kind -> name of its spans."""


@dataclass(frozen=True)
class Header:
    """The identity of the rank that wrote a file, and of its run."""

    rank: int
    """Global rank."""
    data: int
    pipeline: int
    tensor: int
    """Ranks within their groups; `data` includes context parallelism."""
    sizes: tuple[int, int, int]
    """Sizes of the data (with context), pipeline and tensor groups."""
    num_ranks: int
    """Number of ranks in the job, which may differ from the product of `sizes`, because forward
    ranks in a disaggregated job may have no tensor parallelism."""
    host: str = ""
    clock: str = ""
    """The clock's name. Times from ranks with the same clock can be compared; each boot of a host
    has a new clock."""
    clock_ns: int = 0
    wall_ns: int = 0
    """The clock and the time since 1970, read at the same moment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings: schedule, transport, model sizes, versions and so on."""
    run: str = ""
    """torchrun's run id and restart count, which distinguish attempts; empty without torchrun.
    In a c10d rendezvous, agents may have different restart counts in the same attempt."""

    @property
    def label(self) -> str:
        """The text shown to users."""
        names = ("dp", "pp", "tp")
        places = (self.data, self.pipeline, self.tensor)
        parts = []
        for name, place, size in zip(names, places, self.sizes, strict=True):
            if size > 1:
                parts.append(f"{name} {place}")
        if not parts:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({', '.join(parts)})"


def directory_name(sizes: tuple[int, int, int], *, dynamic: bool) -> str:
    """Return a run's folder, named after the sizes of its data, pipeline and tensor groups."""
    data, pipeline, tensor = sizes
    # MegatronApp uses these two words for runs with and without --use-dpp.
    kind = "dpp-True" if dynamic else "pp"
    return f"data-{data}-pipeline-{pipeline}-tensor-{tensor}-{kind}"
