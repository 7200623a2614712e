"""One rank's digest file: its format, its writer and its reader.

A file has one JSON value per line: first the header, then one line per training step, written when
the step is complete:

    {"format":4,"rank":3,"host":"node-1",...}
    {"step":7,"schedule":"zb-h1","records":[["forward",0,"decoder.layers.3.mlp","",2,1,"2F0",4096,
     "9f...",1.5,[...]],...],"crc":2774823}

`crc` is the CRC-32 of the records' text on the line. A line `{"gap":"..."}` says why a step was not
recorded. If a rank is killed, the last line of its file is incomplete, and the reader skips it. The
reader needs only the standard library.

If the job restarts in the same processes (`--inprocess-restart`), each rank continues in a new
file, `digests-rank-00003-restart-1.jsonl`. `read_folder` joins a rank's files.
"""

from __future__ import annotations

import json
import os
import shlex
import typing
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.files import parse_json

VARIABLE = "MEGATRON_EXT_DIGESTS"
"""Environment variable: the folder for all ranks' digests."""
ROUNDING = "MEGATRON_EXT_DIGESTS_ROUNDING"
"""Environment variable: 1 to round module outputs differently (`rounding.py`)."""
OPERATORS = "MEGATRON_EXT_DIGESTS_OPERATORS"
"""Environment variable: the place whose operators are recorded instead of digests
(`operator_files.py`)."""
FORMAT = 5
"""Increased whenever older readers could misread a file."""
FILE_NAME = "digests-rank-{:05d}.jsonl"
RESTARTED_FILE_NAME = "digests-rank-{:05d}-restart-{}.jsonl"

Kind = Literal["forward", "backward", "weight gradient", "reduced gradient", "weights"]
"""Kinds of tensors, in the order in which a training step computes them.

    forward           output of a module
    backward          gradient of a module's input; for the model as a whole, of its output
    weight gradient   gradient of one parameter, summed over this rank's micro-batches so far
    reduced gradient  gradient of one parameter, after the schedule has ended
    weights           one parameter after the step; for step 0, before the first step
"""
KINDS: tuple[Kind, ...] = typing.get_args(Kind)
FIRST_READING = " (first of two readings)"
"""Ends the names of weights as they were when an evaluation, or another model's step, began. They
are recorded only if any of them changed before the end of the step to which they belong."""
MEGATRONS = "Megatron's own"
"""The recorded name of Megatron's own schedules."""
NO_MICROBATCH = -1
"""Micro-batch number for tensors that do not belong to a single micro-batch."""


@dataclass(frozen=True)
class Header:
    """The rank that wrote a file, and settings that determine which tensors of two runs match."""

    rank: int
    host: str = ""
    num_ranks: int = 0
    """Number of ranks in the run, each of which writes a file; 0 if unknown."""
    tensor: int = 0
    """The rank within its tensor-parallel group."""
    tensor_size: int = 1
    data: int = 0
    """Number of the data-parallel replica."""
    data_size: int = 1
    context: int = 0
    """The rank within its context-parallel group."""
    context_size: int = 1
    expert_size: int = 1
    loss_is_per_token: bool = False
    """Whether gradients are divided by the number of tokens at the end of a step. Otherwise, each
    micro-batch's loss is a mean, divided by the number of micro-batches."""
    schedule: str = MEGATRONS
    """The schedule that the configuration requests."""
    summation: dict[str, int | str] = field(default_factory=dict)
    """Settings of features that determine the order of sums over tokens
    (`FeatureRules.summation`)."""
    routing: str = ""
    """How activations are routed between twins, for schedules with twins."""
    balance: str = "off"
    precision: str = "float32"
    """The dtype of the parameters, or fp8 or fp4 if matrix products use that format."""
    rounded: bool = False
    """Whether outputs were rounded differently to learn tolerances."""
    restart: int = 0
    """How often the job had restarted in the same processes when the rank opened the file."""
    format: int = FORMAT


