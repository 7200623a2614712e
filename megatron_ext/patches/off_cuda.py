"""Rows for machines without a CUDA device: the host, and accelerators of other makers.

Among them is what upstream compiles before training, which needs a toolkit or a Makefile.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from megatron_ext.devices import off_cuda, on_cpu
from megatron_ext.devices.translate import to
from megatron_ext.patches.registry import REGISTRY, Args, Call, Kwargs, Patch

_RANDOM = "megatron.core.tensor_parallel.random"
_NOTICE = "CPU RNG state changed"
_PARALLEL_STATE = "megatron.core.parallel_state"

# Upstream's reset omits these; they would keep naming ranks and groups that no longer exist.
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


class _WithoutNotice(logging.Filter):
    """Drops the notice while the patches are active; everything else passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep the record."""
        return not (REGISTRY.active and on_cpu() and str(record.msg).startswith(_NOTICE))


_FILTER = _WithoutNotice()


def _quieten(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Install the filter with the first tracker."""
    logging.getLogger(_RANDOM).addFilter(_FILTER)  # adds it once
    call(*args, **kwargs)


def _destroy_all_groups(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Destroy every group that upstream created; upstream only drops them."""
    from torch import distributed

    state = sys.modules[_PARALLEL_STATE]
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


def _move_to_host(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Move any tensor to the host, and convert it to an array if requested."""
    import torch

    # Upstream's function does both for CUDA tensors only; a tensor on the host or on another
    # accelerator comes back unchanged, and the dispatcher then fails to use it as an array.
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor) or tensor.is_cuda:
            return call(tensor, as_numpy=as_numpy, record_stream=record_stream)
        on_host = tensor.detach().to("cpu")
        return on_host.numpy() if as_numpy else on_host

    return move(*args, **kwargs)


def _empty_statistics(_original: Any) -> Any:
    """Return the sums of lengths and of squared lengths on the host, which upstream resets."""
    import torch

    return torch.zeros(2, dtype=torch.float64)


def _skip_if_built(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `make` only where the compiled index helpers are missing."""
    try:
        import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return call(*args, **kwargs)
    return None


def _nothing(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> None:
    """Do nothing in place of the original."""


PATCHES = (
    Patch(
        id="tensor_parallel.rng_notice",
        target=f"{_RANDOM}:CudaRNGStatesTracker.__init__",
        fn=_quieten,
        when=on_cpu,
        reason="reports each use of the device's generator as a change of the host's; on the host "
        "they are the same",
    ),
    Patch(
        id="parallel_state.destroy_groups",
        target=f"{_PARALLEL_STATE}:destroy_model_parallel",
        fn=_destroy_all_groups,
        when=off_cuda,
        reason="drops groups without destroying them; with gloo each keeps its threads, and "
        "repeated initialisation stalls the host",
    ),
    Patch(
        id="moe.tensor_to_host",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        fn=_move_to_host,
        reason="honours as_numpy for CUDA tensors only, so the all-to-all dispatcher gets a "
        "tensor instead of an array: TypeError",
    ),
    Patch(
        id="training.packed_statistics",
        target="megatron.training.training:_seqlen_stats_in_iteration",
        kind="set",
        fn=_empty_statistics,
        when=on_cpu,
        since="0.18",
        reason="is made on 'cuda:cpu' at the first packed batch: RuntimeError",
    ),
    Patch(
        id="training_init.dataset_helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        fn=_skip_if_built,
        reason="the wheel brings the compiled helpers but no Makefile, and a failed make ends the "
        "process",
    ),
    Patch(
        id="training_init.fused_kernels",
        target="megatron.legacy.fused_kernels:load",
        kind="replace",
        fn=_nothing,
        when=off_cuda,
        until="0.17",
        reason="looks for nvcc; without a CUDA toolkit it raises TypeError",
    ),
    Patch(
        id="training_init.jit_fuser",
        target="megatron.core.jit:jit_fuser",
        kind="set",
        fn=to(lambda function: function),
        when=off_cuda,
        reason="torch.compile needs a compiler for the device and gains nothing here",
    ),
    Patch(
        id="training_init.jit_warmup",
        target="megatron.training.initialize:_warmup_jit_function",
        kind="replace",
        fn=_nothing,
        when=off_cuda,
        reason="warms up fused functions that nothing compiles here",
    ),
)
