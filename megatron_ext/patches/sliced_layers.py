"""Patches that let Megatron's layers compute a slice of a sequence.

They act only inside `KeptState.of`, which the runtime opens for the actions of sliced tables.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch, by_name
from megatron_ext.upstream.signatures import megatron_arguments


def _state() -> Any:
    """Return what layers keep; None before the first step."""
    found = active.active()
    return None if found is None or found.runtimes is None else found.runtimes.kept


def _attend(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let the queries of a slice attend to all tokens up to its end."""
    return _state().attend(call, instance, *args, **kwargs)


def _begin_forward(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Give the layers of a model the packed sequences of the slice."""
    given = by_name(call, args, kwargs)
    _state().begin_forward(given)
    return call(**given)


def _positions(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the rotary positions of a slice, from its first token on."""
    return _state().positions(call, by_name(call, args, kwargs))


def _look_ahead(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Remember which tensors are tokens and which are positions."""
    given = by_name(call, args, kwargs)
    _state().look_ahead(given["input_ids"], given["position_ids"])
    return call(**given)


def _with_length_of_slice(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let a script's forward step read the length of the slice as that of sequences."""
    # Scripts give tensor-parallel ranks buffers of this length, which they receive the slice in.
    arguments, running = megatron_arguments(), _state().running
    if arguments is None:
        return call(*args, **kwargs)
    whole, arguments.seq_length = arguments.seq_length, running.end - running.begin
    try:
        return call(*args, **kwargs)
    finally:
        arguments.seq_length = whole


def _patch(
    name: str, target: str, fn: Any, reason: str, order: int = 0, *, required: bool = True
) -> Patch:
    return Patch(
        id=f"slices.{name}",
        target=f"megatron.core.{target}",
        fn=fn,
        when=lambda: (found := _state()) is not None and found.running is not None,
        order=order,
        feature="schedules",
        reason=reason,
        required=required,
    )


_POSITIONS = "counts positions from the first token that it is given"
_EMBEDDINGS = "models.common.embeddings"
_MTP = "transformer.multi_token_prediction"

PATCHES = (
    _patch(
        "attention",
        "transformer.dot_product_attention:DotProductAttention.forward",
        _attend,
        "attends to the tokens that it is given, but those of a slice need all before them",
        order=-10,  # what runs packed sequences then sees those of the slice
    ),
    _patch(
        "te_attention",
        "extensions.transformer_engine:TEDotProductAttention.forward",
        _attend,
        "attends to the tokens that it is given, but those of a slice need all before them",
        required=False,  # Transformer Engine may be missing; the first step checks the effect
    ),
    _patch(
        "packed",
        "models.gpt.gpt_model:GPTModel.forward",
        _begin_forward,
        "takes the packed sequences of a whole micro-batch for those of the slice",
    ),
    _patch(
        "sequence_length",
        "pipeline_parallel.schedules:forward_step",
        _with_length_of_slice,
        "lets scripts read batches of whole sequences, whose length is an argument",
    ),
    _patch(
        "predicted_inputs",
        f"{_MTP}:MultiTokenPredictionLayer._get_embeddings",
        _look_ahead,
        "shifts tokens and positions without a name, and both look the same",
    ),
    _patch(
        "predicted_tokens",
        f"{_MTP}:roll_tensor",
        lambda call, _instance, args, kwargs: _state().roll(call, *args, **kwargs),
        "ends with the slice, but its last token predicts tokens of the next one",
    ),
    _patch(
        "rotary_positions",
        f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward",
        _positions,
        _POSITIONS,
    ),
    _patch(
        "yarn_positions",
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
        _positions,
        _POSITIONS,
    ),
    _patch(
        "route",
        "transformer.moe.router:TopKRouter.routing",
        lambda call, instance, args, kwargs: _state().route(call, instance, *args, **kwargs),
        "leaves balancing losses to recomputation, in which the counts of other slices are missing",
    ),
    _patch(
        "balance",
        "transformer.moe.moe_utils:switch_load_balancing_loss_func",
        lambda _call, _instance, args, kwargs: _state().balance(*args, **kwargs),
        "balances the tokens of a slice, as if there were no others in the micro-batch",
    ),
    _patch(
        "z_loss",
        "transformer.moe.moe_utils:z_loss_func",
        lambda call, _instance, args, kwargs: _state().z_loss(call(*args, **kwargs)),
        "averages over the tokens that it is given, those of a slice",
    ),
)
