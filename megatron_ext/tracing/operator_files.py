"""Operators that one rank runs inside a module: which place to record, and the file format.

A file has one JSON value per line: first the header, then one line per operator, in execution
order:

    {"rank":0,"host":"node-1","tensor":0,"context":0,"action":"2F0","place":"1:0:forward:...",
     "format":3}
    ["aten.mm.default",[[16,32]],"9f...",1.5,[...]]

The reader needs only the standard library.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.files import parse_json
from megatron_ext.tracing.digest_files import OPERATORS

FORMAT = 3
FILE_NAME = "operators-rank-{:05d}.jsonl"
# The recorder needs a DebugMode that calls a hook for each operator, as torch's DebugMode has done
# since 2.10.
_FIRST_TORCH = 2, 10

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Place:
    """A module in one micro-batch's forward or backward pass."""

    iteration: int
    microbatch: int
    """The micro-batch's number within the global batch."""
    direction: Direction
    module: str
    """Name of a module that has digests, with its layer number in the model."""

    def __str__(self) -> str:
        return f"{self.iteration}:{self.microbatch}:{self.direction}:{self.module}"

    @classmethod
    def parsed(cls, text: str) -> Place:
        """Return the place that a text describes, in the format of `str(place)`.

        Raises:
            DataError: The text is not a place.
        """
        iteration, _, remainder = text.partition(":")
        microbatch, _, remainder = remainder.partition(":")
        direction, _, module = remainder.partition(":")
        # `int` would also accept signs, spaces and underscores.
        are_numbers = iteration.isdecimal() and microbatch.isdecimal()
        is_direction = direction in ("forward", "backward")
        if not are_numbers or not is_direction or not module:
            raise DataError(
                f"{OPERATORS}={text} is not a place; give iteration, micro-batch, forward or "
                "backward, and module, as in 1:0:forward:decoder.layers.2"
            )
        return cls(int(iteration), int(microbatch), direction, module)  # type: ignore[arg-type]


def place_asked_for() -> Place | None:
    """Return the place whose operators this run should record; None if none was requested.

    Raises:
        DataError: The variable is not a place, or torch cannot record operators.
    """
    text = os.environ.get(OPERATORS)
    if not text:
        return None
    if reason := why_unavailable():
        raise DataError(f"{OPERATORS}: {reason}; unset it")
    return Place.parsed(text)


def why_unavailable() -> str:
    """Return why torch cannot record operators; empty if it can."""
    try:
        # Do not import torch for this check, because `compare` calls it too and does not import
        # torch.
        installed = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    major, minor = installed.split(".")[:2]
    if (int(major), int(minor)) < _FIRST_TORCH:
        return f"recording operators requires torch 2.10 or later, but torch is {installed}"
    return ""


class Operator(NamedTuple):
    """One operator that ran."""

    name: str
    shapes: list[list[int]]
    """Shapes of the floating-point results."""
    bits: str
    """Like `norm` and `projections`, of the first floating-point result, as in a digest."""
    norm: float
    projections: list[float]

    @property
    def text(self) -> str:
        """The operator and its result shapes."""
        return f"{self.name} -> {', '.join(map(str, self.shapes))}"


@dataclass(frozen=True)
class OperatorHeader:
    """The rank that wrote a file."""

    rank: int
    host: str
    tensor: int
    """The rank within its tensor-parallel group."""
    context: int
    """The rank within its context-parallel group."""
    action: str
    place: str
    format: int = FORMAT


@dataclass(frozen=True)
class OperatorFile:
    """A file's content."""

    header: OperatorHeader
    operators: list[Operator]


def write(folder: Path, content: OperatorFile) -> None:
    """Write a rank's file."""
    header_fields = asdict(content.header)
    lines = [json.dumps(header_fields)]
    for operator in content.operators:
        lines.append(json.dumps(operator))
    text = "".join(f"{line}\n" for line in lines)
    path = folder / FILE_NAME.format(content.header.rank)
    path.write_text(text, encoding="utf-8")


def read_folder(folder: Path) -> dict[tuple[int, int], OperatorFile]:
    """Return a run's files, by tensor- and context-parallel rank; empty if there are none.

    Raises:
        DataError: A file is damaged or has a different format version.
    """
    contents = {}
    pattern = FILE_NAME.format(0).replace("00000", "*")
    for path in sorted(folder.glob(pattern)):
        try:
            header_line, *lines = path.read_text(encoding="utf-8").splitlines()
            fields = parse_json(header_line)
            if fields.get("format") != FORMAT:
                raise ValueError(f"format {fields.get('format')}, not {FORMAT}")
            header = OperatorHeader(**fields)
            operators = [Operator(*parse_json(line)) for line in lines]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: no operators: {error}; record the training again"
            ) from error
        # Only one replica and one stage run the module at this place, so these two ranks are enough
        # to distinguish the files.
        contents[header.tensor, header.context] = OperatorFile(header, operators)
    return contents
