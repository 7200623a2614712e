"""Table files: CSV in the format of torch.distributed.pipelining, and JSON.

In CSV, every row is a pipeline rank, and every cell is an action such as `2F0`, or a pair that runs
as one action: `(0F4;7B1)OVERLAP_F_B`. As an extension to torch's format, `2F0.3` is the action for
slice 3 of a micro-batch. All slices in a file have the same length. An empty cell is an idle slot.
Cells for communication and sharding (`SEND_F`, `UNSHARD`, `WAIT_REDUCE_GRAD`, ...) are skipped,
because those actions are derived from the computation. The placement is derived from the rows. JSON
files also contain the name, options, placement, twins, slice lengths and times.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.errors import ScheduleError
from megatron_ext.files import read_text
from megatron_ext.schedules.table.actions import Row, Schedule, parse_row
from megatron_ext.schedules.table.placement import Placement, recognised
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.validation import validate

# Larger than any table that we can generate. The limit keeps a wrong path, such as a
# checkpoint, from exhausting the memory.
_MAX_BYTES = 64 << 20
_DERIVED = re.compile(
    r"\d+(WAIT_)?(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*"
)


def csv_text(schedule: Schedule) -> str:
    """Return a table as CSV. With twins, this is one of the two mirrored pipelines' table.

    Raises:
        ScheduleError: A stage's forward and backward passes run on different ranks.
    """
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} has every stage on two ranks, but CSV supports only one rank per "
            "stage; write a .json file"
        )
    text = io.StringIO()
    writer = csv.writer(text)
    for rank in range(len(schedule.rows)):
        writer.writerow(schedule.cells(rank))
    return text.getvalue()


def load_csv(
    path: str,
    pp: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """Load a schedule from a file and validate it. The schedule is named `csv:PATH`.

    If `pp` or `num_microbatches` is None, any number is accepted.

    Raises:
        ScheduleError: The file cannot be read, has different sizes, or is not a correct schedule.
    """
    if not path:
        raise ScheduleError("csv: does not name a file; write csv:FILE")
    try:
        text = read_text(Path(path), _MAX_BYTES)
    except (OSError, ValueError) as error:  # not text or an invalid path
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(
            f"{path} cannot be read as a schedule: {reason}; `megatron-ext plot NAME --pp N "
            "--microbatches M -o FILE.csv` writes such a file"
        ) from error
    try:
        # Name the file in all errors about its content.
        schedule = from_csv(text, f"csv:{path}")
        count = schedule.num_microbatches
        if pp not in (None, schedule.pp):
            raise ScheduleError(
                f"it has {schedule.pp} rows, one per rank, so it is for pp {schedule.pp} and not "
                f"for pp {pp}; use --pp {schedule.pp} or another file"
            )
        if num_microbatches not in (None, count):
            raise ScheduleError(
                f"it runs {count} micro-batches (0 to {count - 1}), not {num_microbatches}; use "
                f"--microbatches {count} or another file"
            )
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return schedule


def from_csv(text: str, name: str) -> Schedule:
    """Return the schedule that CSV text describes, without validating it.

    Raises:
        ScheduleError: A cell is not an action, or the rows do not imply a placement of stages.
    """
    rows, pairs = _parsed(text)
    if not any(rows):
        raise ScheduleError("it contains no actions; write one row of actions per rank")
    rank_of = _rank_of(rows)
    # Micro-batches and slices are numbered from 0, so the highest numbers determine the counts.
    num_microbatches = 0
    num_slices = 0
    for row in rows:
        for action in row:
            num_microbatches = max(num_microbatches, action.microbatch + 1)
            num_slices = max(num_slices, action.slice + 1)
    return Schedule(
        name,
        recognised(rank_of, len(rows)),
        num_microbatches,
        tuple(rows),
        pairs=tuple(pairs) if any(pairs) else (),
        slices=shares_of_equal_cost(num_slices),
    )


def _parsed(text: str) -> tuple[list[Row], list[frozenset[int]]]:
    """Return the rows in CSV text and the positions in each row where pairs start.

    Raises:
        ScheduleError: The text is not CSV, or a cell is not an action.
    """
    rows: list[Row] = []
    pairs: list[frozenset[int]] = []
    # Remove byte-order marks and blank lines, which editors may add at the start and
    # end.
    lines = io.StringIO(text.strip("\ufeff \t\r\n"))
    try:
        for line, cells in enumerate(csv.reader(lines), start=1):
            computed = []
            for cell in cells:
                is_derived = _DERIVED.fullmatch(cell.strip())
                computed.append("" if is_derived else cell)
            try:
                row, begins = parse_row(computed)
            except ScheduleError as error:
                raise ScheduleError(f"row {line}, {error}") from error
            rows.append(row)
            pairs.append(begins)
    # One cause is a cell with more than the 131,072 characters that Python's reader
    # accepts.
    except csv.Error as error:
        raise ScheduleError(f"this is not CSV: {error}") from error
    return rows, pairs


def _rank_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return every stage's rank.

    Raises:
        ScheduleError: A stage is in more than one row or in none, or a number is far too large.
    """
    num_actions = sum(map(len, rows))
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(rows):
        for index, action in enumerate(actions):
            highest = max(action.stage, action.microbatch, action.slice)
            # Validating a table with such numbers would need far more memory than the file.
            if highest >= num_actions:
                raise ScheduleError(
                    f"row {rank + 1} runs {action}, but {num_actions} actions are too few for so "
                    f"many stages, micro-batches or slices, numbered from 0; is the file complete?"
                )
            first_rank = rank_of.setdefault(action.stage, rank)
            if first_rank != rank:
                raise ScheduleError(
                    f"row {rank + 1} runs {action} as its action {index}, but stage "
                    f"{action.stage} is in row {first_rank + 1}; keep every stage in one row"
                )
    num_stages = 1 + max(rank_of)
    missing = set(range(num_stages)) - set(rank_of)
    if missing:
        raise ScheduleError(
            f"no row runs stage {min(missing)}, but there is a stage {num_stages - 1}; is the file "
            f"complete? It has {len(rows)} rows and needs one per rank"
        )
    return tuple(rank_of[stage] for stage in range(num_stages))


