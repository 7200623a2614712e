"""Translates the pipeline of a configuration into Megatron's own arguments.

Megatron hosts a schedule of two mirrored pipelines on D ranks as a pipeline of D/2 ranks with twice
as many data-parallel replicas. For stages placed as a V or W it gets a layout.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config import batches, megatron_tables, stages
from megatron_ext.config.build import check_ranks
from megatron_ext.config.incompatible import (
    RULES,
    forbids_splitting,
    refuse,
    rules_of_dynamic_order,
    rules_of_table,
)
from megatron_ext.config.proof import prove
from megatron_ext.config.sized_pipeline import Pipeline, twins_of
from megatron_ext.config.wires import torch_is_best
from megatron_ext.errors import ArgumentsError

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig

__all__ = [
    "check_pipeline",
    "hosted_arguments",
    "pipeline_of",
    "tell",
    "transport_only_of",
    "with_splittable_layers",
]

_LOG = logging.getLogger(__name__)


def pipeline_of(args: Namespace, config: PipelineConfig) -> Pipeline:
    """Return the pipeline of a run, after proving that its tables exist for every batch size.

    Args:
        args: Parsed arguments with upstream's names, not yet validated by Megatron.
        config: A configuration with a schedule.

    Raises:
        ArgumentsError: Other flags contradict the schedule.
        ScheduleError: The schedule has no table for these sizes.
    """
    name = config.schedule
    assert name is not None
    subject = f"--pipeline-schedule {name}"
    refuse(subject, args, RULES["schedule"])
    twins = twins_of(name)
    pp: int = args.pipeline_model_parallel_size
    check_ranks(name, pp, twins)
    sizes = batches.sizes(args, pp, twins)
    found = Pipeline(
        config,
        pp,
        sizes.num_microbatches,
        splits=not forbids_splitting(args),
        over_torch=torch_is_best(config, _world_size(args)),
    )
    prove(found, sizes)
    refuse(subject, args, rules_of_table(found.full))
    if config.dynamic is not None:
        refuse("--use-dpp", args, rules_of_dynamic_order(args, found.placement))
    return found


def transport_only_of(args: Namespace, config: PipelineConfig) -> Pipeline | None:
    """Return Megatron's own schedule if its messages travel over our transport, else None."""
    if config.wire == "torch" or torch_is_best(config, _world_size(args)):
        return None
    return megatron_tables.pipeline_of(args, config)


def _world_size(args: Namespace) -> int:
    return int(getattr(args, "world_size", None) or 1)


def hosted_arguments(args: Namespace, pipeline: Pipeline) -> dict[str, Any]:
    """Return the arguments, by name, that make Megatron build the stages of a pipeline.

    Raises:
        ArgumentsError: The user's flags contradict the schedule.
        ScheduleError: The layers of the model do not fit its stages.
    """
    wanted = stages.flags_for(args, pipeline)
    if getattr(args, "use_distributed_optimizer", False):
        wanted["dist_ckpt_optim_fully_reshardable"] = True
        if not args.dist_ckpt_optim_fully_reshardable and (args.save or args.load):
            tell(
                args,
                "--dist-ckpt-optim-fully-reshardable is set: in any other form, optimizer state "
                "cannot be loaded under another schedule",
            )
    return wanted


def check_pipeline(args: Namespace, pipeline: Pipeline) -> None:
    """Compare the arguments that Megatron completed with the pipeline.

    Raises:
        ArgumentsError: Megatron computed a size that differs from that of the tables.
    """
    placement = pipeline.placement
    found = {
        "pipeline ranks": (args.pipeline_model_parallel_size, placement.num_ranks),
        "chunks": (
            getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            placement.num_stages // placement.num_ranks,
        ),
        "micro-batches": (
            args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            pipeline.num_microbatches,
        ),
    }
    for what, (megatrons, ours) in found.items():
        if megatrons != ours:
            raise ArgumentsError(
                f"--pipeline-schedule {pipeline.name} was prepared for {ours} {what}, but Megatron "
                f"made {megatrons} of the flags; leave out the flag that changes it"
            )


def with_splittable_layers(args: Namespace, pipeline: Pipeline) -> Pipeline:
    """Return the pipeline in a form that the layers of Transformer Engine can run.

    Raises:
        ArgumentsError: The table splits backwards, but these layers cannot.
    """
    if not pipeline.full.splits_backward:
        return pipeline
    from megatron_ext.runtime.te_layers import left_whole, why_not

    reason = why_not(Namespace(**{"tp_comm_overlap": False, **vars(args)}))
    if reason is None:
        notice = left_whole(args)
        if notice is not None:
            tell(args, "--pipeline-schedule %s: %s", pipeline.name, notice)
        return pipeline
    if pipeline.dynamic is not None:
        whole = replace(pipeline, splits=False)
        if not whole.full.splits_backward:
            tell(args, "--use-dpp leaves backwards whole: %s", reason)
            return whole
    other = "--bitpipe-order paper" if pipeline.name == "bitpipe" else "1f1b or interleaved"
    raise ArgumentsError(
        f"--pipeline-schedule {pipeline.name} splits backwards, but {reason}; or use {other}, "
        "which does not split them"
    )


def tell(args: Namespace, message: str, *values: object) -> None:
    """Log a notice on rank 0, as a warning: scripts without logging set-up hide lower levels."""
    if getattr(args, "rank", 0) == 0:
        _LOG.warning(message, *values)
