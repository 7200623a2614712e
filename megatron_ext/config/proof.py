"""Proves before a run that its tables exist; if not, recommends flags that work."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_ext.config import stages
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, generate
from megatron_ext.schedules.representation.validation import validate
from megatron_ext.schedules.search.queues import check_queues

if TYPE_CHECKING:
    from megatron_ext.config.batches import Sizes
    from megatron_ext.config.sized_pipeline import Pipeline

__all__ = ["prove"]


def prove(args: Namespace, pipeline: Pipeline, sizes: Sizes) -> None:
    """Make and validate the table of every batch size of the run.

    torch.distributed may match messages by their order; over it, the proof covers that order too.

    Args:
        args: Parsed arguments, for remedies in terms of flags.
        pipeline: The pipeline of the run.
        sizes: The batch sizes of the run.

    Raises:
        ScheduleError: A batch size has no table (the message recommends flags that work), or its
            ranks would deadlock.
    """
    if pipeline.name.startswith(CSV_PREFIX):
        _check_file(pipeline, sizes)
    for global_batch, count in sizes.counts.items():
        error = _mistake(pipeline, count)
        if error is not None:
            raise ScheduleError(
                f"--pipeline-schedule {pipeline.name} with {sizes.explained(global_batch)}: {error}"
                f"{_remedies(args, pipeline, sizes, count)}"
            )
        if pipeline.transport == "torch":
            check_queues(pipeline.schedule(count))


def _mistake(pipeline: Pipeline, count: int) -> ScheduleError | None:
    """Return the error of the table for a number of micro-batches, or None."""
    try:
        validate(pipeline.schedule(count))
    except ScheduleError as error:
        return error
    return None


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


def _remedies(args: Namespace, pipeline: Pipeline, sizes: Sizes, count: int) -> str:
    """Return the nearest batch size that works, and the best schedule for the present one."""
    found = []
    for distance in range(1, 4 * pipeline.pp):
        near = [n for n in (count + distance, count - distance) if n > 0]
        fitting = [n for n in near if _mistake(pipeline, n) is None]
        if fitting:
            found.append(f"--global-batch-size {sizes.global_batch(fitting[0])}")
            break
    other = stages.best_schedule(args, pipeline, sizes.total(count))
    if other is not None:
        found.append(f"{other} for this batch size")
    return f". In flags: {', or '.join(found)}" if found else ""
