"""What a model and its process groups have to be built with to run under a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pipeline_config import ConfigurationError

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline

__all__ = ["ModelBuild", "build_of", "check_ranks"]


@dataclass(frozen=True, kw_only=True)
class ModelBuild:
    """How Megatron hosts a pipeline."""

    pipeline_model_parallel_size: int
    """Pipeline ranks in Megatron's eyes: half of the real ones where two pipelines are mirrored."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks on each rank; None: one."""
    pipeline_model_parallel_layout: str | None
    """Which layers each stage has; None: as many in each as Megatron deals out by itself."""
    replicas: int
    """Data-parallel replicas in Megatron's eyes that share the pipeline ranks."""
    num_microbatches: int
    """Micro-batches of one such replica in one step."""

    @property
    def num_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def overlaps_p2p(self) -> bool:
        """Whether Megatron has to take messages for overlapped.

        Ours are sent another way; Megatron accepts chunks on two ranks with this only.
        """
        return self.num_chunks > 1 and self.pipeline_model_parallel_size == 2

    @property
    def groups(self) -> dict[str, int | None]:
        """Keywords for `megatron.core.parallel_state.initialize_model_parallel`."""
        return {
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
        }

    @property
    def transformer(self) -> dict[str, Any]:
        """Keywords for `megatron.core.transformer.TransformerConfig`."""
        return {
            **self.groups,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
            "overlap_p2p_comm": self.overlaps_p2p,
            "batch_p2p_comm": not self.overlaps_p2p,
        }


def build_of(
    pipeline: Pipeline,
    num_layers: int,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
) -> ModelBuild:
    """Return what the model has to be built with.

    Args:
        pipeline: What will run.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Those.
        layout: Which layers each stage has, in Megatron's notation; None: as many in each.

    Raises:
        ScheduleError: The layers do not fit the stages of a V or W.
    """
    placement = pipeline.placement
    chunks = placement.num_stages // placement.num_ranks
    if placement.name not in ("linear", "loop"):
        from megatron_ext.schedules.runtime.layout import layout_string  # imports megatron.core

        layout = layout_string(num_layers, placement, mtp_num_layers=mtp_num_layers, layout=layout)
    return ModelBuild(
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
        replicas=pipeline.twins,
        num_microbatches=pipeline.num_microbatches,
    )


def check_ranks(name: str, pp: int, twins: int) -> None:
    """Refuse a number of pipeline ranks that Megatron cannot host a schedule on.

    Raises:
        ConfigurationError: Says which numbers it can.
    """
    if pp < 2:
        raise ConfigurationError(
            "{chosen} needs a pipeline, {pipeline_ranks} {pp} is none; take at least {least}, or "
            "leave {chooser} out",
            chosen=f"schedule {name}",
            chooser="schedule",
            pp=pp,
            least=2 * twins,
        )
    if twins == 2 and (pp % 2 or pp < 4):
        raise ConfigurationError(
            "{chosen} mirrors two pipelines on one set of ranks, so {pipeline_ranks} {pp} must be "
            "even and at least 4; take {near}, or {schedule} zb-v, which takes any",
            chosen=f"schedule {name}",
            pp=pp,
            near=f"{pp - 1} or {pp + 1}" if pp > 4 else "4",
        )
