"""Patches on mixture-of-experts code that upstream only runs with Transformer Engine or on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.patches.conditions import without_te
from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]


def _absent(_original: Any) -> None:
    """Give a name the value that stands for "not installed"."""


def _move_to_host(
    call: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Move any tensor to the host, and make it an array where that was asked for.

    Upstream's function does both for CUDA tensors only; a tensor that is on the host already, or on
    another accelerator, comes back as it was, and the dispatcher then fails to use it as an array.
    """
    import torch

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor) or tensor.is_cuda:
            return call(tensor, as_numpy=as_numpy, record_stream=record_stream)
        on_host = tensor.detach().to("cpu")
        return on_host.numpy() if as_numpy else on_host

    return move(*args, **kwargs)


PATCHES = (
    Patch(
        id="moe.router_gemm",
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        kind="set",
        fn=_absent,
        creates=True,
        when=without_te,
        until="0.17",
        reason="the router asks `te_general_gemm is not None`, but the name is bound only where "
        "Transformer Engine is installed: NameError",
    ),
    Patch(
        id="moe.tensor_to_host",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        fn=_move_to_host,
        reason="as_numpy is honoured for CUDA tensors only, so the all-to-all dispatcher gets a "
        "tensor where it needs an array: TypeError",
    ),
)
