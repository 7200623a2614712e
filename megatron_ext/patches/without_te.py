"""Patches for machines without Transformer Engine, where Megatron's own layers replace TE's.

Without Transformer Engine, upstream tests little beyond the import. Each patch fixes a feature that
upstream means to support but that fails.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import chain, pairwise
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
def _attend(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron supports packed sequences (--sft) only with Transformer Engine (AssertionError)."""
    # Query, key and value are `[t, heads, head_width]`; the result is `[t, heads * head_width]`.
    names = ("query", "key", "value", "attention_mask")
    inputs = dict(zip(names, args, strict=False), **kwargs)
    packed = inputs.pop("packed_seq_params", None)
    if packed is None:
        return call(*args, **kwargs)
    query = inputs["query"]
    key = inputs["key"]
    value = inputs["value"]
    width = instance.hidden_size_per_partition
    num_tokens, num_heads = query.shape[:2]
    head_width = width // num_heads
    # Since 0.19, multi-latent attention's values arrive padded to the key width.
    padding = value.shape[-1] - head_width
    value = value[..., :head_width]
    if packed.qkv_format != "thd":
        raise UserError(
            f"attention with qkv_format {packed.qkv_format!r} requires Transformer Engine, which "
            "is not installed; install it, or pack with qkv_format 'thd'"
        )
    # Import torch here: patch tables must not import it when they load.
    import torch

    # A packed batch holds several sequences back to back, and a token attends only to
    # tokens in its own sequence, so the mask is block-diagonal. One call per sequence
    # computes only the diagonal blocks.
    is_causal = "causal" in instance.attn_mask_type.name
    outputs = []
    next_token = 0
    query_spans = sequences(packed, num_tokens)
    key_spans = sequences(packed, len(key), "kv")
    spans = zip(query_spans, key_spans, strict=True)
    for (begin, end), (key_begin, key_end) in spans:
        # Tokens between sequences are padding; their output is 0.
        if begin > next_token:
            outputs.append(value.new_zeros(begin - next_token, width))
        num_queries = end - begin
        num_keys = key_end - key_begin
        mask = None
        if is_causal and num_keys != num_queries:
            mask = _mask_of_last_queries(num_queries, num_keys, query.device)
        sequence = {
            "query": query[begin:end].unsqueeze(1),
            "key": key[key_begin:key_end].unsqueeze(1),
            "value": value[key_begin:key_end].unsqueeze(1),
            "attention_mask": mask,
        }
        sequence_output = call(**{**inputs, **sequence})
        outputs.append(sequence_output.squeeze(1))
        next_token = end
    if next_token < num_tokens or not outputs:
        outputs.append(value.new_zeros(num_tokens - next_token, width))
    output = outputs[0]
    if len(outputs) > 1:
        output = torch.cat(outputs)
    if padding:
        by_head = output.unflatten(1, (num_heads, -1))
        padded = torch.nn.functional.pad(by_head, (0, padding))
        output = padded.flatten(1)
    return output


def _mask_of_last_queries(num_queries: int, num_keys: int, device: Any) -> Any:
    """Return a causal mask for queries that are the last tokens, bool `[1, 1, queries, keys]`."""
    import torch

    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    first_masked_diagonal = 1 + num_keys - num_queries
    return mask.triu_(first_masked_diagonal)[None, None]


