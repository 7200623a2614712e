"""Patches that let Megatron's layers compute a slice of a sequence.

They act only inside `KeptState.of`, which the runtime opens for the actions of sliced tables.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]

_RUNTIME = "megatron_ext.runtime.sliced_compute"


def _state() -> Any:
    """Return what layers keep; None if no runtime of slices is loaded."""
    runtime, found = sys.modules.get(_RUNTIME), active.active()
    return None if runtime is None or found is None else found.state(runtime.KeptState)


def _runs_slice() -> bool:
    found = _state()
    return found is not None and found.running is not None


def _attend(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let the queries of a slice attend to all tokens up to its end."""
    return _state().attend(call, instance, *args, **kwargs)


def _positions(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the rotary positions of a slice, from its first token on."""
    return call(*args, **{**kwargs, "offset": _state().running.begin})


def _balance(_call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Weigh the probabilities of a slice by the tokens of all slices."""
    return _state().balance(*args, **kwargs)


def _share(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the average over a slice a part of the average over the micro-batch."""
    return call(*args, **kwargs) * _state().running.share


def _patch(name: str, target: str, fn: Any, reason: str, order: int = 0) -> Patch:
    return Patch(
        id=f"slices.{name}",
        target=f"megatron.core.{target}",
        fn=fn,
        when=_runs_slice,
        order=order,
        feature="schedules",
        reason=reason,
    )


_POSITIONS = "counts positions from the first token that it is given"
_EMBEDDINGS = "models.common.embeddings"

PATCHES = (
    _patch(
        "attention",
        "transformer.dot_product_attention:DotProductAttention.forward",
        _attend,
        "attends to the tokens that it is given, but those of a slice need all before them",
        order=-10,  # before what runs packed sequences, which slices refuse
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
        "balance",
        "transformer.moe.moe_utils:switch_load_balancing_loss_func",
        _balance,
        "balances the tokens of a slice, as if there were no others in the micro-batch",
    ),
    _patch(
        "z_loss",
        "transformer.moe.moe_utils:z_loss_func",
        _share,
        "averages over the tokens that it is given, those of a slice",
    ),
)
