"""Tables as CSV in the format of torch.distributed.pipelining: its files load here, ours there.

Each row is a pipeline rank, each cell an action such as `2F0`. An empty cell is an idle slot,
`(0F4;7B1)OVERLAP_F_B` a pair that torch overlaps; here the two actions run in sequence. Cells for
communication and sharding (`SEND_F`, `RECV_B`, `UNSHARD`, `REDUCE_GRAD`, ...) are skipped, because
all of these are derived from the computation. The rows imply the placement.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Row, Schedule
from megatron_ext.schedules.table.placement import Placement, recognised
from megatron_ext.schedules.table.validation import validate
from megatron_ext.text_file import read_text

__all__ = ["dumps", "load", "loads"]

_MAX_BYTES = 64 << 20
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def dumps(schedule: Schedule) -> str:
    """Return a table as CSV; with twins, that of one of the two mirrored pipelines."""
    text = io.StringIO()
    csv.writer(text).writerows(map(str, row) for row in schedule.rows)
    return text.getvalue()


def load(path: str, pp: int | None = None, num_microbatches: int | None = None) -> Schedule:
    """Return the validated schedule of a file, named `csv:PATH`.

    Args:
        path: The file.
        pp: Number of ranks that it must have; None: any.
        num_microbatches: Number of micro-batches that it must have; None: any.

    Raises:
        ScheduleError: The file cannot be read, has other sizes, or is not a correct schedule.
    """
    if not path:
        raise ScheduleError("csv: names no file; write csv:FILE")
    try:
        text = read_text(Path(path), _MAX_BYTES)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read as a schedule: {error.strerror}") from error
    except ValueError as error:  # not text, or an impossible path
        raise ScheduleError(f"{path} cannot be read as a schedule: {error}") from error
    try:
        schedule = loads(text, f"csv:{path}")
        _check_size(schedule, pp, num_microbatches)
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return schedule


def loads(text: str, name: str) -> Schedule:
    """Return the schedule of a CSV text, not validated.

    Raises:
        ScheduleError: A cell is not an action, or the rows do not imply a placement of stages.
    """
    try:
        rows = tuple(
            tuple(_actions(cells, line))
            for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1)
        )
    except csv.Error as error:
        raise ScheduleError(f"this is not CSV: {error}") from error
    if not any(rows):
        raise ScheduleError("it contains no action; write one row of actions for each rank")
    _check_numbers(rows)
    count = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(name, _placement(rows), count, rows)


def _actions(cells: Iterable[str], line: int) -> Iterator[Action]:
    for number, cell in enumerate(cells, start=1):
        text = cell.strip()
        pair = _PAIR.fullmatch(text)
        for part in pair[1].split(";") if pair else [text]:
            if not part.strip() or _DERIVED.fullmatch(part.strip()):
                continue
            try:
                yield Action.parse(part)
            except ScheduleError as error:
                raise ScheduleError(f"row {line}, cell {number}: {error}") from error


def _check_numbers(rows: tuple[Row, ...]) -> None:
    """Refuse numbers so large that checking them would need more memory than the file itself."""
    num_actions = sum(map(len, rows))
    for line, row in enumerate(rows, start=1):
        for action in row:
            if max(action.stage, action.microbatch) >= num_actions:
                raise ScheduleError(
                    f"row {line} runs {action}, but {num_actions} actions are too few for that "
                    f"many stages or micro-batches, numbered from 0; is the file complete?"
                )


def _placement(rows: tuple[Row, ...]) -> Placement:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for index, action in enumerate(row):
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(
                    f"row {rank + 1} runs {action} as its action {index}, but stage "
                    f"{action.stage} is on row {first + 1}; keep each stage on one row"
                )
    missing = set(range(max(owner) + 1)) - set(owner)
    if missing:
        raise ScheduleError(
            f"no row runs stage {min(missing)} although there is a stage {max(owner)}; is the "
            f"file complete? It has {len(rows)} rows and needs one for each rank"
        )
    return recognised(tuple(owner[stage] for stage in sorted(owner)), len(rows))


def _check_size(schedule: Schedule, pp: int | None, num_microbatches: int | None) -> None:
    if pp not in (None, schedule.pp):
        raise ScheduleError(
            f"it has {schedule.pp} rows, one for each rank, so it is for pp {schedule.pp} and not "
            f"for pp {pp}; use --pp {schedule.pp} or another file"
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        count = schedule.num_microbatches
        raise ScheduleError(
            f"it runs {count} micro-batches (0 to {count - 1}), not {num_microbatches}; use "
            f"--microbatches {count} or another file"
        )
