"""Proves before a run that its tables exist; if not, says in terms of flags what would do."""

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

    Over torch.distributed messages may be matched by their order, so there that is proved as well.

    Args:
        args: Parsed arguments, to name remedies in their terms.
        pipeline: Of the run.
        sizes: Its batch sizes.

    Raises:
        ScheduleError: There is no table for one of them; says which flags would do. Or the ranks
            of one would wait for each other.
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
    """Return what is wrong with the table for a number of micro-batches, if anything."""
    try:
        validate(pipeline.schedule(count))
    except ScheduleError as error:
        return error
    return None


def _check_file(pipeline: Pipeline, sizes: Sizes) -> None:
    """A file is for one size: tell in terms of training flags if that is another one."""
    table = generate(pipeline.name)
    if table.pp != pipeline.pp:
        raise ScheduleError(
            f"--pipeline-schedule {pipeline.name} has {table.pp} rows, one for each rank; take "
            f"--pipeline-model-parallel-size {table.pp} (it is {pipeline.pp}), or another file"
        )
    for global_batch, count in sizes.counts.items():
        if count != table.num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule {pipeline.name} runs {table.num_microbatches} micro-batches, "
                f"not {sizes.explained(global_batch)}; take --global-batch-size "
                f"{sizes.global_batch(table.num_microbatches)}, or another file"
            )


def _remedies(args: Namespace, pipeline: Pipeline, sizes: Sizes, count: int) -> str:
    """Say the nearest batch size that the schedule takes, and the best schedule for this one."""
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
