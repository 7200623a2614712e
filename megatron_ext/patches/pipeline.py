"""Patches on pipeline communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]

_SENT = ("tensor_send_prev", "tensor_send_next")


def _send_own_storage(
    call: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Send detached aliases, which keep the storage alive until the send is complete.

    The interleaved schedule frees an output (it swaps the tensor's `.data`) while its overlapped
    send is in flight. Holding the tensor does not help then; an alias has its own reference to the
    storage. Later upstream releases delay the freeing instead.
    """
    sent = {name: tensor.detach() for name in _SENT if (tensor := kwargs.get(name)) is not None}
    return call(*args, **{**kwargs, **sent})


PATCHES = (
    Patch(
        id="pipeline.sends_own_storage",
        target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        fn=_send_own_storage,
        reason="overlapped sends of the interleaved schedule read memory that is freed meanwhile: "
        "wrong activations, NaN or a hang",
    ),
)
