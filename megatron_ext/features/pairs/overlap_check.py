"""Patch that replaces Megatron's check of overlapped token exchanges, which pairs do not need."""

from __future__ import annotations

from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable


def _runs_pairs() -> bool:
    pipeline = active.pipeline()
    return pipeline is not None and pipeline.config.pairs


PATCHES = PatchTable(feature="schedules", when=_runs_pairs)


@PATCHES.row(
    "pairs.overlap_check",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    order=20,  # inside schedules.model_config, which reads the real settings
)
def _check_without_overlap(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron checks the overlap rules of its interleaved schedule; pairs have other limits."""
    # During Megatron's check, turn off the overlap and the settings that depend on it.
    names = (
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release",
    )
    settings = {name: getattr(instance, name) for name in names}
    vars(instance).update(dict.fromkeys(names, False))
    try:
        call(*args, **kwargs)
    finally:
        vars(instance).update(settings)
