"""Patches that let schedules compute weight gradients after input gradients.

Patches to backward passes act only inside `SplitBackward.defer`, which the executor enters for an
I's backward pass. Layers that are built to defer are switched off until then, so that any other
schedule computes their weight gradients as usual.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.registry import REGISTRY

_LAYERS = "megatron.core.tensor_parallel.layers"
_TE_LAYERS = "transformer_engine.pytorch.module"

_DELAYS_FOR_W = "megatron_ext_delays_for_w"
"""Marks a `TransformerConfig` whose `delay_wgrad_compute` was set by `prepare_config`. An attribute
of the object, because Megatron copies configurations for some layers."""

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

    if not uses_te(config):
        return
    if not config.delay_wgrad_compute:
        setattr(config, _DELAYS_FOR_W, True)
        restore = partial(_restore, tp_comm_bulk_wgrad=config.tp_comm_bulk_wgrad)
        REGISTRY.undo_change(config, restore)
    # Megatron allows this only with its own expert communication overlap, but it
    # only checks that when a configuration is created.
    config.delay_wgrad_compute = True
    # A reduce-scatter during W would delay the input gradient, which I must deliver early.
    config.tp_comm_bulk_wgrad = False


def _restore(config: Any, *, tp_comm_bulk_wgrad: bool) -> None:
    """Undo `prepare_config`: without the patches, layers built from now on would stay on."""
    setattr(config, _DELAYS_FOR_W, False)
    config.delay_wgrad_compute = False
    config.tp_comm_bulk_wgrad = tp_comm_bulk_wgrad


# The targets are in Transformer Engine, which may not be installed.
@PATCHES.row(
    "split_backward.te_linear",
    f"{_TE_LAYERS}.linear:Linear.__init__",
    required=False,
)
@PATCHES.row(
    "split_backward.te_layernorm_linear",
    f"{_TE_LAYERS}.layernorm_linear:LayerNormLinear.__init__",
    required=False,
)
@PATCHES.row(
    "split_backward.te_layernorm_mlp",
    f"{_TE_LAYERS}.layernorm_mlp:LayerNormMLP.__init__",
    required=False,
)
@PATCHES.row(
    "split_backward.te_grouped_linear",
    f"{_TE_LAYERS}.grouped_linear:GroupedLinear.__init__",
    required=False,
)
def _te_layer(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """TE's layers defer weight gradients in every backward pass, but only a schedule that splits
    them computes these later.
    """
    call(*args, **kwargs)
    store = getattr(instance, "wgrad_store", None)
    if store is not None and _defers_for_w(instance):
        # The layer keeps its queue, by which `PostponingLayers` recognises it.
        store.disable_delay_wgrad_compute()


def _defers_for_w(layer: Any) -> bool:
    """Return whether a new layer defers because of `prepare_config`, not because of the user."""
    # Megatron's layers have their configuration before Transformer Engine's constructor runs. It
    # may be older or younger than the active pipeline, so the pipeline does not matter.
    config = getattr(layer, "config", None)
    if config is not None:
        return getattr(config, _DELAYS_FOR_W, False)
    # A program's own module has passed the configuration's setting on.
    return _splits_backward()


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
