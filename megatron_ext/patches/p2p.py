"""Patches on pipeline communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]

_SENT = ("tensor_send_prev", "tensor_send_next")


def _send_own_storage(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Send detached aliases, which keep the storage alive until the send is complete."""
    # The interleaved schedule frees an output (it swaps the tensor's `.data`) while its overlapped
    # send is in flight. Holding the tensor does not help then; an alias has its own reference to
    # the storage. Later upstream releases delay the freeing instead.
    sent = {name: tensor.detach() for name in _SENT if (tensor := kwargs.get(name)) is not None}
    return call(*args, **{**kwargs, **sent})


def _has_messages_of_ours() -> bool:
    from megatron_ext.config import active

    return active.transport_only() is not None


def _in_steps(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.runtime.megatron_messages import stepwise

    return stepwise(call(*args, **kwargs))


def _over_ours(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.runtime.megatron_messages import communicate

    without_shape = {name: value for name, value in kwargs.items() if name != "tensor_shape"}
    done = communicate(**without_shape)
    return call(*args, **kwargs) if done is None else done


_ONE_STAGE = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def _is_carried_by_us() -> bool:
    from megatron_ext.config import active

    found = active.active()
    return found is not None and any((found.pipeline, found.transport_only, found.job))


def _allow_streams(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Check hyper-connections as in one stage, then the pipeline as of a model without them."""
    if not instance.enable_mhc_connections or instance.pipeline_model_parallel_size == 1:
        call(*args, **kwargs)
        return
    replace(instance, **_ONE_STAGE)  # a copy, for the checks of its own __post_init__
    recomputed = instance.recompute_modules
    instance.enable_mhc_connections = False
    if recomputed is not None:
        instance.recompute_modules = [name for name in recomputed if name != "mhc"]
    try:
        call(*args, **kwargs)
    finally:
        instance.enable_mhc_connections = True
    if recomputed is not None and "mhc" in recomputed:
        instance.recompute_modules.append("mhc")


PATCHES = (
    Patch(
        id="pipeline.sends_own_storage",
        target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        fn=_send_own_storage,
        reason="overlapped sends of the interleaved schedule read memory that is freed meanwhile: "
        "wrong activations, NaN or a hang",
    ),
    Patch(
        id="pipeline.steps_of_messages",
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        fn=_in_steps,
        when=_has_messages_of_ours,
        feature="transport",
        reason="does not announce the messages of a step, which a transport needs at its start",
    ),
    Patch(
        id="pipeline.messages",
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        fn=_over_ours,
        when=_has_messages_of_ours,
        feature="transport",
        reason="sends over torch.distributed only, not over --pipeline-transport",
    ),
    Patch(
        id="pipeline.streams",
        target="megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        fn=_allow_streams,
        when=_is_carried_by_us,
        since="0.20",
        feature="transport",
        reason="refuses hyper-connections with several stages, because its messages have "
        "hidden_size; ours have the shape of what a stage hands on, n streams wide",
    ),
)
