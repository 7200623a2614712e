"""Reads a training step's micro-batches ahead and cuts them into slices by their lengths.

The table of the step depends on the lengths, so all ranks agree on them before the first action.
Only ranks of the first and last stages read data; the other ranks learn the lengths from them.

All replicas run one table, because experts and losses may communicate between replicas inside an
action. So each place of the table has as many slices as the replica with the most of them needs. A
replica that needs fewer cuts its micro-batch into more, or leaves the last ones empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.balanced_step import fetched, item_cost
from megatron_ext.features.lengths.length_balance import fills_of
from megatron_ext.features.lengths.length_slices import (
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.runtime.lengths import sample_lengths

if TYPE_CHECKING:
    from megatron_ext.features.lengths.replica_exchange import ReplicaExchange
    from megatron_ext.runtime.feature import Model
    from megatron_ext.schedules.table.length_cost import LengthCost

_FLAG = "--pipeline-slice-tokens"
# Stands for the number of slices on a rank that could not read its data; larger than any number.
_UNREADABLE = 1 << 30


@dataclass(frozen=True)
class SlicedStep:
    """The data of one training step on this rank, and its slices (`runtime.feature.ReadAhead`)."""

    iterators: Sequence[Iterator[Any] | None]
    """By chunk: the micro-batches in the order of the table."""
    order: tuple[int, ...]
    """By micro-batch of the table: its number in the data, counted over all replicas that share out
    their micro-batches."""
    slice_bounds: tuple[tuple[int, ...], ...]
    """By micro-batch of the table: the first token of each slice, then the number of tokens."""
    slice_tokens: tuple[tuple[int, ...], ...]
    """By micro-batch of the table: the tokens in each slice, on the replica with the most."""
    length_cost: LengthCost

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Convert reports keyed by the table's micro-batches to keys in the order of the data."""
        return {
            self.order[microbatch]: report for microbatch, report in reports.items()
        }


class _Reading:
    """The micro-batches that this rank has read for a step; without data, it has none."""

    def __init__(self, num_chunks: int) -> None:
        self.items_by_chunk: list[dict[int, Any] | None] = [None] * num_chunks
        """By number in the data; None: the chunk reads no data."""
        self.order: list[int] = []
        self.samples: list[list[int]] = []
        """Lengths of the samples of each micro-batch, in this order."""

    def iterators(self) -> list[Iterator[Any] | None]:
        """Return an iterator over the micro-batches in this order for each chunk."""
        iterators: list[Iterator[Any] | None] = []
        for items in self.items_by_chunk:
            if items is None:
                iterators.append(None)
            else:
                iterators.append(iter([items[number] for number in self.order]))
        return iterators


