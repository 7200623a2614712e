"""Patches on the process groups of model parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_ext.patches.conditions import off_cuda
from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]

_MODULE = "megatron.core.parallel_state"

# What upstream's reset forgets: it would go on naming ranks and groups that are no more.
_FORGOTTEN = (
    "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_EMBEDDING_GLOBAL_RANKS",
    "_EXPERT_MODEL_PARALLEL_RANKS",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_MPU_DATA_PARALLEL_RANK",
    "_MPU_DATA_PARALLEL_WORLD_SIZE",
    "_PIPELINE_GLOBAL_RANKS",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
)


def _destroy_all_groups(
    call: Callable[..., None], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Destroy every group that upstream created and merely drops."""
    from torch import distributed

    state = sys.modules[_MODULE]
    groups = list(state._global_process_group_list or ())
    call(*args, **kwargs)
    for name in _FORGOTTEN:
        setattr(state, name, None)
    state._HYBRID_DP_CP_GROUPS.clear()
    if not distributed.is_initialized():
        return
    known = distributed.distributed_c10d._world.pg_map
    for group in groups:
        if group is not None and group in known:  # None stands for the default group
            distributed.destroy_process_group(group)


PATCHES = (
    Patch(
        id="parallel_state.destroy_groups",
        target=f"{_MODULE}:destroy_model_parallel",
        fn=_destroy_all_groups,
        when=off_cuda,
        reason="the groups are dropped but not destroyed; with gloo each keeps its threads, and "
        "repeated initialisation stalls the host",
    ),
)
