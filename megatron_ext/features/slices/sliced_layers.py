"""Patches that make Megatron's layers compute a slice of a sequence.

The patches apply only inside `KeptState.of`, which `SlicedCompute` enters for actions in tables
with slices.
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
    """Return the running slice, or None if no slice is running."""
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
    order=-10,  # outside the patch for packed sequences, which must see the slice's bounds
)
@PATCHES.row(
    "slices.te_attention",
    "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
    required=False,  # may not be installed; the first step checks the effect
)
def _attend(
    running: Any,
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron attends only to the tokens that it receives, but a slice's tokens must also attend
    to earlier slices.
    """
    return running.attend(call, instance, *args, **kwargs)


@PATCHES.row("slices.packed", "megatron.core.models.gpt.gpt_model:GPTModel.forward")
def _begin_forward(
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron mistakes a whole micro-batch's packed sequences for the slice's."""
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
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron counts positions from the first token that it receives."""
    arguments = by_name(call, args, kwargs)
    return running.positions(call, arguments)


@PATCHES.row(
    "slices.cached_positions",
    f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.get_cached_cos_sin",
)
def _cached_positions(
    _slice: Any,
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron caches the first tokens' positions for fused kernels, but a slice has different
    positions.
    """
    # Drop the cached positions, which may belong to another slice or to a whole sequence.
    instance.max_seq_len_cached = 0
    call(*args, **kwargs)
    instance.max_seq_len_cached = 0
    # Return all positions: Megatron returns only as many as the longest packed sequence
    # needs, but a slice may have more tokens.
    return instance.cos_cached, instance.sin_cached


@PATCHES.row(
    "slices.predicted_inputs", f"{_MTP}:MultiTokenPredictionLayer._get_embeddings"
)
def _look_ahead(
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron shifts tokens and positions in the same way, so a shifted tensor does not show which
    of the two it is.
    """
    arguments = by_name(call, args, kwargs)
    running.look_ahead(
        arguments["input_ids"],
        arguments["position_ids"],
    )
    return call(**arguments)


@PATCHES.row(
    "slices.packed_batch",
    "megatron.core.utils:flatten_batch_for_packed_sequences",
    since=(0, 19),
)
def _keep_bounds(
    _running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> dict[str, Any]:
    """Megatron treats a bound at the end of a slice as the last one and drops all later bounds."""
    batch = by_name(call, args, kwargs)["batch"]
    # Take the bounds first, because Megatron changes the batch.
    bounds = {}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in batch:
            bounds[name] = batch[name]
    flattened = call(*args, **kwargs)
    return {**flattened, **bounds}


@PATCHES.row(
    "slices.packed_flops",
    "megatron.training.training:update_seqlen_stats_from_cu_seqlens",
    since=(0, 18),
)
def _count_once(
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron's script would count the whole micro-batch's operations once per slice."""
    if running.number == 0:
        call(*args, **kwargs)


@PATCHES.row("slices.predicted_tokens", f"{_MTP}:roll_tensor")
def _roll(
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron stops shifting at the end of a slice, but a slice's last token predicts tokens of
    the next slice.
    """
    return running.roll(call, *args, **kwargs)


@PATCHES.row("slices.route", f"{_MOE}.router:TopKRouter.routing")
def _route(
    running: Any,
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron computes balancing losses only in a recomputation, but a slice's backward pass needs
    the counts from all slices.
    """
    return running.route(call, instance, *args, **kwargs)


@PATCHES.row("slices.balance", f"{_MOE}.moe_utils:switch_load_balancing_loss_func")
def _balance(
    running: Any,
    _call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron would balance the tokens of each slice separately, as if it were a micro-batch."""
    return running.balance(*args, **kwargs)


@PATCHES.row("slices.z_loss", f"{_MOE}.moe_utils:z_loss_func")
def _z_loss(
    running: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron averages over the tokens that it receives, which are only one slice's."""
    average = call(*args, **kwargs)
    return running.z_loss(average)
