"""Reads a training step's micro-batches in advance and cuts them into slices by length.

The step's table depends on the lengths, so all ranks agree on them before the first action. Only
ranks that hold the first or last stage read data, and they share the lengths with the other ranks.

All replicas run the same table, because experts and losses may communicate between replicas inside
an action. A micro-batch in the table therefore has as many slices as the replica with the longest
micro-batch at that place needs. The other replicas cut their micro-batches into the same number of
slices, the last of which may be empty.
"""

from __future__ import annotations

import logging
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
    automatic_slice_tokens,
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.features.lengths.length_tables import schedule_by_length
from megatron_ext.runtime.lengths import packed_bounds_in, sample_lengths

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.features.lengths.replica_exchange import ReplicaExchange
    from megatron_ext.runtime.feature import Model
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs
    from megatron_ext.schedules.table.length_cost import LengthCost

_LOG = logging.getLogger(__name__)

_FLAG = "--pipeline-slice-tokens"
# A rank that could not read its data sends this value instead of a slice count. No
# slice count is as large, so the maximum over all ranks is this value.
_UNREADABLE = 1 << 30


@dataclass(frozen=True)
class SlicedStep:
    """One training step's data on this rank, and its slices.

    It serves the core as a `ReadAhead`, and the feature `slices` as a `CutAhead`.
    """

    iterators: Sequence[Iterator[Any] | None]
    """[chunk] -> the micro-batches in table order; None if the chunk reads no data."""
    order: tuple[int, ...]
    """[micro-batch in the table] -> its number in the data, counted across all replicas that
    redistribute their micro-batches."""
    slice_bounds: tuple[tuple[int, ...], ...]
    """[micro-batch in the table] -> the first token of each slice, then the number of tokens."""
    packed_bounds: tuple[tuple[int, ...], ...]
    """[micro-batch in the table] -> the bounds of its packed samples; empty without packing."""
    slice_tokens: tuple[tuple[int, ...], ...]
    """[micro-batch in the table][slice] -> the largest number of tokens on any replica."""
    length_cost: LengthCost

    @property
    def table_key(self) -> tuple[tuple[int, ...], ...]:
        """The largest numbers of tokens, from which the table is generated."""
        return self.slice_tokens

    def schedule(self, pipeline: Pipeline) -> tuple[Schedule, Costs]:
        """Generate the step's table; see `ReadAhead.schedule`."""
        return schedule_by_length(pipeline, self.slice_tokens, self.length_cost)

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Return reports indexed by micro-batch in the data instead of in the table."""
        report_of = {}
        for microbatch, report in reports.items():
            report_of[self.order[microbatch]] = report
        return report_of


class _Reading:
    """The micro-batches that this rank has read for a step; empty on ranks without data."""

    def __init__(self, num_chunks: int) -> None:
        self.items_by_chunk: list[dict[int, Any] | None] = [None] * num_chunks
        """[chunk][number in the data] -> item, or None if the chunk reads no data."""
        self.order: list[int] = []
        """[micro-batch in the table] -> its number in the data."""
        self.samples: list[list[int]] = []
        """[micro-batch in the table][sample] -> number of tokens."""
        self.packed_bounds: list[tuple[int, ...]] = []
        """[micro-batch in the table] -> the bounds of its packed samples; empty without
        packing."""

    def iterators(self) -> list[Iterator[Any] | None]:
        """Return one iterator per chunk over its micro-batches in table order."""
        iterators: list[Iterator[Any] | None] = []
        for items in self.items_by_chunk:
            if items is None:
                iterators.append(None)
            else:
                in_order = [items[number] for number in self.order]
                iterators.append(iter(in_order))
        return iterators


class LengthSlicer:
    """Cuts a model's micro-batches into slices by length. One object serves all steps."""

    def __init__(
        self,
        model: Model,
        length_cost: LengthCost,
        replicas: ReplicaExchange | None,
    ) -> None:
        config = model.pipeline.config
        assert config.slice_tokens is not None
        self._slice_tokens = config.slice_tokens
        self._pp = model.pipeline.pp
        # Whether `auto` has logged the number of tokens it chose.
        self._has_logged = False
        self._sorts = config.balance != "off"
        self._length_cost = length_cost
        self._fills = fills_of(model.pipeline.placement)
        self._exchange = replicas
        self._device = device_of(model.chunks)
        # Maximum number of tokens in a sample, or None if unlimited or unknown on this
        # rank. Samples may differ in length even without --variable-seq-lengths,
        # because slice messages always carry the shapes of their tensors.
        reader = unwrap_model(model.chunks[0])
        self._max_positions: int | None = getattr(reader, "max_sequence_length", None)
        # With sequence parallelism, tensor-parallel ranks hold equal parts of a slice.
        self._multiple = 1
        if model.config.sequence_parallel:
            self._multiple = model.config.tensor_model_parallel_size
        # Within a replica, only the first tensor-parallel rank of some stages reads data.
        self._replica_groups = (model.groups.tp, model.groups.pp)
        self._replicas: dist.ProcessGroup = (
            getattr(model.groups, "dp", None)
            or parallel_state.get_data_parallel_group()
        )
        self._all_groups = (*self._replica_groups, self._replicas)

    def step(self, iterators: Sequence[Any], num_microbatches: int) -> SlicedStep:
        """Read a step's data and agree on its slices. Collective over the job.

        Raises:
            ScheduleError: The data has no lengths or needs too many slices, or the ranks of a
                replica read different data.
        """
        # Read this rank's data and compute how many slices each micro-batch needs.
        reading = _Reading(len(iterators))
        failure: Exception | None = None
        try:
            if any(iterator is not None for iterator in iterators):
                reading = self._read(iterators, num_microbatches)
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            failure = error
        slice_tokens = self._chosen_slice_tokens(reading)
        counts = [0] * num_microbatches
        try:
            if reading.samples:
                counts = self._numbers_of_slices(reading, slice_tokens)
        except Exception as error:  # noqa: BLE001 - for the same reason
            failure = error
        if failure is not None:
            counts = [_UNREADABLE] * num_microbatches
        # Agree within the replica. Ranks without data contribute 0, so number micro-batches from 1.
        zeros = [0] * num_microbatches
        order = [number + 1 for number in reading.order] or zeros
        nums_bounds = list(map(len, reading.packed_bounds)) or zeros
        replica_counts, replica_order, replica_nums_bounds = self._shared(
            [counts, order, nums_bounds],
            self._replica_groups,
        )
        packed_bounds = self._packed_bounds(reading, replica_nums_bounds)
        has_data = bool(reading.order)
        is_as_shared = counts == replica_counts and order == replica_order
        differs = has_data and not is_as_shared
        bounds_of_both = zip(reading.packed_bounds, packed_bounds, strict=False)
        for own_bounds, shared_bounds in bounds_of_both:
            differs |= bool(own_bounds) and own_bounds != shared_bounds
        # Agree within the job. Only ranks with data notice a difference, so share that
        # result as well. Otherwise, the other ranks would keep waiting for them.
        *shared_counts, any_differs = self._shared(
            [*replica_counts, int(differs)],
            self._all_groups,
        )
        # Raise the error only now, because the other ranks needed this one in the
        # collectives above.
        if failure is not None:
            raise failure
        self._check(shared_counts, any_differs=bool(any_differs))
        # Cut the micro-batches and find each slice's largest size on any replica.
        bounds = self._bounds(reading, shared_counts)
        most_slices = max(shared_counts)
        tokens = []
        for microbatch_bounds in bounds:
            widths = [end - begin for begin, end in pairwise(microbatch_bounds)]
            # Pad the rows to the same length, because `_shared` sends them as one tensor.
            padding = [0] * (most_slices - len(widths))
            tokens.append(widths + padding)
        most_tokens = self._shared(tokens, [self._replicas])
        tokens_of_slices = []
        for widths, count in zip(most_tokens, shared_counts, strict=True):
            tokens_of_slices.append(tuple(widths[:count]))
        return SlicedStep(
            reading.iterators(),
            tuple(number - 1 for number in replica_order),
            bounds,
            packed_bounds,
            tuple(tokens_of_slices),
            self._length_cost,
        )

    def _chosen_slice_tokens(self, reading: _Reading) -> int:
        """Return the number of tokens per slice in this step. With `auto`, collective over the job.

        `auto` depends only on this step, so a restarted job cuts the step in the same way.
        """
        if isinstance(self._slice_tokens, int):
            return self._slice_tokens
        tokens = [sum(samples) for samples in reading.samples]
        longest, in_step = self._shared(
            [max(tokens, default=0), sum(tokens)],
            self._all_groups,
        )
        # With sequence parallelism, every tensor-parallel rank needs at least one token
        # of every slice.
        automatic = automatic_slice_tokens(longest, in_step, self._pp)
        chosen = max(automatic, self._multiple)
        if not self._has_logged and not dist.get_rank():
            _LOG.warning(
                "%s auto: the first step cuts micro-batches of more than %d tokens into slices, "
                "and later steps choose their own limit; use %s %d to keep it fixed",
                _FLAG,
                chosen,
                _FLAG,
                chosen,
            )
        self._has_logged = True
        return chosen

    def _numbers_of_slices(self, reading: _Reading, slice_tokens: int) -> list[int]:
        """Return how many slices each of this rank's micro-batches needs, in order.

        Raises:
            ScheduleError: A micro-batch cannot be cut.
        """
        counts = []
        for samples in reading.samples:
            count = slices_needed(sum(samples), slice_tokens)
            # Cut the micro-batch now just to see whether that fails. If it failed after
            # the ranks had agreed, the other ranks would wait for this one.
            equal_cost_bounds(samples, count, self._length_cost, self._multiple)
            counts.append(count)
        return counts

    @staticmethod
    def _check(shared_counts: Sequence[int], *, any_differs: bool) -> None:
        """Check that some rank has read data, and that the ranks in each replica agree on it.

        All ranks in the job raise the same error, so no rank waits for another.

        Raises:
            ScheduleError: No rank has read data, the ranks in a replica disagree, or a rank could
                not read its data.
        """
        if max(shared_counts) >= _UNREADABLE:
            raise ScheduleError(
                f"{_FLAG}: another rank could not read this step's micro-batches; see that rank's "
                "error"
            )
        if not all(shared_counts):
            raise ScheduleError(
                f"{_FLAG} requires micro-batch lengths, but no rank has a data iterator; pass one "
                f"to the first stage, or remove {_FLAG}"
            )
        if any_differs:
            raise ScheduleError(
                f"{_FLAG}: the ranks in a pipeline read micro-batches of different lengths; pass "
                "the same data in the same order to all of them"
            )

    def _read(self, iterators: Sequence[Any], num_microbatches: int) -> _Reading:
        """Read a step's micro-batches on a rank that has data, and choose their order."""
        reading = _Reading(len(iterators))
        try:
            for chunk, iterator in enumerate(iterators):
                if iterator is not None:
                    reading.items_by_chunk[chunk] = fetched(
                        iterator,
                        num_microbatches,
                        self._exchange,
                        _FLAG,
                    )
            # All chunks on a rank read the same data, so use the first chunk.
            held = next(items for items in reading.items_by_chunk if items is not None)
            costs = []
            for item in held.values():
                costs.append(item_cost(item, self._length_cost, _FLAG))
        except Exception:
            # The other replicas are waiting for the costs, so send them NaN instead.
            if self._exchange is not None:
                self._exchange.costs([nan] * num_microbatches)
            raise
        if self._exchange is not None:
            costs = self._exchange.costs(costs)
            held = self._exchange.shared_out(held, costs, self._fills)
            for chunk, items in enumerate(reading.items_by_chunk):
                if items is not None:
                    # Copy the items, because forward steps write to them.
                    copies = {number: copy(item) for number, item in held.items()}
                    reading.items_by_chunk[chunk] = copies
        # Without an exchange, the numbers count only this replica's micro-batches.
        numbers = sorted(held)
        if self._sorts:
            order = rising([costs[number] for number in numbers])
            numbers = [numbers[place] for place in order]
        reading.order = numbers
        in_order = [held[number] for number in numbers]
        reading.samples = [sample_lengths(item) for item in in_order]
        reading.packed_bounds = [packed_bounds_in(item) for item in in_order]
        for number, samples in zip(numbers, reading.samples, strict=True):
            longest = max(samples, default=0)
            if self._max_positions is not None and longest > self._max_positions:
                raise ScheduleError(
                    f"micro-batch {number}: a sequence has {longest} tokens, but the model has "
                    f"{self._max_positions} positions; cut or pack the data to that length, or "
                    "raise --max-position-embeddings"
                )
        return reading

    def _packed_bounds(
        self,
        reading: _Reading,
        nums_bounds: Sequence[int],
    ) -> tuple[tuple[int, ...], ...]:
        """Return the packed samples' bounds in each micro-batch. Collective over a replica.

        Ranks without data need these bounds on the host, because reading them from the device in
        the middle of a step would wait for the device. `nums_bounds` gives the number of bounds per
        micro-batch.
        """
        width = max(nums_bounds)
        if width == 0:
            return ()
        rows = [[0] * width for _ in nums_bounds]
        # Ranks without data contribute zeros.
        for row, bounds in zip(rows, reading.packed_bounds, strict=False):
            row[: len(bounds)] = bounds
        shared_rows = self._shared(rows, self._replica_groups)
        packed_bounds = []
        for row, num_bounds in zip(shared_rows, nums_bounds, strict=True):
            packed_bounds.append(tuple(row[:num_bounds]))
        return tuple(packed_bounds)

    def _bounds(
        self,
        reading: _Reading,
        counts: Sequence[int],
    ) -> tuple[tuple[int, ...], ...]:
        """Return the slices' bounds in each micro-batch. Collective over a replica.

        `counts` gives the number of slices per micro-batch.
        """
        # A matrix with one row per micro-batch. Ranks without data contribute zeros.
        width = max(counts) + 1
        rows = [[0] * width for _ in counts]
        for row, samples, count in zip(rows, reading.samples, counts, strict=False):
            bounds = equal_cost_bounds(
                samples,
                count,
                self._length_cost,
                self._multiple,
            )
            row[: len(bounds)] = bounds
        shared_rows = self._shared(rows, self._replica_groups)
        all_bounds = []
        for row, count in zip(shared_rows, counts, strict=True):
            num_bounds = count + 1
            all_bounds.append(tuple(row[:num_bounds]))
        return tuple(all_bounds)

    def _shared(self, values: Any, groups: Sequence[dist.ProcessGroup]) -> Any:
        """Return the element-wise maximum of nested lists over all ranks of the groups."""
        together = torch.tensor(values, dtype=torch.int64, device=self._device)
        # Taking the maximum over one group after another yields the maximum over all
        # their ranks.
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        return together.tolist()
