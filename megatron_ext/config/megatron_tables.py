"""Megatron's own schedules as tables: not to be run, but to know their messages in advance."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_ext.config import batches, stages
from megatron_ext.config.choice import Choice
from megatron_ext.config.incompatible import refuse_flags_with_transport
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.representation.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.choice import TransportName

__all__ = ["choice"]


def choice(args: Namespace, transport: TransportName, timeout_s: float) -> Choice:
    """Return the schedule that Megatron runs by itself, for messages over a transport of ours.

    Args:
        args: Parsed arguments, not validated by Megatron.
        transport: What carries the messages.
        timeout_s: How long a rank waits for one.

    Raises:
        ArgumentsError: There is no pipeline, or Megatron sends what no table of ours has.
    """
    flag = f"--pipeline-transport {transport}"
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ArgumentsError(
            f"{flag} carries tensors between pipeline ranks, --pipeline-model-parallel-size {pp} "
            f"has none; leave it out"
        )
    refuse_flags_with_transport(transport, args)
    chunks = stages.chunks_of_megatron(args)
    sizes = batches.sizes(args, pp, twins=1)
    found = Choice(
        "interleaved" if chunks > 1 else "1f1b",
        pp,
        sizes.num_microbatches,
        chunks if chunks > 1 else None,
        timeout_s=timeout_s,
        transport=transport,
    )
    try:
        for global_batch in sizes.counts:
            validate(found.schedule(sizes.counts[global_batch]))
    except ScheduleError as error:
        raise ArgumentsError(f"{flag} with {sizes.explained(global_batch)}: {error}") from error
    return found
