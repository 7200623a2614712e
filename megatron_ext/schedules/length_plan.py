"""Predicts what balancing by cost gains with the lengths of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import generate, registered
from megatron_ext.schedules.search.length_balance import (
    LengthCost,
    Packing,
    deal_out,
    fills_of,
    num_fills,
    pack_by_cost,
    pack_in_file_order,
    shortest,
)
from megatron_ext.schedules.search.length_order import best_order, makespan_of
from megatron_ext.schedules.text_table import aligned

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs

__all__ = ["Gains", "LengthGains", "Sizes", "predict", "read_lengths", "table"]

MAX_BATCHES = 4
"""Global batches that are simulated: the first ones of the file."""

_FIELDS = ("length", "num_tokens", "tokens")


def read_lengths(path: Path) -> list[int]:
    """Read the lengths of samples in tokens: one number a line, or JSON lines.

    A JSON line is a number, a list (its length counts), or an object with `length`, `num_tokens` or
    `tokens`, which hold either. Empty lines do not count.

    Raises:
        ScheduleError: The file cannot be read, or a line holds no length.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ScheduleError(
            f"--lengths {path} cannot be read: {reason}; give a file with one length a line"
        ) from error
    found = [
        _length(line, f"--lengths {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ScheduleError(f"--lengths {path} holds no length; write one number a line")
    return found


def _length(line: str, where: str) -> int:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = next((value[name] for name in _FIELDS if name in value), None)
    if isinstance(value, list):
        value = len(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(
            f"{where}: {line.strip()[:40]!r} is no length; write a whole number of 1 or more, or "
            f"JSON with {', '.join(_FIELDS)}"
        )
    return value


@dataclass(frozen=True)
class Sizes:
    """How much one step takes.

    Raises:
        ScheduleError: A number is not positive.
    """

    pp: int
    num_microbatches: int
    """Of one replica."""
    num_replicas: int
    max_tokens: int
    """Of a micro-batch."""

    def __post_init__(self) -> None:
        """Check the numbers that no schedule checks."""
        for flag, value in (("--replicas", self.num_replicas), ("--max-tokens", self.max_tokens)):
            if value < 1:
                raise ScheduleError(f"{flag} {value} must be 1 or more")


@dataclass(frozen=True)
class LengthGains:
    """Steps of one schedule, in forwards of the mean micro-batch on 1/pp of the model.

    All are means over the global batches.
    """

    schedule: str
    """With its options."""
    in_file_order: float
    order: float
    """With `--pipeline-balance order`."""
    pack: float
    """With `--pipeline-balance pack`: replicas share out the micro-batches, and order them."""
    repack: float
    """With samples packed anew by cost."""
    repack_and_order: float
    bound: float
    """What no packing and no order can beat."""


@dataclass(frozen=True)
class Gains:
    """A prediction for several schedules."""

    found: list[LengthGains]
    """Shortest step with `--pipeline-balance pack` first."""
    num_batches: int
    """Global batches that were simulated."""
    left_out: list[str]
    """Why other schedules are left out."""


@dataclass(frozen=True)
class _Batch:
    """A global batch, packed. Costs are over that of the mean micro-batch in file order."""

    file_rows: list[list[float]]
    repacked_rows: list[list[float]]
    sample_costs: list[float]

    def dealt_rows(self, fills: float) -> list[list[float]]:
        """Return what each replica runs if they share out their micro-batches."""
        costs = [cost for turn in zip(*self.file_rows, strict=True) for cost in turn]
        shares = deal_out(costs, len(self.file_rows), fills)
        return [[costs[number] for number in share] for share in shares]


def predict(
    lengths: Sequence[int], name: str, sizes: Sizes, cost: LengthCost, costs: Costs
) -> Gains:
    """Simulate schedules with the lengths of a data set.

    Args:
        lengths: Tokens of each sample, in the order in which a sampler reads them.
        name: A registered schedule, or `all`; those without mirrored pipelines.
        sizes: How much one step takes.
        cost: Cost of a sample by its length.
        costs: Durations for the mean micro-batch, and latency.

    Raises:
        ScheduleError: The lengths do not fill one global batch, a sample is longer than a
            micro-batch, or no schedule can run these sizes.
    """
    schedules, refused = _schedules(name, sizes, costs)
    if not schedules:
        raise ScheduleError("; ".join(refused))
    fills = num_fills(sizes.pp, 1)
    batches = [_packed(batch, sizes, cost, fills) for batch in _global_batches(lengths, sizes)]
    found = [_gains(schedule, batches, costs) for schedule in schedules]
    found.sort(key=lambda gains: gains.pack)
    return Gains(found, len(batches), list(dict.fromkeys(refused)))  # variants share reasons


def _schedules(name: str, sizes: Sizes, costs: Costs) -> tuple[list[Schedule], list[str]]:
    found, refused = [], []
    for generator in registered().values():
        if name not in ("all", generator.name):
            continue
        if generator.twins > 1:
            refused.append(
                f"{generator.name} mirrors two pipelines, whose lengths are not simulated; take "
                "another schedule"
            )
            continue
        for options in generator.variants:
            try:
                schedule = generate(
                    generator.name,
                    sizes.pp,
                    sizes.num_microbatches,
                    costs=costs,
                    **options,  # type: ignore[arg-type]
                )
            except ScheduleError as error:  # noqa: PERF203 - sizes are refused by an exception
                refused.append(str(error))
            else:
                found.append(schedule)
    if not found and not refused:
        refused = [f"--lengths simulates registered schedules, not {name}; name one, or all"]
    return found, refused


def _global_batches(lengths: Sequence[int], sizes: Sizes) -> Iterator[Sequence[int]]:
    """Yield the samples of each global batch, as a sampler packs them in file order."""
    wanted = sizes.num_microbatches * sizes.num_replicas
    first = room = packs = made = 0
    for number, length in enumerate(lengths):
        if length > room:
            if packs == wanted:
                yield lengths[first:number]
                made += 1
                if made == MAX_BATCHES:
                    return
                first, packs = number, 0
            packs += 1
            room = sizes.max_tokens
        room -= length
    if packs == wanted:
        yield lengths[first:]
    elif not made:
        raise ScheduleError(
            f"the lengths fill {packs} micro-batches of {sizes.max_tokens} tokens, one step takes "
            f"{sizes.num_microbatches} on each of {sizes.num_replicas} replicas; give more "
            "lengths, or lower --microbatches, --replicas or --max-tokens"
        )


def _packed(lengths: Sequence[int], sizes: Sizes, cost: LengthCost, fills: float) -> _Batch:
    settings = lengths, sizes.num_replicas, sizes.max_tokens
    in_file_order = pack_in_file_order(*settings)
    unit = cost.of_pack(lengths) / (sizes.num_microbatches * sizes.num_replicas)

    def rows(packing: Packing) -> list[list[float]]:
        return [[each / unit for each in row] for row in cost.of_packing(packing, lengths)]

    by_cost = pack_by_cost(*settings, cost, fills)
    return _Batch(
        rows(in_file_order), rows(by_cost), [cost.of_length(length) / unit for length in lengths]
    )


def _gains(schedule: Schedule, batches: Sequence[_Batch], costs: Costs) -> LengthGains:
    def step(rows: list[list[float]], *, ordered: bool) -> float:
        return max(
            makespan_of(
                schedule,
                row,
                best_order(schedule, row, costs) if ordered else range(len(row)),
                costs,
            )
            for row in rows
        )

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(batches)

    fills = fills_of(schedule.placement)
    return LengthGains(
        schedule.label,
        mean(step(batch.file_rows, ordered=False) for batch in batches),
        mean(step(batch.file_rows, ordered=True) for batch in batches),
        mean(step(batch.dealt_rows(fills), ordered=True) for batch in batches),
        mean(step(batch.repacked_rows, ordered=False) for batch in batches),
        mean(step(batch.repacked_rows, ordered=True) for batch in batches),
        mean(
            shortest(batch.sample_costs, len(batch.file_rows), schedule.placement, costs)
            for batch in batches
        ),
    )


_HEADS = (
    "schedule",
    "file order",
    "order",
    "pack",
    "repack",
    "repack, order",
    "bound",
    "gain of pack",
)


def table(found: Sequence[LengthGains]) -> str:
    """Return the prediction as text, in the order given."""
    rows = [_HEADS]
    for gains in found:
        steps = (
            gains.in_file_order,
            gains.order,
            gains.pack,
            gains.repack,
            gains.repack_and_order,
            gains.bound,
        )
        gained = gains.in_file_order / gains.pack
        rows.append((gains.schedule, *(f"{step:.4g}" for step in steps), f"{gained:.3f}"))  # type: ignore[arg-type]
    return aligned(rows)
