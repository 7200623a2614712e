"""Rows for machines without Transformer Engine: Megatron's own layers in place of TE's.

Upstream hardly tests more than the import without Transformer Engine. Each of these rows repairs a
feature that upstream intends to support and that fails.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from megatron_ext.compat.conditions import without_te
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]

_MLA = "megatron.core.transformer.multi_latent_attention"
_BERT_SPECS = "megatron.core.models.bert.bert_layer_specs"


def _false(_original: Any) -> bool:
    return False


def _none(_original: Any) -> None:
    return None


def _accept_head_widths(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Let multi-latent attention specify the widths of its key and value heads.

    The key's width equals the query's and follows from the tensors. The value's determines the
    width of the output, which upstream derives from `kv_channels`.
    """
    kwargs = dict(kwargs)
    kwargs.pop("k_channels", None)
    v_channels = kwargs.pop("v_channels", None)
    call(*args, **kwargs)
    if v_channels is not None:
        instance.hidden_size_per_partition = v_channels * instance.num_attention_heads_per_partition


def _local_spec(_original: Any) -> Any:
    """Make Megatron's own layers the script's default; there are no others here."""
    return sys.modules[_BERT_SPECS].bert_layer_local_spec


def _norm_with_sequence_parallel(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build torch's norm for a split sequence.

    A norm acts on each token, so it can run on a split sequence; only the gradients of its
    parameters must be summed over the tensor-parallel group. `finalize_model_grads` does that for
    parameters marked `sequence_parallel`.
    """
    config = kwargs.get("config", args[1] if len(args) > 1 else None)
    if config is None or not config.sequence_parallel:
        return call(*args, **kwargs)
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    if "config" in kwargs:
        kwargs = {**kwargs, "config": unsplit}
    else:
        args = (args[0], unsplit, *args[2:])
    norm = call(*args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def _without_fp8(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Pass `fp8=None`, the first parameter; upstream's default False counts as FP8."""
    others = {name: value for name, value in kwargs.items() if name != "fp8"}
    call(None, *args[1:], **others)


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
    Patch(
        id="bert.te_spec",
        target=f"{_BERT_SPECS}:bert_layer_with_transformer_engine_spec",
        kind="set",
        fn=_local_spec,
        creates=True,
        when=without_te,
        reason="pretrain_bert.py always imports this name, and without Transformer Engine the "
        "module's __getattr__ raises ImportError",
    ),
    Patch(
        id="moe.router_gemm",
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        kind="set",
        fn=_none,
        creates=True,
        when=without_te,
        until="0.17",
        reason="the router tests `te_general_gemm is not None`, but the name is bound only if "
        "Transformer Engine is installed: NameError",
    ),
    Patch(
        id="norms.sequence_parallel",
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        fn=_norm_with_sequence_parallel,
        reason="the torch norm, the only one without Transformer Engine and Apex, refuses "
        "sequence parallelism",
    ),
    Patch(
        id="tensor_parallel.recompute_without_fp8",
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        fn=_without_fp8,
        when=without_te,
        reason="tests `fp8 is not None`, but the default is False, so it always calls Transformer "
        "Engine: --recompute-modules layernorm ends in a NameError",
    ),
)