class LengthSlicer:
    """Cuts the steps of one model into slices by length. Kept across steps."""

    def __init__(
        self, model: Model, length_cost: LengthCost, replicas: ReplicaExchange | None
    ) -> None:
        config = model.pipeline.config
        assert config.slice_tokens is not None
        self._slice_tokens = config.slice_tokens
        self._sorts = config.balance != "off"
        self._length_cost = length_cost
        self._fills = fills_of(model.pipeline.placement)
        self._exchange = replicas
        self._device = device_of(model.chunks)
        # Tensor-parallel ranks must hold equal parts of a slice.
        self._multiple = 1
        # The most tokens of a sample; None: any number, or this rank does not know. Samples may
        # differ without --variable-seq-lengths too, because shapes travel with slices in any case.
        reader = unwrap_model(model.chunks[0])
        self._max_positions: int | None = getattr(reader, "max_sequence_length", None)
        if model.config.sequence_parallel:
            self._multiple = model.config.tensor_model_parallel_size
        # Within a replica, only the first tensor-parallel ranks of some stages read data.
        self._replica_groups = (model.groups.tp, model.groups.pp)
        self._replicas: dist.ProcessGroup = (
            getattr(model.groups, "dp", None)
            or parallel_state.get_data_parallel_group()
        )

    def step(self, iterators: Sequence[Any], num_microbatches: int) -> SlicedStep:
        """Read the data of a step, and agree on its slices. Collective over the job.

        Raises:
            ScheduleError: The data lacks lengths, or has too many slices; or ranks of one replica
                read different data.
        """
        reading, failure = _Reading(len(iterators)), None
        counts = [0] * num_microbatches
        try:
            if any(iterator is not None for iterator in iterators):
                reading = self._read(iterators, num_microbatches)
                counts = [
                    slices_needed(sum(s), self._slice_tokens) for s in reading.samples
                ]
                for samples, count in zip(reading.samples, counts, strict=True):
                    equal_cost_bounds(samples, count, self._length_cost, self._multiple)
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            failure, counts = error, [_UNREADABLE] * num_microbatches
        order = [number + 1 for number in reading.order] or [0] * num_microbatches
        shared = self._shared([counts, order], self._replica_groups)
        differs = bool(reading.order) and [counts, order] != shared
        # Only some ranks notice the difference, so share that too: the others would wait for them.
        *shared_counts, any_differs = self._shared(
            [*shared[0], int(differs)], [*self._replica_groups, self._replicas]
        )
        if failure is not None:
            raise failure
        self._check(shared_counts, any_differs=bool(any_differs))
        bounds = self._bounds(reading, shared_counts)
        tokens = []
        for microbatch_bounds in bounds:
            widths = [end - begin for begin, end in pairwise(microbatch_bounds)]
            tokens.append(widths + [0] * (max(shared_counts) - len(widths)))
        most_tokens = self._shared(tokens, [self._replicas])
        slice_tokens = []
        for widths, count in zip(most_tokens, shared_counts, strict=True):
            slice_tokens.append(tuple(widths[:count]))
        return SlicedStep(
            reading.iterators(),
            tuple(number - 1 for number in shared[1]),
            bounds,
            tuple(slice_tokens),
            self._length_cost,
        )

    @staticmethod
    def _check(shared_counts: Sequence[int], *, any_differs: bool) -> None:
        """Check that some rank has read data, and that ranks of a replica have read the same.

        All ranks of the job raise the same error, because none may wait for another one.

        Raises:
            ScheduleError: They have not, or a rank could not read its data.
        """
        if max(shared_counts) >= _UNREADABLE:
            raise ScheduleError(
                f"{_FLAG}: another rank could not read the micro-batches of this step; its own "
                "line says why"
            )
        if not all(shared_counts):
            raise ScheduleError(
                f"{_FLAG} needs the lengths of micro-batches, but no rank has a data iterator; "
                f"give one to the first stage, or leave {_FLAG} out"
            )
        if any_differs:
            raise ScheduleError(
                f"{_FLAG}: ranks of one pipeline read micro-batches of different lengths; give all "
                "of them the same data in the same order"
            )

    def _read(self, iterators: Sequence[Any], num_microbatches: int) -> _Reading:
        """Read a step's micro-batches on a rank with data, and put them in order."""
        reading = _Reading(len(iterators))
        try:
            for chunk, iterator in enumerate(iterators):
                if iterator is not None:
                    reading.items_by_chunk[chunk] = fetched(
                        iterator, num_microbatches, self._exchange, _FLAG
                    )
            [held, *_] = [
                items for items in reading.items_by_chunk if items is not None
            ]
            costs = [
                item_cost(item, self._length_cost, _FLAG) for item in held.values()
            ]
        except Exception:
            if self._exchange is not None:
                self._exchange.costs(
                    [nan] * num_microbatches
                )  # the other replicas wait for this
            raise
        if self._exchange is not None:
            costs = self._exchange.costs(costs)
            held = self._exchange.shared_out(held, costs, self._fills)
            for chunk, items in enumerate(reading.items_by_chunk):
                if items is not None:
                    # Copy, because forward steps write into the items that they read.
                    reading.items_by_chunk[chunk] = {n: copy(held[n]) for n in held}
        # By number in the data; without an exchange, these count this replica's micro-batches only.
        numbers = sorted(held)
        if self._sorts:
            numbers = [
                numbers[place]
                for place in rising([costs[number] for number in numbers])
            ]
        reading.order = numbers
        reading.samples = [sample_lengths(held[number]) for number in numbers]
        for number, samples in zip(numbers, reading.samples, strict=True):
            longest = max(samples, default=0)
            if self._max_positions is not None and longest > self._max_positions:
                raise ScheduleError(
                    f"micro-batch {number}: a sequence has {longest} tokens, the model has "
                    f"{self._max_positions} positions; cut or pack the data to that, or raise "
                    "--max-position-embeddings"
                )
        return reading

    def _bounds(
        self, reading: _Reading, counts: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the bounds of each micro-batch in this many slices. Collective over a replica."""
        width = max(counts) + 1
        rows = [[0] * width for _ in counts]
        for row, samples, count in zip(rows, reading.samples, counts, strict=False):
            bounds = equal_cost_bounds(
                samples, count, self._length_cost, self._multiple
            )
            row[: len(bounds)] = bounds
        shared = self._shared(rows, self._replica_groups)
        return tuple(
            tuple(row[: count + 1]) for row, count in zip(shared, counts, strict=True)
        )

    def _shared(self, values: Any, groups: Sequence[dist.ProcessGroup]) -> Any:
        """Return the largest of each value in nested lists, over each of the groups."""
        together = torch.tensor(values, dtype=torch.int64, device=self._device)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        return together.tolist()
