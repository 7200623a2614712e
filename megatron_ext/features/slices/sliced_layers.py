"""Patches with which Megatron's layers compute a slice of a sequence.

They act only inside `KeptState.of`, which `SlicedCompute` opens for the actions of sliced tables.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name

SLICES = "slices"
"""Name of the state that slices keep between steps (`Runtimes.kept_by_feature`)."""
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_MTP = "megatron.core.transformer.multi_token_prediction"
_MOE = "megatron.core.transformer.moe"


def running_slice() -> Any:
    """Return the running slice; None outside slices."""
    configuration = active.active()
    if configuration is None:
        return None
    runtimes: Any = configuration.runtimes
    if runtimes is None or SLICES not in runtimes.kept_by_feature:
        return None
    return runtimes.kept_by_feature[SLICES].running


PATCHES = PatchTable(feature="schedules", of=running_slice)


@PATCHES.row(
    "slices.attention",
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
    order=-10,  # the patch for packed sequences must see the slice's
)
@PATCHES.row(
    "slices.te_attention",
    "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
    required=False,  # Transformer Engine may be missing; the first step checks the effect
)
def _attend(running: Any, call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron attends only to the tokens that it gets, but those of a slice need all earlier
    ones.
    """
    return running.attend(call, instance, *args, **kwargs)


@PATCHES.row("slices.packed", "megatron.core.models.gpt.gpt_model:GPTModel.forward")
def _begin_forward(
    running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron mistakes the packed sequences of a whole micro-batch for those of the slice."""
    arguments = by_name(call, args, kwargs)
    running.begin_forward(arguments)
    return call(**arguments)


@PATCHES.row(
    "slices.rotary_positions",
    f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward",
)
@PATCHES.row(
    "slices.yarn_positions",
    f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
)
def _positions(
    running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron counts positions from the first token that it gets."""
    return running.positions(call, by_name(call, args, kwargs))


@PATCHES.row(
    "slices.cached_positions",
    f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.get_cached_cos_sin",
)
def _cached_positions(
    _slice: Any, call: Call, instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron keeps the positions of the first tokens for fused kernels, but a slice has
    others.
    """
    instance.max_seq_len_cached = (
        0  # drop positions of another slice, or of a whole sequence
    )
    call(*args, **kwargs)
    instance.max_seq_len_cached = 0
    # Return all positions: Megatron returns only as many as the longest packed sequence has, but a
    # slice may have more tokens.
    return instance.cos_cached, instance.sin_cached


@PATCHES.row(
    "slices.predicted_inputs", f"{_MTP}:MultiTokenPredictionLayer._get_embeddings"
)
def _look_ahead(
    running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron shifts tokens and positions without saying which is which, and both look the
    same.
    """
    arguments = by_name(call, args, kwargs)
    running.look_ahead(arguments["input_ids"], arguments["position_ids"])
    return call(**arguments)


@PATCHES.row(
    "slices.packed_batch",
    "megatron.core.utils:flatten_batch_for_packed_sequences",
    since=(0, 19),
)
def _keep_bounds(
    _running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> dict[str, Any]:
    """Megatron treats a bound at the end of a slice as the last one, and drops those after it."""
    batch = by_name(call, args, kwargs)["batch"]
    bounds = {
        name: batch[name]
        for name in ("cu_seqlens", "cu_seqlens_padded")
        if name in batch
    }
    return {**call(*args, **kwargs), **bounds}


@PATCHES.row(
    "slices.packed_flops",
    "megatron.training.training:update_seqlen_stats_from_cu_seqlens",
    since=(0, 18),
)
def _count_once(
    running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> None:
    """Megatron's script counts the floating-point operations of a micro-batch in each slice."""
    if running.number == 0:
        call(*args, **kwargs)


@PATCHES.row("slices.predicted_tokens", f"{_MTP}:roll_tensor")
def _roll(running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron stops at the end of the slice, but its last token predicts tokens of the next
    one.
    """
    return running.roll(call, *args, **kwargs)


@PATCHES.row("slices.route", f"{_MOE}.router:TopKRouter.routing")
def _route(running: Any, call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron leaves balancing losses to recomputation, which lacks the counts of other slices."""
    return running.route(call, instance, *args, **kwargs)


@PATCHES.row("slices.balance", f"{_MOE}.moe_utils:switch_load_balancing_loss_func")
def _balance(
    running: Any, _call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron balances the tokens of a slice as if the micro-batch had no others."""
    return running.balance(*args, **kwargs)


@PATCHES.row("slices.z_loss", f"{_MOE}.moe_utils:z_loss_func")
def _z_loss(
    running: Any, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron averages over the tokens that it gets, which are those of one slice."""
    return running.z_loss(call(*args, **kwargs))