def sequences(packed: Any, num_tokens: int, of: str = "q") -> Iterator[tuple[int, int]]:
    """Yield the first token of each sequence in a packed batch and the token after its last.

    Empty sequences are skipped. Upstream's `PackedSeqParams` holds cumulative lengths starting at
    0, int32 `[sequences + 1]`: `cu_seqlens_q` for queries, `cu_seqlens_kv` for keys and values, and
    `..._padded` for lengths that include padding.

    Raises:
        UserError: The sequences are not in ascending order or exceed the batch.
    """
    name = f"cu_seqlens_{of}"
    sums: list[int] = getattr(packed, name).tolist()
    padded_sums = getattr(packed, f"{name}_padded")
    starts = sums
    if padded_sums is not None:
        starts = padded_sums.tolist()
    lengths = [after - before for before, after in pairwise(sums)]
    spans = []
    for start, length in zip(starts, lengths, strict=False):
        spans.append((start, start + length))
    edges = [0, *chain.from_iterable(spans), num_tokens]
    if len(starts) != len(sums) or edges != sorted(edges):
        raise UserError(
            f"{name} {sums} with starts {starts} does not fit a packed batch of {num_tokens} "
            f"tokens; the cumulative lengths must ascend from 0 to at most that number"
        )
    for begin, end in spans:
        if end > begin:
            yield begin, end


@PATCHES.row("attention.head_widths", f"{_ATTENTION}.__init__", when=always)
def _accept_head_widths(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Multi-latent attention passes k_channels and v_channels, but only TE accepts them."""
    kwargs = dict(kwargs)
    # The layer does not need k_channels, because the key width follows from the tensors.
    kwargs.pop("k_channels", None)
    v_channels = kwargs.pop("v_channels", None)
    call(*args, **kwargs)
    # Upstream derives the output width from `kv_channels`, but it depends on the value tensor.
    if v_channels is not None:
        instance.hidden_size_per_partition = (
            v_channels * instance.num_attention_heads_per_partition
        )


@PATCHES.row(
    "norms.sequence_parallel",
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    when=always,
)
def _norm_with_sequence_parallel(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The torch norm, the only one available without TE and Apex, rejects sequence parallelism."""
    # A norm acts on each token separately, so it can run on a split sequence. Only its
    # parameters' gradients must be summed across the tensor-parallel group, which
    # `finalize_model_grads` does for parameters marked `sequence_parallel`.
    arguments = by_name(call, args, kwargs)
    config = arguments["config"]
    if not config.sequence_parallel:
        return call(*args, **kwargs)
    config_without = copy.copy(config)
    config_without.sequence_parallel = False
    norm = call(**{**arguments, "config": config_without})
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@PATCHES.row(
    "tensor_parallel.recompute_without_fp8",
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
)
def _without_fp8(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron treats the default, fp8=False, as FP8, so --recompute-modules layernorm raises
    NameError.
    """
    # Pass None, which means no FP8; upstream tests `is not None`.
    kwargs = {**kwargs}
    kwargs.pop("fp8", None)
    call(None, *args[1:], **kwargs)


@PATCHES.row(
    "mtp.inference_layers",
    "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
    since=(0, 20),
)
def _is_none(
    _call: Call,
    _instance: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> bool:
    """Without Transformer Engine, the classes are mocks, which isinstance rejects: no MTP layer."""
    return False


@PATCHES.row(
    "bert.te_spec",
    f"{_BERT_SPECS}:bert_layer_with_transformer_engine_spec",
    kind="set",
    creates=True,
)
def _local_spec(_original: Any) -> Any:
    """pretrain_bert.py always imports this name, which raises ImportError without Transformer
    Engine.
    """
    return sys.modules[_BERT_SPECS].bert_layer_local_spec


PATCHES.row(
    "moe.router_gemm",
    "megatron.core.transformer.moe.moe_utils:te_general_gemm",
    "The router tests `te_general_gemm is not None`, but the name is bound only if Transformer "
    "Engine is installed (NameError).",
    kind="set",
    creates=True,
    until=(0, 17),
)(to(None))
for _name, _value in (
    ("HAVE_TE", False),
    ("TELinear", None),
    ("TEColumnParallelLinear", None),
):
    PATCHES.row(
        f"attention.mla_{_name.lower()}",
        f"megatron.core.transformer.multi_latent_attention:{_name}",
        "Without Transformer Engine, this name is a mock, which isinstance rejects.",
        kind="set",
        until=(0, 17),
    )(to(_value))
