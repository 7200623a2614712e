"""Patches on normalisation layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]


def _norm_with_sequence_parallel(
    call: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Build torch's norm although the sequence is split.

    A norm acts on each token, so a split sequence is no obstacle; only the gradients of its
    parameters have to be summed over the tensor-parallel group. `finalize_model_grads` does that
    for parameters that are marked.
    """
    config = kwargs.get("config", args[1] if len(args) > 1 else None)
    if config is None or not config.sequence_parallel:
        return call(*args, **kwargs)
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    if "config" in kwargs:
        kwargs = {**kwargs, "config": unsplit}
    else:
        args = (args[0], unsplit, *args[2:])
    norm = call(*args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


PATCHES = (
    Patch(
        id="norms.sequence_parallel",
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        fn=_norm_with_sequence_parallel,
        reason="the torch norm, the only one without Transformer Engine and Apex, refuses "
        "sequence parallelism",
    ),
)
