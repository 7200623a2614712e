"""Creates pipelines for tests without a training, and puts them in force in this process."""

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
    """Create the pipeline of a schedule; `settings` are more fields of `PipelineConfig`."""
    config = PipelineConfig(schedule=schedule, chunks=chunks, **settings)
    return Pipeline(config, pp, num_microbatches, splits=splits)


def use(pipeline: Pipeline | None, **facts: Any) -> Active:
    """Put a pipeline or Megatron's own schedules in force; return the active configuration.

    Args:
        pipeline: The pipeline; None: Megatron's own schedules.
        facts: More fields of `Active`: seed, job.
    """
    config = PipelineConfig() if pipeline is None else pipeline.config
    configuration = Active(config, pipeline, **facts)
    activate_configuration(configuration)
    return configuration


def splits() -> SplitBackward:
    """Return the active configuration's `SplitBackward`, or an empty one if none is active."""
    from megatron_ext.runtime.runtime import in_force

    if active() is None:
        use(None)
    return in_force().splits
