"""How a feature reads and orders the data of one training step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_ext.config.active import Pipeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs


class ReportOrder(Protocol):
    """Converts a step's reports to data order."""

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Re-key reports from the table's micro-batch order to the order of the data."""


class DataOrder(ReportOrder, Protocol):
    """The order in which one training step runs its micro-batches of data."""

    def iterator(self, items: Any) -> Iterator[Any] | None:
        """Return an iterator over a chunk's micro-batches in this order; None if it has no data."""


class ReadAhead(ReportOrder, Protocol):
    """One training step's data, read before the step's table, which depends on it, is generated."""

    @property
    def iterators(self) -> Sequence[Iterator[Any] | None]:
        """Chunk -> an iterator over its micro-batches in table order."""

    @property
    def table_key(self) -> Hashable:
        """Equal for steps with the same table, and for all ranks of a step."""

    def schedule(self, pipeline: Pipeline) -> tuple[Schedule, Costs]:
        """Generate the step's table, and return it with the durations that it is made for.

        Raises:
            ScheduleError: No order was found.
        """
