"""Attention over packed sequences for machines without Transformer Engine.

A packed batch (`qkv_format="thd"`) holds several sequences one after the other, and a token attends
to its own only: the mask is block-diagonal. Upstream's own `DotProductAttention` refuses such
batches; here it computes one sequence after the other, which is that mask without its zero blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ext.compat.conditions import on_cpu, without_te
from megatron_ext.errors import UserError
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

if TYPE_CHECKING:
    import torch

__all__ = ["PATCHES", "sequences"]

_TENSORS = ("query", "key", "value")


def _attend(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the attention of each sequence of a packed batch; of any other batch as it is.

    Args:
        call: `DotProductAttention.forward`.
        instance: The layer.
        args: Query, key and value, `[t, heads, width]` each if the batch is packed, and more.
        kwargs: Further arguments by name.

    Returns:
        `[t, heads * width]`; zeros for tokens of no sequence, which pad the batch.

    Raises:
        UserError: Only Transformer Engine computes such a batch.
    """
    given = dict(zip((*_TENSORS, "attention_mask"), args, strict=False), **kwargs)
    packed = given.pop("packed_seq_params", None)
    if packed is None:
        return call(*args, **kwargs)
    _check(packed, given)
    num_tokens, width = len(given["query"]), instance.hidden_size_per_partition
    parts, done = [], 0
    for begin, end in sequences(packed, num_tokens):
        parts += [given["value"].new_zeros(begin - done, width)] if begin > done else []
        parts.append(_of_one(call, given, begin, end))
        done = end
    if done < num_tokens or not parts:
        parts.append(given["value"].new_zeros(num_tokens - done, width))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _of_one(call: Call, given: dict[str, Any], begin: int, end: int) -> torch.Tensor:
    """Return the attention of one sequence: `[length, heads * width]`."""
    own = {name: given[name][begin:end].unsqueeze(1) for name in _TENSORS}
    result: torch.Tensor = call(**{**given, **own, "attention_mask": None})
    return result.squeeze(1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch  # rows are imported before torch may be

    return torch.cat(parts)


def sequences(packed: Any, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield where each sequence of a packed batch begins and ends, without empty ones.

    Args:
        packed: Upstream's `PackedSeqParams`. Its `cu_seqlens_q`, int32 `[sequences + 1]`, are the
            sums of the lengths from 0 on; `cu_seqlens_q_padded` those of the lengths with padding.
        num_tokens: Tokens of the batch.

    Raises:
        UserError: They do not lie in the batch in ascending order.
    """
    sums: list[int] = packed.cu_seqlens_q.tolist()
    padded = packed.cu_seqlens_q_padded
    starts: list[int] = sums if padded is None else padded.tolist()
    spans = [
        (start, start + after - before)
        for start, before, after in zip(starts, sums, sums[1:], strict=False)
    ]
    ends = [0, *(edge for span in spans for edge in span), num_tokens]
    if len(starts) != len(sums) or ends != sorted(ends):
        raise UserError(
            f"cu_seqlens_q {sums} with starts {starts} does not fit a packed batch of {num_tokens} "
            f"tokens; the sums of lengths must ascend from 0 to at most that number"
        )
    yield from ((begin, end) for begin, end in spans if end > begin)


def _empty_statistics(_original: Any) -> torch.Tensor:
    """Return the sums of lengths and of squared lengths on the host, which upstream resets."""
    import torch

    return torch.zeros(2, dtype=torch.float64)


def _check(packed: Any, given: dict[str, Any]) -> None:
    if packed.qkv_format == "thd" and len(given["query"]) == len(given["key"]):
        return
    raise UserError(
        f"attention with qkv_format {packed.qkv_format!r}, {len(given['query'])} queries and "
        f"{len(given['key'])} keys needs Transformer Engine, which is not here; install it, or "
        "pack self-attention with qkv_format 'thd'"
    )


PATCHES = (
    Patch(
        id="attention.packed",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        fn=_attend,
        when=without_te,
        reason="refuses packed sequences (--sft), which it leaves to Transformer Engine: "
        "AssertionError",
    ),
    Patch(
        id="training.packed_statistics",
        target="megatron.training.training:_seqlen_stats_in_iteration",
        kind="set",
        fn=_empty_statistics,
        when=on_cpu,
        since="0.18",
        reason="is made on 'cuda:cpu' at the first packed batch: RuntimeError",
    ),
)
