"""Proves before a run that its tables exist for every batch size, and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, generate
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.batches import Sizes
    from megatron_ext.config.sized_pipeline import Pipeline

__all__ = ["prove"]


def prove(pipeline: Pipeline, sizes: Sizes) -> None:
    """Make and validate the table of every batch size of the run.

    torch.distributed may match messages by their order; over it, the proof covers that order too.

    Args:
        pipeline: The pipeline of the run.
        sizes: The batch sizes of the run.

    Raises:
        ScheduleError: A batch size has no table, or its ranks would deadlock.
    """
    if pipeline.name.startswith(CSV_PREFIX):
        _check_file(pipeline, sizes)
    for global_batch, count in sizes.counts.items():
        try:
            validate(pipeline.schedule(count))
        except ScheduleError as error:
            raise ScheduleError(
                f"--pipeline-schedule {pipeline.name} with {sizes.explained(global_batch)}: {error}"
            ) from error
        if pipeline.transport == "torch":
            check_queues(pipeline.schedule(count))


def _check_file(pipeline: Pipeline, sizes: Sizes) -> None:
    """Compare the size of a file's table with the run, and name the flags to change."""
    table = generate(pipeline.name)
    if table.pp != pipeline.pp:
        raise ScheduleError(
            f"--pipeline-schedule {pipeline.name} has {table.pp} rows, one for each rank; use "
            f"--pipeline-model-parallel-size {table.pp} (it is {pipeline.pp}), or another file"
        )
    for global_batch, count in sizes.counts.items():
        if count != table.num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule {pipeline.name} runs {table.num_microbatches} micro-batches, "
                f"not {sizes.explained(global_batch)}; use --global-batch-size "
                f"{sizes.global_batch(table.num_microbatches)}, or another file"
            )
