"""Writes digests of a run by hand, as ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ext.tracing.digest_files import (
    KINDS,
    NO_MICROBATCH,
    Header,
    Kind,
    Record,
    Writer,
)

NUM_LAYERS = 4
NUM_MICROBATCHES = 2
_RANK_0 = Header(0, "a")
SLICED = Header(0, summation={"slices": 2})


def record(kind: Kind, microbatch: int, layer: int, **changes: object) -> Record:
    """Return a record of a layer, one stage for each."""
    letters = {"forward": "F", "backward": "B", "weight gradient": "B"}
    action = f"{layer}{letters[kind]}{microbatch}" if kind in letters else ""
    fields: dict[str, object] = {"part": "", "position": 0, "num_elements": 64}
    fields |= {"bits": "0" * 32, "norm": 2.0, "projections": [1.0, -1.0, 2.0, 0.5]}
    module = f"decoder.layers.{layer}"
    whole = Record(kind, microbatch, module, stage=layer, action=action, **fields)  # type: ignore[arg-type]
    return whole._replace(**changes)  # type: ignore[arg-type]


def step_records() -> list[Record]:
    """Return what one rank records in a step."""
    records = []
    for kind in KINDS:
        numbers = range(NUM_MICROBATCHES)
        if kind in ("reduced gradient", "weights"):
            numbers = range(NO_MICROBATCH, 0)
        records += [
            record(kind, m, layer) for m in numbers for layer in range(NUM_LAYERS)
        ]
    return records


def write(folder: Path, *steps: Sequence[Record], header: Header = _RANK_0) -> Path:
    """Write the file of a rank, and return the folder."""
    writer = Writer(folder, header)
    for number, records in enumerate(steps, 1):
        writer.step(number, records)
    writer.close()
    return folder


def changed(records: Sequence[Record], *places: tuple[Kind, int, int]) -> list[Record]:
    """Return records of which some have other bits, by half of their norm."""
    result = []
    for item in records:
        place = item.kind, item.microbatch, item.stage
        if place in places:
            item = item._replace(bits="1" * 32, projections=[2.0, 0.0, 3.0, -0.5])
        result.append(item)
    return result


def slightly(records: Sequence[Record], kind: Kind, by: float) -> list[Record]:
    """Return records of which those of a kind differ by little."""
    result = []
    for item in records:
        if item.kind == kind:
            near = [projection + by for projection in item.projections]
            item = item._replace(bits="2" * 32, projections=near)
        result.append(item)
    return result
