"""Settings to build a model with, by pipeline rank."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.model_build import ModelBuild


def build(virtual: int | None, stages_of: tuple[tuple[int, ...], ...]) -> ModelBuild:
    """Make the build of a pipeline with the given stages on each rank."""
    return ModelBuild(
        pipeline_model_parallel_size=len(stages_of),
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=None,
        replicas=1,
        num_microbatches=4,
        variable_seq_lengths=False,
        stages_of=stages_of,
    )


def chunk(
    vp_stage: int | None, pre_process: bool, post_process: bool
) -> dict[str, Any]:
    """Return the keywords of one model chunk."""
    return {
        "vp_stage": vp_stage,
        "pre_process": pre_process,
        "post_process": post_process,
    }


def test_one_chunk_on_each_rank_has_no_virtual_stage() -> None:
    made = build(None, ((0,), (1,)))
    assert made.chunks(0) == [chunk(None, True, False)]
    assert made.chunks(1) == [chunk(None, False, True)]


def test_the_first_rank_of_a_v_has_both_ends() -> None:
    made = build(2, ((0, 3), (1, 2)))
    assert made.chunks(0) == [chunk(0, True, False), chunk(1, False, True)]
    assert made.chunks(1) == [chunk(0, False, False), chunk(1, False, False)]