def json_text(schedule: Schedule, **times: Sequence[Sequence[float]]) -> str:
    """Return a table as JSON.

    `times` are additional rows of numbers, such as `starts` and `ends` from a simulation.
    """
    placement = asdict(schedule.placement)
    # JSON has no sets.
    placement["twin_hops"] = sorted(schedule.placement.twin_hops)
    content: dict[str, Any] = {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "num_microbatches": schedule.num_microbatches,
    }
    if schedule.slice_sizes:
        content["slice_sizes"] = schedule.slice_sizes
    elif schedule.num_slices > 1:
        content["slices"] = schedule.slices
    content["placement"] = {
        key: value for key, value in placement.items() if value is not None
    }
    row_cells = []
    for rank in range(len(schedule.rows)):
        row_cells.append(list(schedule.cells(rank)))
    content["rows"] = row_cells
    content.update(times)
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        is_nonempty_list = isinstance(value, list | tuple) and len(value) > 0
        if is_nonempty_list and isinstance(value[0], list):
            # Write every table row on a separate line.
            row_texts = ",\n    ".join(map(json.dumps, value))
            text = f"[\n    {row_texts}\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Schedule:
    """Return the schedule that JSON text describes, without validating it. Ignore times.

    Raises:
        ScheduleError: The text is not in the format that `json_text` returns.
    """
    try:
        content = json.loads(text)
        # JSON has lists instead of the tuples and the set in a Placement.
        fields = dict(content["placement"])
        for key, value in fields.items():
            if isinstance(value, list):
                fields[key] = tuple(value)
        fields["twin_hops"] = frozenset(fields["twin_hops"])
        placement = Placement(**fields)
        parsed_rows = map(parse_row, content["rows"])
        rows, pairs = zip(*parsed_rows, strict=True)
        slices = content.get("slices", (1.0,))
        slice_sizes = content.get("slice_sizes", ())
        return Schedule(
            content["schedule"],
            placement,
            content["num_microbatches"],
            rows,
            content["options"],
            pairs=pairs if any(pairs) else (),
            slices=tuple(slices),
            slice_sizes=tuple(map(tuple, slice_sizes)),
        )
    # The text may be JSON with different content, or nest brackets too deeply for
    # Python's parser.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ScheduleError(
            f"this JSON is not a schedule ({error!r}); write one with `megatron-ext plot NAME "
            f"--pp P --microbatches M -o FILE.json`"
        ) from error