class Record(NamedTuple):
    """One tensor."""

    kind: Kind
    microbatch: int
    """Number within the global batch, counted as in Megatron's samplers: with n replicas, replica r
    reads the micro-batches r, r + n and so on."""
    module: str
    """Module or parameter, with its global layer number."""
    part: str
    """Which part of the tensor: tensor-parallel rank (t1), replica (d1), slice (s1), etc."""
    stage: int
    position: int
    """Position among the records of the same action."""
    action: str
    """The action that computed the tensor, as in a table: `2F0`. Empty between actions."""
    num_elements: int
    bits: str
    norm: float
    projections: list[float]

    @property
    def key(self) -> tuple[Kind, int, str]:
        """The tensor's identity, independent of which ranks hold its parts."""
        return self.kind, self.microbatch, self.module


@dataclass
class RankFile:
    """A file's content."""

    path: Path
    header: Header
    steps: dict[int, list[Record]] = field(default_factory=dict)
    schedules: dict[int, str] = field(default_factory=dict)
    """Training step -> the schedule that ran it."""
    is_cut: bool = False
    """Whether the last line was incomplete, so its step was skipped."""
    gap: str = ""
    """Why a step was not recorded; empty if all were."""


def folder_asked_for() -> Path | None:
    """Return the folder for this run's digests; None if digests were not requested.

    Raises:
        DataError: A setting for digests was given without the folder.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        return Path(folder)
    for name in (ROUNDING, OPERATORS):
        setting = os.environ.get(name, "")
        if setting not in ("", "0"):
            raise DataError(
                f"{name} has no effect without {VARIABLE}; set that variable to a new folder, or "
                f"remove {name} from the environment"
            )
    return None


def rounds_differently() -> bool:
    """Return whether this run should round its modules' outputs differently.

    Raises:
        DataError: The variable has a value other than 0 or 1.
    """
    text = os.environ.get(ROUNDING, "")
    if text not in ("", "0", "1"):
        raise DataError(
            f"{ROUNDING}={text} is neither 0 nor 1; set it to 1 or unset it"
        )
    return text == "1"


class Writer:
    """Writes one rank's file.

    Raises:
        DataError: The folder cannot be written, or already has a file for this rank.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        file_name = FILE_NAME.format(header.rank)
        if header.restart:
            file_name = RESTARTED_FILE_NAME.format(header.rank, header.restart)
        self.path = folder / file_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Fail if the file already exists, so that two runs cannot mix their digests.
            self._file: IO[str] = self.path.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            raise DataError(
                f"{VARIABLE}: {folder} already has digests from another run; use a new "
                "folder for each run"
            ) from None
        except OSError as error:
            raise DataError(
                f"{VARIABLE}: {folder} cannot be written: {error.strerror or error}; "
                "use a folder that every rank can write to"
            ) from error
        header_fields = asdict(header)
        self._write(json.dumps(header_fields))

    def step(
        self,
        number: int,
        records: Sequence[Record],
        schedule: str | None = None,
    ) -> None:
        """Append a complete step, with the schedule that ran it; None if only weights are known."""
        text = json.dumps(records, separators=(",", ":"))
        crc = zlib.crc32(text.encode())
        self._write(
            f'{{"step":{number},"schedule":{json.dumps(schedule)},"records":{text},'
            f'"crc":{crc}}}'
        )

    def gap(self, reason: str) -> None:
        """Append why a step is not recorded, so that equality of the other steps proves nothing."""
        self._write(json.dumps({"gap": reason}))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()  # if the rank is killed later, its steps are in the file

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_folder(folder: Path, *, settings: str = "") -> list[RankFile]:
    """Return a run's files, by rank. The files before and after restarts are joined.

    Args:
        folder: The run's folder.
        settings: Additional environment variables that the error message should recommend for such
            a run.

    Raises:
        DataError: There are no files, one of them is damaged, or a restart changed the ranks.
    """
    pattern = FILE_NAME.format(0).replace("00000", "*")
    paths = sorted(folder.glob(pattern))
    if not paths:
        quoted_folder = shlex.quote(str(folder))
        raise DataError(
            f"{folder} has no digests; run the training with "
            f"{VARIABLE}={quoted_folder}{settings}"
        )
    files_of_ranks: dict[int, list[RankFile]] = defaultdict(list)
    for path in paths:
        file = read(path)
        files_of_ranks[file.header.rank].append(file)
    return [_joined(files_of_ranks[rank]) for rank in sorted(files_of_ranks)]


