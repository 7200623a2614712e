"""Pipelines for tests that start no training: made directly, and put in force in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import Active, Pipeline, activate_configuration, active
from megatron_ext.config.pipeline_config import PipelineConfig

if TYPE_CHECKING:
    from megatron_ext.runtime.split import SplitBackward


def make_pipeline(
    schedule: str,
    pp: int,
    num_microbatches: int,
    chunks: int | None = None,
    *,
    splits: bool = True,
    **settings: Any,
) -> Pipeline:
    """Make the pipeline of a schedule; further settings are those of a `PipelineConfig`."""
    config = PipelineConfig(schedule=schedule, chunks=chunks, **settings)
    return Pipeline(config, pp, num_microbatches, splits=splits)


def use(pipeline: Pipeline | None, **facts: Any) -> Active:
    """Put a pipeline in force, or Megatron's own schedules; return what is in force.

    Args:
        pipeline: None: Megatron's own schedules.
        facts: Further fields of `Active`: seed, job.
    """
    config = PipelineConfig() if pipeline is None else pipeline.config
    configuration = Active(config, pipeline, **facts)
    activate_configuration(configuration)
    return configuration


def splits() -> SplitBackward:
    """Return the split backward of what is in force; nothing of ours, if nothing is."""
    from megatron_ext.runtime.runtime import in_force

    if active() is None:
        use(None)
    return in_force().splits
