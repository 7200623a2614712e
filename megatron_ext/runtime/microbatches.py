"""Gives each micro-batch its own data, in any execution order.

Megatron's forward steps call `next` on an iterator, so call order decides which tokens a
micro-batch gets. A table may run micro-batches in any order, and in a different order on each
stage. Here micro-batch i always gets item i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import ScheduleError

__all__ = ["MicrobatchData", "TwinExchange"]


class MicrobatchData:
    """The items of one chunk's data iterator for one step.

    Items are fetched on demand only: the middle stages of a GPT read none.

    Args:
        iterator: Megatron's iterator; None on ranks that read no data.
        exchange: Swaps an item with the twin's. Required on stages that run the twin's
            micro-batches: their data (such as BERT's padding mask) must match the activations.
        taken: Called with each micro-batch and its item before a forward step reads it.
    """

    def __init__(
        self,
        iterator: Iterator[Any] | None,
        exchange: Callable[[Any], Any] | None = None,
        taken: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._iterator = iterator
        self._exchange = exchange
        self._taken = taken
        self._fetched = 0
        self._kept: dict[int, Any] = {}

    def view(self, microbatch: int) -> Iterator[Any] | None:
        """Return an iterator over the single item of a micro-batch; None without data.

        An object without `__next__` is passed through unchanged; it only works in order.

        Raises:
            ScheduleError: Such an object is used out of order or on a stage that swaps data.
        """
        if self._iterator is None:
            return None
        if not hasattr(self._iterator, "__next__"):
            self._take_turn(microbatch)
            return self._iterator
        return _View(self, microbatch)

    def _take_turn(self, microbatch: int) -> None:
        if microbatch != self._fetched or self._exchange is not None:
            raise ScheduleError(
                f"micro-batch {microbatch} runs out of order, but its data comes from a "
                f"{type(self._iterator).__name__}, which is not an iterator and cannot be read "
                "ahead; take a schedule that keeps the order, such as zb-h1 without --use-dpp"
            )
        self._fetched += 1

    def take(self, microbatch: int) -> Any:
        """Return and drop a micro-batch's item; keep skipped items for their own micro-batches.

        Raises:
            ScheduleError: The item was already taken.
        """
        assert self._iterator is not None
        while self._fetched <= microbatch:
            self._kept[self._fetched] = next(self._iterator)
            self._fetched += 1
        try:
            item = self._kept.pop(microbatch)
        except KeyError:
            raise ScheduleError(
                f"the forward step called next() a second time for micro-batch {microbatch}; with "
                f"--pipeline-schedule call it once for each micro-batch"
            ) from None
        if self._exchange is not None:
            item = self._exchange(item)
        if self._taken is not None:
            self._taken(microbatch, item)
        return item


class TwinExchange:
    """Swaps data with the twin, which runs the same actions in the same order.

    Args:
        group: The process group of both twins.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._theirs = 1 - group.rank()

    def __call__(self, item: Any) -> Any:
        """Return the twin's item in exchange for `item`. Collective over both twins."""
        items: list[Any] = [None, None]
        dist.all_gather_object(items, item, group=self._group)
        return items[self._theirs]


class _View(Iterator[Any]):
    """The data iterator that a forward step sees."""

    def __init__(self, data: MicrobatchData, microbatch: int) -> None:
        self._data = data
        self._microbatch = microbatch

    def __next__(self) -> Any:
        return self._data.take(self._microbatch)
