"""Data by micro-batch.

Megatron's forward steps take the next item of an iterator, so the order of the calls decides which
tokens a micro-batch has. A table may run micro-batches in any order, and in another order on each
stage. Here every micro-batch gets its own item, whatever was run before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import ScheduleError

__all__ = ["MicrobatchData", "TwinExchange"]


class MicrobatchData:
    """The items of one chunk's data iterator, for one step.

    Nothing is fetched that no forward step asks for: stages in the middle of a GPT ask for none.

    Args:
        iterator: Megatron's iterator; None on ranks that read no data.
        exchange: Swaps an item for the twin's. For stages that run the twin's micro-batches: what
            they read (the padding of BERT's samples) has to belong to the activations they get.
    """

    def __init__(
        self, iterator: Iterator[Any] | None, exchange: Callable[[Any], Any] | None = None
    ) -> None:
        self._iterator = iterator
        self._exchange = exchange
        self._fetched = 0
        self._kept: dict[int, Any] = {}

    def view(self, microbatch: int) -> Iterator[Any] | None:
        """Return an iterator over the one item of a micro-batch.

        An object that is no iterator is the forward step's own business, and is handed over as it
        is, in its order.
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
                f"micro-batch {microbatch} runs out of order, and the data comes from a "
                f"{type(self._iterator).__name__}, which is no iterator that could be read ahead; "
                "take a schedule that keeps the order, such as zb-h1, without a dynamic one"
            )
        self._fetched += 1

    def take(self, microbatch: int) -> Any:
        """Return the item of a micro-batch, once; items before it are kept for theirs."""
        assert self._iterator is not None
        while self._fetched <= microbatch:
            self._kept[self._fetched] = next(self._iterator)
            self._fetched += 1
        try:
            item = self._kept.pop(microbatch)
        except KeyError:
            raise ScheduleError(
                f"the forward step took a second item for micro-batch {microbatch}; with "
                f"--pipeline-schedule it may take one for each micro-batch"
            ) from None
        return item if self._exchange is None else self._exchange(item)


class TwinExchange:
    """Swaps data with the twin, which runs the same actions and so asks at the same time.

    Args:
        group: Of the two.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._theirs = 1 - group.rank()

    def __call__(self, item: Any) -> Any:
        """Return the twin's item for this one. Collective over both."""
        items: list[Any] = [None, None]
        dist.all_gather_object(items, item, group=self._group)
        return items[self._theirs]


class _View(Iterator[Any]):
    """What a forward step sees as its data iterator."""

    def __init__(self, data: MicrobatchData, microbatch: int) -> None:
        self._data = data
        self._microbatch = microbatch

    def __next__(self) -> Any:
        return self._data.take(self._microbatch)
