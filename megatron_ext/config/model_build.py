"""The result of `configure`: the settings that a program must build its model with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelBuild:
    """Settings that Megatron needs to host a pipeline."""

    pipeline_model_parallel_size: int
    """Number of pipeline ranks that Megatron sees: half the real number for mirrored pipelines."""
    virtual_pipeline_model_parallel_size: int | None
    """Number of model chunks per rank. Default: one chunk."""
    pipeline_model_parallel_layout: str | None
    """The layers of each stage, in Megatron's notation. If None, Megatron splits them evenly."""
    replicas: int
    """Number of Megatron's data-parallel replicas on these ranks: 2 for mirrored pipelines, else 1.
    """
    num_microbatches: int
    """Number of micro-batches per replica in one step, counting mirrored pipelines as two
    replicas."""
    variable_seq_lengths: bool
    """Whether micro-batches may have sequences of different lengths."""
    stages_of: tuple[tuple[int, ...], ...]
    """[Megatron's pipeline rank][chunk] -> stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is cut into."""
        return sum(map(len, self.stages_of))

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def groups(self) -> dict[str, int | None]:
        """Keyword arguments for `megatron.core.parallel_state.initialize_model_parallel`."""
        return {
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
        }

    @property
    def transformer(self) -> dict[str, Any]:
        """Keyword arguments for `megatron.core.transformer.TransformerConfig`."""
        # Our messages bypass this overlap, but without it Megatron rejects several chunks per rank
        # on two ranks.
        overlaps = self.num_chunks > 1 and self.pipeline_model_parallel_size == 2
        keywords: dict[str, Any] = {
            **self.groups,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
            "overlap_p2p_comm": overlaps,
            "batch_p2p_comm": not overlaps,
        }
        if self.variable_seq_lengths:
            keywords["variable_seq_lengths"] = True
        return keywords

    def chunks(self, rank: int) -> list[dict[str, Any]]:
        """Return the keyword arguments for each model chunk on a rank, such as a `GPTModel`.

        Args:
            rank: The pipeline rank, `parallel_state.get_pipeline_model_parallel_rank()`.
        """
        chunks: list[dict[str, Any]] = []
        for index, stage in enumerate(self.stages_of[rank]):
            keywords = {
                "vp_stage": index if self.num_chunks > 1 else None,
                "pre_process": stage == 0,
                "post_process": stage == self.num_stages - 1,
            }
            chunks.append(keywords)
        return chunks
