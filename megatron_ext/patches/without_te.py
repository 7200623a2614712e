"""Rows for machines without Transformer Engine: Megatron's own layers in place of TE's.

Upstream hardly tests more than the import without Transformer Engine. Each of these rows repairs a
feature that upstream intends to support and that fails.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from megatron_ext.devices.translate import to
from megatron_ext.errors import UserError
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, always, by_name

_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_BERT_SPECS = "megatron.core.models.bert.bert_layer_specs"


@cache
def _without_te() -> bool:
    return find_spec("transformer_engine") is None


PATCHES = PatchTable(when=_without_te)


@PATCHES.row("attention.packed", f"{_ATTENTION}.forward")
def _attend(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron leaves packed sequences (--sft) to Transformer Engine: AssertionError."""
    # Query, key and value are `[t, heads, width]`, the result `[t, heads * width]`; zeros for
    # tokens of no sequence, which pad the batch.
    names = ("query", "key", "value")
    given = dict(zip((*names, "attention_mask"), args, strict=False), **kwargs)
    packed = given.pop("packed_seq_params", None)
    if packed is None:
        return call(*args, **kwargs)
    query, width = given["query"], instance.hidden_size_per_partition
    num_tokens, heads = query.shape[:2]
    # From 0.19 on, values of multi-latent attention are padded here to the width of its keys.
    padded = given["value"].shape[-1] - width // heads
    given["value"] = given["value"][..., : width // heads]
    if packed.qkv_format != "thd":
        raise UserError(
            f"attention with qkv_format {packed.qkv_format!r} needs Transformer Engine, which is "
            "not here; install it, or pack with qkv_format 'thd'"
        )
    import torch  # rows are imported before torch may be

    # Such a batch holds several sequences one after the other, and a token attends to its own only:
    # the mask is block-diagonal. One sequence after the other is that mask without its zero blocks.
    parts, done, is_causal = [], 0, "causal" in instance.attn_mask_type.name
    spans, reaches = sequences(packed, num_tokens), sequences(packed, len(given["key"]), "kv")
    for (begin, end), (first, last) in zip(spans, reaches, strict=True):
        if begin > done:
            parts.append(given["value"].new_zeros(begin - done, width))
        own = {"query": query[begin:end].unsqueeze(1)}
        own |= {name: given[name][first:last].unsqueeze(1) for name in names[1:]}
        mask, ahead = None, last - first - (end - begin)
        if ahead and is_causal:  # the queries are the last tokens
            mask = torch.ones(end - begin, last - first, dtype=torch.bool, device=query.device)
            mask = mask.triu_(1 + ahead)[None, None]
        parts.append(call(**{**given, **own, "attention_mask": mask}).squeeze(1))
        done = end
    if done < num_tokens or not parts:
        parts.append(given["value"].new_zeros(num_tokens - done, width))
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    if padded:
        result = torch.nn.functional.pad(result.unflatten(1, (heads, -1)), (0, padded)).flatten(1)
    return result


def sequences(packed: Any, num_tokens: int, of: str = "q") -> Iterator[tuple[int, int]]:
    """Yield where each sequence of a packed batch begins and ends, without empty ones.

    Upstream's `PackedSeqParams` has the sums of the lengths from 0 on, int32 `[sequences + 1]`:
    `cu_seqlens_q` of queries, `cu_seqlens_kv` of keys and values, `..._padded` with padding.

    Raises:
        UserError: They do not lie in the batch in ascending order.
    """
    name = f"cu_seqlens_{of}"
    sums: list[int] = getattr(packed, name).tolist()
    padded = getattr(packed, f"{name}_padded")
    starts: list[int] = sums if padded is None else padded.tolist()
    spans = [
        (start, start + after - before)
        for start, before, after in zip(starts, sums, sums[1:], strict=False)
    ]
    ends = [0, *(edge for span in spans for edge in span), num_tokens]
    if len(starts) != len(sums) or ends != sorted(ends):
        raise UserError(
            f"{name} {sums} with starts {starts} does not fit a packed batch of {num_tokens} "
            f"tokens; the sums of lengths must ascend from 0 to at most that number"
        )
    yield from ((begin, end) for begin, end in spans if end > begin)


@PATCHES.row("attention.head_widths", f"{_ATTENTION}.__init__", when=always)
def _accept_head_widths(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Multi-latent attention passes k_channels and v_channels, which TE alone takes: TypeError."""
    kwargs = dict(kwargs)
    kwargs.pop("k_channels", None)  # equals the query's and follows from the tensors
    v_channels = kwargs.pop("v_channels", None)
    call(*args, **kwargs)
    # It determines the width of the output, which upstream derives from `kv_channels`.
    if v_channels is not None:
        instance.hidden_size_per_partition = v_channels * instance.num_attention_heads_per_partition


@PATCHES.row(
    "norms.sequence_parallel",
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    when=always,
)
def _norm_with_sequence_parallel(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The torch norm, the only one without TE and Apex, refuses sequence parallelism."""
    # A norm acts on each token, so it can run on a split sequence; only the gradients of its
    # parameters must be summed over the tensor-parallel group. `finalize_model_grads` does that for
    # parameters marked `sequence_parallel`.
    given = by_name(call, args, kwargs)
    if not given["config"].sequence_parallel:
        return call(*args, **kwargs)
    given["config"] = copy.copy(given["config"])
    given["config"].sequence_parallel = False
    norm = call(**given)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@PATCHES.row(
    "tensor_parallel.recompute_without_fp8",
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
)
def _without_fp8(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Megatron takes fp8=False, the default, for FP8: --recompute-modules layernorm: NameError."""
    others = {name: value for name, value in kwargs.items() if name != "fp8"}
    call(None, *args[1:], **others)


@PATCHES.row(
    "mtp.inference_layers",
    "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
    since=(0, 20),
)
def _is_none(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> bool:
    """Without Transformer Engine the classes are mocks, which isinstance refuses: no MTP layer."""
    return False


@PATCHES.row(
    "bert.te_spec",
    f"{_BERT_SPECS}:bert_layer_with_transformer_engine_spec",
    kind="set",
    creates=True,
)
def _local_spec(_original: Any) -> Any:
    """pretrain_bert.py always imports this name; without Transformer Engine: ImportError."""
    return sys.modules[_BERT_SPECS].bert_layer_local_spec


PATCHES.row(
    "moe.router_gemm",
    "megatron.core.transformer.moe.moe_utils:te_general_gemm",
    "The router tests `te_general_gemm is not None`, but the name is bound only if Transformer "
    "Engine is installed: NameError.",
    kind="set",
    creates=True,
    until=(0, 17),
)(to(None))
for _name, _value in (("HAVE_TE", False), ("TELinear", None), ("TEColumnParallelLinear", None)):
    PATCHES.row(
        f"attention.mla_{_name.lower()}",
        f"megatron.core.transformer.multi_latent_attention:{_name}",
        "Without Transformer Engine this is a mock, which isinstance refuses.",
        kind="set",
        until=(0, 17),
    )(to(_value))
