"""Patches on attention: multi-latent attention with Megatron's own layers instead of TE's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.patches.conditions import without_te
from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]

_MLA = "megatron.core.transformer.multi_latent_attention"


def _false(_original: Any) -> bool:
    return False


def _none(_original: Any) -> None:
    return None


def _accept_head_widths(
    call: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Let multi-latent attention state the widths of its key and value heads.

    The key's width is that of the query and follows from the tensors; the value's determines the
    width of the output, which upstream derives from `kv_channels`.
    """
    kwargs = dict(kwargs)
    kwargs.pop("k_channels", None)
    v_channels = kwargs.pop("v_channels", None)
    call(*args, **kwargs)
    if v_channels is not None:
        instance.hidden_size_per_partition = v_channels * instance.num_attention_heads_per_partition


PATCHES = (
    Patch(
        id="attention.head_widths",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        fn=_accept_head_widths,
        reason="multi-latent attention passes k_channels and v_channels, which only TE's attention "
        "accepts: TypeError",
    ),
    *(
        Patch(
            id=f"attention.mla_{name.lower()}",
            target=f"{_MLA}:{name}",
            kind="set",
            fn=value,
            when=without_te,
            until="0.17",
            reason="without Transformer Engine this is a mock, which isinstance refuses",
        )
        for name, value in (
            ("HAVE_TE", _false),
            ("TELinear", _none),
            ("TEColumnParallelLinear", _none),
        )
    ),
)
