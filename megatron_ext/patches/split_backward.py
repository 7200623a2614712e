"""Patches that let schedules compute weight gradients after input gradients.

Layer patches act only inside `SplitBackward.defer`, which the executor enters for an I's backward
pass.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable

_LAYERS = "megatron.core.tensor_parallel.layers"

PATCHES = PatchTable(feature="schedules")


def _splits() -> Any:
    """Return the active runtime's deferred weight gradients; None before the first step."""
    in_force = active.active()
    runtimes: Any = None if in_force is None else in_force.runtimes
    return None if runtimes is None else runtimes.splits


def _deferring() -> Any:
    """Return the collector of deferred weight gradients, or None if no I is running."""
    splits = _splits()
    return splits if splits is not None and splits.is_deferring else None


@PATCHES.row(
    "split_backward.linear",
    f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.backward",
    of=_deferring,
)
def _linear(
    splits: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron computes a linear layer's gradients together, but W must compute one of them."""
    from megatron_ext.runtime.split_linear import linear_backward

    return linear_backward(call, splits, *args, **kwargs)


def _splits_backward() -> bool:
    pipeline = active.pipeline()
    return pipeline is not None and pipeline.full.splits_backward


@PATCHES.row(
    "split_backward.config",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    when=_splits_backward,
)
def _config(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron's constructor rejects deferred weight gradients, but TE's layers support them only
    if built for it.
    """
    from megatron_ext.config.incompatible import why_not_split

    call(*args, **kwargs)
    reason = why_not_split(instance)
    if reason is not None:
        raise ScheduleError(reason)
    prepare_config(instance)


def prepare_config(config: Any) -> None:
    """Make Transformer Engine's layers defer their weight gradients to W.

    Call it after creating the `TransformerConfig` and before building the model. The call has no
    effect without Transformer Engine.
    """
    from megatron_ext.config.incompatible import uses_te

    if uses_te(config):
        # Megatron allows this only with its own expert communication overlap, but it
        # only checks that when a configuration is created.
        config.delay_wgrad_compute = True
        # A reduce-scatter during W would delay the input gradient, which I must deliver early.
        config.tp_comm_bulk_wgrad = False


@PATCHES.row(
    "split_backward.grouped_experts",
    "megatron.core.transformer.moe.grouped_gemm_util:ops",
    kind="set",
    # If the package is not installed, `ops` is None.
    when=lambda: find_spec("grouped_gemm") is not None,
    until=(0, 17),
)
def _grouped_ops(original: Any) -> Any:
    """Megatron computes grouped experts' gradients together, but W must compute one of them."""

    def gmm(*args: Any, **kwargs: Any) -> Any:
        # Check on every call: because the row is a `set`, its `when` is evaluated only
        # once, before any configuration is active.
        splits = _splits()
        if splits is None or not splits.is_in_use:
            return original.gmm(*args, **kwargs)
        from megatron_ext.runtime.split_grouped import grouped_product

        return grouped_product(original.gmm, splits, *args, **kwargs)

    return SimpleNamespace(**{**vars(original), "gmm": gmm})
