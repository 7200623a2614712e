"""The settings that a model and its process groups need in order to run under a pipeline."""

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
    """Pipeline ranks that Megatron sees: half of the real ones if two pipelines are mirrored."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks on each rank; None: one."""
    pipeline_model_parallel_layout: str | None
    """The layers of each stage, in Megatron's notation; None: Megatron splits them evenly."""
    replicas: int
    """Data-parallel replicas that Megatron sees on the pipeline ranks: 1, or 2 if mirrored."""
    num_microbatches: int
    """Micro-batches of one such replica in one step."""
    variable_seq_lengths: bool
    """Whether micro-batches may have sequences of different lengths."""
    stages_of: tuple[tuple[int, ...], ...]
    """By pipeline rank in Megatron's eyes: the stages that its chunks are."""

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return sum(map(len, self.stages_of))

    @property
    def num_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def overlaps_p2p(self) -> bool:
        """Whether to set Megatron's `overlap_p2p_comm`.

        Our messages bypass it, but Megatron accepts several chunks on two ranks only with it.
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
        varying = {"variable_seq_lengths": True} if self.variable_seq_lengths else {}
        return {
            **self.groups,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
            "overlap_p2p_comm": self.overlaps_p2p,
            "batch_p2p_comm": not self.overlaps_p2p,
            **varying,
        }

    def chunks(self, rank: int) -> list[dict[str, Any]]:
        """Return the keywords to build each of a rank's model chunks with, say a `GPTModel`.

        Args:
            rank: The pipeline rank, `parallel_state.get_pipeline_model_parallel_rank()`.
        """
        return [
            {
                "vp_stage": index if self.num_chunks > 1 else None,
                "pre_process": stage == 0,
                "post_process": stage == self.num_stages - 1,
            }
            for index, stage in enumerate(self.stages_of[rank])
        ]


def build_of(
    pipeline: Pipeline,
    num_layers: int,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
) -> ModelBuild:
    """Return the settings to build the model with.

    Args:
        pipeline: The pipeline to run.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Layers of multi-token prediction; None: none.
        layout: The layers of each stage, in Megatron's notation; None: an even split.

    Raises:
        ScheduleError: The layers do not fit the stages of a V or W.
    """
    placement = pipeline.placement
    chunks = placement.num_stages // placement.num_ranks
    if placement.name not in ("linear", "loop"):
        from megatron_ext.runtime.layout import layout_string  # imports megatron.core

        layout = layout_string(num_layers, placement, mtp_num_layers=mtp_num_layers, layout=layout)
    return ModelBuild(
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
        replicas=pipeline.twins,
        num_microbatches=pipeline.num_microbatches,
        variable_seq_lengths=pipeline.config.variable_seq_lengths,
        stages_of=placement.stages_of,
    )


def check_ranks(name: str, pp: int, twins: int) -> None:
    """Check that Megatron can host a schedule on a number of pipeline ranks.

    Args:
        name: The schedule.
        pp: Ranks of the whole pipeline world.
        twins: 2 if two mirrored pipelines share them, else 1.

    Raises:
        ConfigurationError: It cannot; the message names numbers that work.
    """
    if pp < 2:
        raise ConfigurationError(
            "{chosen} needs a pipeline, {pipeline_ranks} {pp} makes none; use at least {least}, or "
            "leave {chooser} out",
            chosen=f"schedule {name}",
            chooser="schedule",
            pp=pp,
            least=2 * twins,
        )
    if twins == 2 and (pp % 2 or pp < 4):
        raise ConfigurationError(
            "{chosen} mirrors two pipelines on one set of ranks, so {pipeline_ranks} {pp} must be "
            "even and at least 4; use {near}, or {schedule} zb-v, which accepts any",
            chosen=f"schedule {name}",
            pp=pp,
            near=f"{pp - 1} or {pp + 1}" if pp > 4 else "4",
        )
