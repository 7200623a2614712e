"""Megatron's own schedules as tables: never executed, they announce the messages in advance."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.config import batches, stages
from megatron_ext.config.incompatible import RULES, refuse
from megatron_ext.config.sized_pipeline import Pipeline, base_table
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig

__all__ = ["pipeline_of"]


def pipeline_of(args: Namespace, config: PipelineConfig) -> Pipeline:
    """Return Megatron's own schedule, whose messages will travel over our transport.

    Args:
        args: Parsed arguments, not yet validated by Megatron.
        config: A configuration without a schedule.

    Raises:
        ArgumentsError: There is no pipeline, or Megatron sends messages that our tables lack.
    """
    flag = f"--pipeline-transport {config.wire}"
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ArgumentsError(
            f"{flag} carries tensors between pipeline ranks, --pipeline-model-parallel-size {pp} "
            f"has no second rank; leave it out"
        )
    refuse(flag, args, RULES["transport"])
    chunks = stages.chunks_of_megatron(args)
    sizes = batches.sizes(args, pp, twins=1)
    own = replace(config, schedule=base_table(chunks), chunks=chunks if chunks > 1 else None)
    found = Pipeline(own, pp, sizes.num_microbatches)
    if chunks > 1:
        _check_groups(flag, pp, sizes)
    try:
        for global_batch in sizes.counts:
            validate(found.schedule(sizes.counts[global_batch]))
    except ScheduleError as error:
        raise ArgumentsError(f"{flag} with {sizes.explained(global_batch)}: {error}") from error
    return found


def _check_groups(flag: str, pp: int, sizes: batches.Sizes) -> None:
    """Check the groups in which Megatron's interleaved schedule sends micro-batches around.

    Raises:
        ArgumentsError: A group is not full; our interleaved takes any number.
    """
    for global_batch, count in sizes.counts.items():
        if count % pp:
            lower = count // pp * pp
            fitting = f"{lower} or {lower + pp}" if lower else f"{pp}"
            raise ArgumentsError(
                f"{flag} with {sizes.explained(global_batch)}: Megatron's interleaved schedule "
                f"sends micro-batches in groups of pp = {pp}, so their number must be a multiple "
                f"of it; use {fitting} micro-batches, or add --pipeline-schedule interleaved, "
                "which takes any number"
            )
