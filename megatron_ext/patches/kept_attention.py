"""Patches that let Megatron's layers compute a slice of a sequence.

They act only inside `KeptAttention.of`, which the runtime opens for the actions of sliced tables.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]

_RUNTIME = "megatron_ext.runtime.sliced_compute"


def _attention() -> Any:
    """Return what keeps keys and values; None if no runtime of slices is loaded."""
    runtime, found = sys.modules.get(_RUNTIME), active.active()
    return None if runtime is None or found is None else found.state(runtime.KeptAttention)


def _runs_slice() -> bool:
    found = _attention()
    return found is not None and found.running is not None


def _attend(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let the queries of a slice attend to all tokens up to its end."""
    return _attention().attend(call, instance, *args, **kwargs)


def _positions(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Return the rotary positions of a slice, from its first token on."""
    return call(*args, **{**kwargs, "offset": _attention().running.begin})


PATCHES = (
    Patch(
        id="slices.attention",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        fn=_attend,
        when=_runs_slice,
        order=-10,  # before what runs packed sequences, which slices refuse
        feature="schedules",
        reason="attends to the tokens that it is given, but those of a slice need all before them",
    ),
    Patch(
        id="slices.rotary_positions",
        target="megatron.core.models.common.embeddings.rotary_pos_embedding:"
        "RotaryEmbedding.forward",
        fn=_positions,
        when=_runs_slice,
        feature="schedules",
        reason="counts positions from the first token that it is given",
    ),
    Patch(
        id="slices.yarn_positions",
        target="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
        "YarnRotaryEmbedding.forward",
        fn=_positions,
        when=_runs_slice,
        feature="schedules",
        reason="counts positions from the first token that it is given",
    ),
)
