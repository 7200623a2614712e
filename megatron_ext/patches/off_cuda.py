"""Patches for machines without a CUDA device: CPU hosts and other vendors' accelerators.

Some of them skip code that upstream compiles with a CUDA toolkit or a Makefile before training.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from megatron_ext.devices import off_cuda, on_cpu
from megatron_ext.devices.translate import to
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.registry import REGISTRY

_RANDOM = "megatron.core.tensor_parallel.random"
_PARALLEL_STATE = "megatron.core.parallel_state"

PATCHES = PatchTable()


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("CPU RNG state changed")


@PATCHES.row(
    "tensor_parallel.rng_notice",
    f"{_RANDOM}:CudaRNGStatesTracker.__init__",
    when=on_cpu,
)
def _quieten(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron reports every use of the host's generator as an unexpected change, but here the host
    is the device.
    """
    logger = logging.getLogger(_RANDOM)
    if _is_other not in logger.filters:
        logger.addFilter(_is_other)
        REGISTRY.undo.callback(logger.removeFilter, _is_other)
    call(*args, **kwargs)


@PATCHES.row(
    "parallel_state.destroy_groups",
    f"{_PARALLEL_STATE}:destroy_model_parallel",
    when=off_cuda,
)
def _destroy_all_groups(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron drops groups without destroying them, so their gloo threads stall later
    initialisations.
    """
    from torch import distributed

    state = sys.modules[_PARALLEL_STATE]
    groups = list(state._global_process_group_list or ())
    call(*args, **kwargs)
    # Upstream's reset misses some variables, which would still refer to ranks and
    # groups that no longer exist. All variables start out as None except for one dict,
    # whose name differs between releases.
    for name, value in list(vars(state).items()):
        if not (name.startswith("_") and name.isupper()):
            continue  # HAVE_EINOPS, for example, is not state
        if isinstance(value, dict):
            value.clear()
        else:
            setattr(state, name, None)
    if not distributed.is_initialized():
        return
    existing_groups = distributed.distributed_c10d._world.pg_map
    for group in groups:
        # The default group is None. A script may already have destroyed some groups.
        if group is not None and group in existing_groups:
            distributed.destroy_process_group(group)


@PATCHES.row(
    "moe.tensor_to_host",
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
)
def _move_to_host(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron honours as_numpy only for CUDA tensors, so the all-to-all dispatcher raises
    TypeError.
    """
    import torch

    # Upstream's function copies and converts only CUDA tensors. Any other tensor comes
    # back unchanged, and the dispatcher then fails to use it as an array. `move` has
    # upstream's parameters, so callers may pass arguments by position or by name.
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor) or tensor.is_cuda:
            return call(tensor, as_numpy=as_numpy, record_stream=record_stream)
        on_host = tensor.detach().to("cpu")
        return on_host.numpy() if as_numpy else on_host

    return move(*args, **kwargs)


@PATCHES.row(
    "training.packed_statistics",
    "megatron.training.training:_seqlen_stats_in_iteration",
    kind="set",
    when=on_cpu,
    since=(0, 18),
)
def _empty_statistics(_original: Any) -> Any:
    """Megatron creates this tensor on 'cuda:cpu' at the first packed batch (RuntimeError)."""
    import torch

    return torch.zeros(2, dtype=torch.float64)


@PATCHES.row(
    "training_init.dataset_helpers", "megatron.core.datasets.utils:compile_helpers"
)
def _skip_if_built(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The wheel contains the compiled helpers but no Makefile, and a failed make terminates the
    process.
    """
    try:
        import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return call(*args, **kwargs)
    return None


@PATCHES.row(
    "training_init.fused_kernels",
    "megatron.legacy.fused_kernels:load",
    kind="replace",
    when=off_cuda,
    until=(0, 17),
)
@PATCHES.row(
    "training_init.jit_warmup",
    "megatron.training.initialize:_warmup_jit_function",
    kind="replace",
    when=off_cuda,
)
def _nothing(
    _call: Call,
    _instance: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> None:
    """Megatron compiles and warms up fused functions, which raises TypeError without a CUDA
    toolkit.
    """


PATCHES.row(
    "training_init.jit_fuser",
    "megatron.core.jit:jit_fuser",
    "torch.compile needs a compiler for the device and does not speed up training here",
    kind="set",
    when=off_cuda,
)(to(lambda function: function))