def _joined(files: list[RankFile]) -> RankFile:
    """Return a rank's steps from before and after restarts as those of one training.

    A step that a restart repeats counts once, as it ran last. The weights of the step from which a
    restart continued are those that it loaded.
    """
    first, *restarted = sorted(files, key=_restart_of)
    joined = replace(first, steps=dict(first.steps), schedules=dict(first.schedules))
    hosts = [first.header.host]
    for file in restarted:
        _check_same_ranks(first, file)
        joined.is_cut = joined.is_cut or file.is_cut
        joined.gap = joined.gap or file.gap
        if file.header.host != hosts[-1]:
            hosts.append(file.header.host)
        # The job restarted again before its first step.
        if not file.steps:
            continue
        begin = min(file.steps)
        before = joined.steps.get(begin, [])
        # Before its first step, a restart records only the weights that it loaded.
        loaded = file.steps[begin]
        computed = [record for record in before if record.kind != "weights"]
        for number in sorted(joined.steps):
            # The restart repeats this step, or training ended before it did.
            if number > begin:
                del joined.steps[number]
                joined.schedules.pop(number, None)
        joined.steps |= file.steps
        joined.schedules |= file.schedules
        joined.steps[begin] = [*computed, *loaded]
    joined.header = replace(first.header, host=", then ".join(hosts))
    return joined


def _restart_of(file: RankFile) -> int:
    return file.header.restart


def _check_same_ranks(first: RankFile, restarted: RankFile) -> None:
    """Check that a restart has the same ranks and settings, so that records mean the same.

    Raises:
        DataError: A setting differs.
    """
    for header_field in fields(Header):
        name = header_field.name
        before = getattr(first.header, name)
        after = getattr(restarted.header, name)
        if name not in ("host", "restart") and before != after:
            raise DataError(
                f"{restarted.path}: restart {restarted.header.restart} has {name} = {after}, but "
                f"{first.path.name} has {before}, and steps of different ranks cannot be joined; "
                "record again with reserve ranks, or without restarts"
            )


def read(path: Path) -> RankFile:
    """Return a file's content.

    Raises:
        DataError: The file is damaged or has a different format version.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, 1, str(error)) from error
    # Every complete line ends with a line break, so any text after the last line break is an
    # incomplete line.
    *complete_lines, remainder = lines
    numbered_values = _parsed(path, complete_lines)
    try:
        _, header_fields = next(numbered_values)
        # Check the format first, because another format may have different fields.
        file_format = header_fields.get("format")
        if file_format != FORMAT:
            raise _damaged(path, 1, f"format {file_format}, not {FORMAT}")
        header = Header(**header_fields)
        content = RankFile(path, header, is_cut=bool(remainder))
        for number, step in numbered_values:
            if "gap" in step:
                content.gap = step["gap"]
                continue
            # Re-encoding the parsed records yields the text whose checksum was written,
            # because Python writes each float with enough digits to identify it.
            text = json.dumps(step["records"], separators=(",", ":"))
            if zlib.crc32(text.encode()) != step["crc"]:
                raise _damaged(path, number, "its checksum is wrong")
            records = [Record(*fields) for fields in step["records"]]
            content.steps[step["step"]] = records
            # Earlier versions of this package did not record this.
            if schedule := step.get("schedule"):
                content.schedules[step["step"]] = schedule
    except StopIteration:
        raise _damaged(path, 1, "it has no header") from None
    # The lines are JSON, but not in this format.
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, 1, f"unexpected content: {error}") from error
    return content


def _parsed(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield each line's number and value.

    Raises:
        DataError: A line is not JSON.
    """
    number = 1
    try:
        for line in lines:
            yield number, parse_json(line)
            number += 1
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error


def _damaged(path: Path, line: int, reason: str) -> DataError:
    return DataError(
        f"{path}, line {line}: no digests: {reason}; record the training again"
    )
